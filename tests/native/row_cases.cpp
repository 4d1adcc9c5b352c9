// Norms, rotary, gates and mixture-of-experts routing.
#include "../../csrc/kernels.hpp"
#include "record.hpp"

namespace plait::cases {
namespace {

constexpr std::int64_t kRows = 37;

// x and gate lie in rows that are wider than they are.
void norms(Record& record, std::int64_t size, std::vector<float> x, const std::string& kind) {
  Draw draw(static_cast<std::uint64_t>(size));
  const MixerKernels& mixers = *kernels().mixers;
  const std::int64_t stride = size + 3;
  const std::vector<float> residual = draw.normals(kRows * size), gate = draw.normals(kRows * stride, 4);
  const std::vector<float> weight = draw.normals(size);
  std::vector<float> out(static_cast<std::size_t>(kRows * size)), sum(out.size());
  const std::string name = "norm/" + kind + "/" + std::to_string(size);
  const auto norm = [&](const float* before, float* total, const float* by, std::int64_t first,
                        std::int64_t rows) {
    const std::int64_t at = first * size;
    mixers.rms_norm(x.data() + first * stride, stride, before == nullptr ? nullptr : before + at,
                    total == nullptr ? nullptr : total + at, by == nullptr ? nullptr : by + first * stride,
                    stride, weight.data(), 1e-5f, out.data() + at, rows, size);
  };
  norm(nullptr, nullptr, nullptr, 0, kRows);
  record.floats(name + "/plain", out);
  for (std::int64_t r = 0; r < kRows; ++r) norm(nullptr, nullptr, nullptr, r, 1);
  record.floats(name + "/plain", out);
  norm(nullptr, nullptr, gate.data(), 0, kRows);
  record.floats(name + "/gated", out);
  norm(residual.data(), sum.data(), nullptr, 0, kRows);
  record.floats(name + "/residual", out);
  record.floats(name + "/sum", sum);
}

void gates(Record& record, std::int64_t rows, std::int64_t size, const std::vector<float>& x,
           const std::string& name) {
  std::vector<float> out(static_cast<std::size_t>(rows * size));
  kernels().mixers->silu_and_mul(x.data(), out.data(), rows, size);
  record.floats("silu/" + name, out);
}

// SiLU, and with it exp, where something happens: one value for all exponents, and both sides of their
// limits.
void limits(Record& record) {
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 1u << 16; ++bits)
    x.push_back(__builtin_bit_cast(float, bits << 16 | 0x1234));
  for (const float limit : {0.0f, 87.34f, 88.0f, 88.73f, 89.0f, 103.97f, 104.0f, 104.1f, 150.0f}) {
    const auto bits = __builtin_bit_cast(std::uint32_t, limit);
    for (std::uint32_t step = 0; step < 64; ++step) {
      x.push_back(__builtin_bit_cast(float, bits + step));
      x.push_back(-__builtin_bit_cast(float, bits - (limit == 0 ? 0 : step)));
    }
  }
  const std::int64_t count = std::ssize(x);
  x.resize(static_cast<std::size_t>(2 * count), 1.0f);
  gates(record, 1, count, x, "limits");
}

void rotary(Record& record, int heads, int dim, int half) {
  Draw draw(static_cast<std::uint64_t>(dim + half));
  const std::vector<float> x = draw.normals(kRows * heads * dim);
  const std::vector<float> cos = draw.uniforms(kRows * half), sin = draw.uniforms(kRows * half);
  std::vector<float> out(x.size());
  kernels().mixers->rotary(x.data(), cos.data(), sin.data(), out.data(), kRows, heads, dim, half);
  record.floats("rotary/" + std::to_string(dim) + "/" + std::to_string(half), out);
}

// With many ties: logits are multiples of 1/4. The outputs of experts, one row a visit, are then combined.
void mixture(Record& record, int experts, int top_k, bool renormalise) {
  Draw draw(static_cast<std::uint64_t>(experts));
  constexpr std::int64_t kSize = 53;
  std::vector<float> logits = draw.normals(kRows * experts, 2);
  for (float& x : logits) x = static_cast<float>(static_cast<std::int32_t>(x * 4)) * 0.25f;
  const std::size_t visits = static_cast<std::size_t>(kRows * top_k);
  std::vector<float> weights(visits);
  std::vector<std::int64_t> places(visits), sources(visits), starts(static_cast<std::size_t>(experts + 1));
  kernels().mixers->route({logits.data(), kRows, experts, top_k, renormalise, weights.data(), places.data(),
                           starts.data(), sources.data()});
  const std::string name = "experts/" + std::to_string(experts) + "-" + std::to_string(top_k);
  record.floats(name + "/weights", weights);
  record.integers(name + "/places", places);
  record.integers(name + "/starts", starts);
  record.integers(name + "/sources", sources);

  const std::vector<float> y = draw.normals(std::ssize(places) * kSize), shared = draw.normals(kRows * kSize);
  const std::vector<float> gate = draw.normals(kRows, 3);
  std::vector<float> out(static_cast<std::size_t>(kRows * kSize));
  const auto combine = [&](const float* beside, const float* by) {
    kernels().mixers->combine(y.data(), places.data(), weights.data(), beside, by, out.data(), kRows, top_k,
                              kSize);
  };
  combine(nullptr, nullptr);
  record.floats(name + "/combined", out);
  combine(shared.data(), nullptr);
  record.floats(name + "/shared", out);
  combine(shared.data(), gate.data());
  record.floats(name + "/gated", out);
}

}  // namespace

void row_cases(Record& record) {
  Draw draw(11);
  for (const std::int64_t size : {1, 16, 40, 100, 1024}) {
    norms(record, size, draw.normals(kRows * (size + 3)), "normal");
    norms(record, size, draw.anything(kRows * (size + 3)), "anything");
    gates(record, kRows, size, draw.normals(kRows * 2 * size, 8), std::to_string(size));
  }
  gates(record, 20, 1024, draw.anything(20 * 2 * 1024), "anything");
  limits(record);
  rotary(record, 3, 24, 5);
  rotary(record, 2, 64, 32);
  rotary(record, 1, 7, 0);
  mixture(record, 1, 1, false);
  mixture(record, 7, 3, true);
  mixture(record, 60, 8, false);
}

}  // namespace plait::cases
