// Linear layers, experts and embeddings in every weight format.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "../../csrc/kernels.hpp"
#include "../../csrc/pack.hpp"
#include "record.hpp"

namespace plait::cases {
namespace {

struct Format {
  WeightFormat format;
  const char* name;
  bool from_file;  // its weights come as blocks, not as floats
};
constexpr Format kAll[] = {
    {WeightFormat::f32, "f32", false},   {WeightFormat::bf16, "bf16", false},
    {WeightFormat::f16, "f16", false},   {WeightFormat::int8, "int8", false},
    {WeightFormat::q4_1, "int4", false}, {WeightFormat::q8_0, "q8_0", true},
    {WeightFormat::q4_0, "q4_0", true},  {WeightFormat::q4_1, "q4_1", true},
};

// Bytes of one GGUF block of 32 inputs.
std::int64_t block_bytes(WeightFormat format) {
  return format == WeightFormat::q8_0 ? 34 : format == WeightFormat::q4_0 ? 18 : 20;
}

// Blocks whose scales (and minimums) are halves from 2^-10 to 2^-2 of either sign, denormal or zero.
std::vector<std::uint8_t> draw_blocks(Draw& draw, WeightFormat format, std::int64_t count) {
  std::vector<std::uint8_t> out;
  const int halves = format == WeightFormat::q4_1 ? 2 : 1;
  for (std::int64_t b = 0; b < count; ++b) {
    for (int i = 0; i < halves; ++i) {
      const std::uint64_t r = draw.next();
      std::uint16_t half = static_cast<std::uint16_t>((r & 0x83ff) | (5 + (r >> 16) % 8) << 10);
      if (r % 31 == 0) half &= 0x83ff;
      if (r % 37 == 0) half &= 0x8000;
      out.push_back(static_cast<std::uint8_t>(half & 255));
      out.push_back(static_cast<std::uint8_t>(half >> 8));
    }
    for (std::int64_t i = 2 * halves; i < block_bytes(format); ++i) {
      out.push_back(static_cast<std::uint8_t>(draw.next() >> 56));
    }
  }
  return out;
}

// `count` packed matrices of one shape, one after another.
Bytes draw_panels(Draw& draw, const Format& kind, std::int64_t outputs, std::int64_t inputs,
                  std::int64_t count = 1) {
  const WeightFormat format = kind.format;
  const std::int64_t each = panels_of(outputs) * panel_bytes(format, inputs);
  Bytes panels(count * each);
  for (std::int64_t e = 0; e < count; ++e) {
    std::byte* to = panels.data() + e * each;
    if (kind.from_file) {
      repack(format, outputs, inputs, draw_blocks(draw, format, outputs * inputs / 32).data(), to);
    } else {
      std::vector<float> weights = draw.normals(outputs * inputs, 0.5f);
      std::fill_n(weights.begin() + inputs, inputs, 0.0f);  // an output without a scale
      pack(format, outputs, inputs, WeightFormat::f32, weights.data(), to);
    }
  }
  return panels;
}

// All rows in calls of `most` rows at a time.
std::vector<float> in_calls(const Matrix& weight, const std::vector<float>& x, std::int64_t most,
                            std::int64_t gap) {
  const std::int64_t rows = std::ssize(x) / weight.inputs, stride = weight.outputs + gap;
  std::vector<float> y(static_cast<std::size_t>(rows * stride - gap), -1.0f);
  for (std::int64_t r = 0; r < rows; r += most) {
    kernels().linear->linear(
        {weight, x.data() + r * weight.inputs, std::min(most, rows - r), y.data() + r * stride, stride});
  }
  std::vector<float> out;
  for (std::int64_t r = 0; r < rows; ++r)
    out.insert(out.end(), y.begin() + r * stride, y.begin() + r * stride + weight.outputs);
  return out;
}

void one_format(Record& record, const Format& kind, std::int64_t outputs, std::int64_t inputs) {
  const std::string name =
      std::string("linear/") + kind.name + "/" + std::to_string(outputs) + "x" + std::to_string(inputs);
  Draw draw(static_cast<std::uint64_t>(outputs * 1000 + inputs));
  const Bytes panels = draw_panels(draw, kind, outputs, inputs);
  record.bytes(name + "/panels", panels.data(), panels.size());
  const std::vector<float> bias = draw.normals(outputs);
  const Matrix matrix{kind.format, outputs, inputs, panels.data(), bias.data()};

  constexpr std::int64_t kRows = 97;
  std::vector<float> x = draw.normals(kRows * inputs);
  std::fill_n(x.begin() + 3 * inputs, inputs, 0.0f);
  for (std::int64_t k = 0; k < inputs; ++k) x[static_cast<std::size_t>(4 * inputs + k)] *= 1e-30f;
  for (const std::int64_t rows : {97, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 25, 31, 64}) {
    record.floats(name + "/y", in_calls(matrix, x, rows, rows % 3));
  }
  x[static_cast<std::size_t>(7 * inputs + inputs / 2)] = __builtin_inff();
  x[static_cast<std::size_t>(9 * inputs)] = __builtin_nanf("");
  const Matrix plain{kind.format, outputs, inputs, panels.data(), nullptr};
  record.floats(name + "/not-finite", in_calls(plain, x, 11, 0));
  record.floats(name + "/none", in_calls(plain, {}, 1, 0));

  const std::vector<std::int64_t> ids = {outputs - 1, 0, outputs / 2, 0};
  std::vector<float> rows(static_cast<std::size_t>(std::ssize(ids) * inputs));
  kernels().linear->embedding(matrix, ids.data(), std::ssize(ids), rows.data());
  record.floats(name + "/embedding", rows);
}

// Where integer sums are as large as they get: one sign, and more inputs than int32 could take at once.
void largest_sums(Record& record) {
  constexpr std::int64_t kInputs = 20'001;
  std::vector<float> weights(16 * kInputs, -3.0f);
  const std::vector<float> x(3 * kInputs, 5.0f);
  for (const WeightFormat format : {WeightFormat::int8, WeightFormat::q4_1}) {
    for (std::size_t i = 0; format == WeightFormat::q4_1 && i < weights.size(); i += 32) weights[i] = -18.0f;
    const Bytes panels(panel_bytes(format, kInputs));
    pack(format, 16, kInputs, WeightFormat::f32, weights.data(), panels.data());
    record.floats(format == WeightFormat::int8 ? "linear/int8/largest" : "linear/q4_1/largest",
                  in_calls({format, 16, kInputs, panels.data(), nullptr}, x, 3, 0));
  }
}

// Weights that come as 16 bits, every pattern of them.
void sixteen_bits(Record& record) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  for (const Format& from : {kAll[1], kAll[2]}) {
    for (const Format& to : {kAll[0], kAll[1], kAll[2]}) {
      const Bytes panels(16 * panel_bytes(to.format, 256));
      pack(to.format, 256, 256, from.format, patterns.data(), panels.data());
      const std::string name = std::string("pack/") + from.name + "/" + to.name;
      if (from.format == to.format) record.bytes(name, panels.data(), panels.size());
      std::vector<std::int64_t> ids(256);
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
      std::vector<float> rows(65536);
      kernels().linear->embedding({to.format, 256, 256, panels.data(), nullptr}, ids.data(), 256,
                                  rows.data());
      record.floats(name + "/rows", rows);
    }
  }
}

void experts(Record& record, const Format& kind) {
  constexpr std::int64_t kOutputs = 40, kInputs = 64, kExperts = 6, kRows = 11;
  Draw draw(7);
  const Bytes panels = draw_panels(draw, kind, kOutputs, kInputs, kExperts);
  const Matrix first{kind.format, kOutputs, kInputs, panels.data(), nullptr};
  const std::vector<std::int64_t> starts = {0, 3, 3, 4, 34, 34, 47};
  std::vector<std::int64_t> sources;
  for (int i = 0; i < 47; ++i) sources.push_back(draw.below(kRows));
  const std::vector<float> x = draw.normals(kRows * kInputs), inner = draw.normals(47 * kInputs);
  std::vector<float> y(47 * kOutputs);
  kernels().linear->experts({first, kExperts, starts.data(), sources.data(), x.data(), y.data()});
  record.floats(std::string("experts/") + kind.name + "/gathered", y);
  kernels().linear->experts({first, kExperts, starts.data(), nullptr, inner.data(), y.data()});
  record.floats(std::string("experts/") + kind.name + "/in-order", y);
}

}  // namespace

void linear_cases(Record& record) {
  for (const Format& kind : kAll) {
    // Neither whole panels nor, where that can be, whole blocks.
    one_format(record, kind, 45, kind.from_file ? 224 : 201);
    one_format(record, kind, 16, kind.from_file ? 32 : 7);
    one_format(record, kind, 3, 128);
    one_format(record, kind, 181, 64);  // more panels than are read side by side
    if (!kind.from_file) one_format(record, kind, 20, 1100);  // more inputs than one stretch
    experts(record, kind);
  }
  largest_sums(record);
  sixteen_bits(record);
}

}  // namespace plait::cases
