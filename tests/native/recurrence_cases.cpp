// Gated DeltaNet and its convolution, in every format of the state.
#include "../../csrc/kernels.hpp"
#include "batch.hpp"

namespace plait::cases {
namespace {

struct Shape {
  int groups, value_heads, key_dim, value_dim, width;
  bool conv, norm;

  int heads() const { return groups * value_heads; }
  std::int64_t values() const { return static_cast<std::int64_t>(heads()) * value_dim; }
  std::int64_t channels() const {
    return groups * (2 * key_dim + value_heads * static_cast<std::int64_t>(value_dim));
  }
  std::int64_t columns() const { return channels() + values() + 2 * heads(); }
};

std::int64_t whole_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// States of two layers (plait/kernels/layout.py), of which the second is in use.
class States {
 public:
  States(const Format& format, const Shape& shape, std::int64_t count)
      : format_(format), shape_(shape), memory_(count * unit_bytes()) {}

  StatesView view() const {
    std::byte* conv = memory_.data() + conv_bytes() + temporal_bytes();
    return {reinterpret_cast<float*>(conv),
            conv + conv_bytes(),
            unit_bytes(),
            group_bytes(),
            shape_.groups,
            shape_.value_heads,
            shape_.key_dim,
            shape_.value_dim,
            shape_.width,
            format_.format};
  }
  void record(Record& record, const std::string& name, std::int64_t unit) const {
    for (int group = 0; group < shape_.groups; ++group) {
      const std::byte* conv =
          memory_.data() + conv_bytes() + temporal_bytes() + unit * unit_bytes() + group * group_bytes();
      record.bytes(name + "/temporal/" + std::to_string(group), conv + conv_bytes(), temporal_size());
      if (shape_.conv) record.bytes(name + "/conv/" + std::to_string(group), conv, conv_size());
    }
  }

 private:
  std::int64_t conv_size() const { return 4 * (shape_.width - 1) * (shape_.channels() / shape_.groups); }
  std::int64_t temporal_size() const {
    return static_cast<std::int64_t>(format_.bytes) * shape_.value_heads * shape_.key_dim * shape_.value_dim;
  }
  std::int64_t conv_bytes() const { return whole_lines(conv_size()); }
  std::int64_t temporal_bytes() const { return whole_lines(temporal_size()); }
  std::int64_t group_bytes() const { return 2 * (conv_bytes() + temporal_bytes()); }
  std::int64_t unit_bytes() const { return shape_.groups * group_bytes(); }

  Format format_;
  Shape shape_;
  Bytes memory_;
};

struct Layer {
  Shape shape;
  std::vector<std::vector<float>> rows;  // of each request: x, z, b and a side by side
  std::vector<float> weight, decay_rate, dt_bias, norm;

  Layer(const Shape& shape, const std::vector<Cuts>& requests) : shape(shape) {
    Draw draw(static_cast<std::uint64_t>(shape.key_dim));
    rows = draw_rows(draw, requests, shape.columns());
    weight = draw.normals(shape.channels() * shape.width);
    decay_rate = draw.uniforms(shape.heads());
    for (float& rate : decay_rate) rate = rate < 0 ? rate : -rate;
    dt_bias = draw.normals(shape.heads());
    norm = draw.normals(shape.value_dim, 0.25f, 1);
  }

  void step(const std::vector<Span>& spans, const Batch& batch, const StatesView& states,
            std::vector<std::vector<float>>& out) const {
    const std::vector<float> x = gather(spans, rows, shape.columns());
    std::vector<float> y(static_cast<std::size_t>(batch.tokens() * shape.values()));
    DeltaCall call{};
    call.x = x.data();
    call.z = shape.norm ? call.x + shape.channels() : nullptr;
    call.b = call.x + shape.channels() + shape.values();
    call.a = call.b + shape.heads();
    call.x_stride = call.b_stride = call.a_stride = call.z_stride = shape.columns();
    call.conv_weight = shape.conv ? weight.data() : nullptr;
    call.decay_rate = decay_rate.data();
    call.dt_bias = dt_bias.data();
    call.norm = norm.data();
    call.eps = 1e-6f;
    call.out = y.data();
    kernels().mixers->delta(batch.view(), states, call);
    scatter(spans, y, shape.values(), out);
  }
};

// Positions at which every request that is longer exports its state.
constexpr std::int32_t kExports[] = {1, 2, 16, 37, 255, 256, 257};

// Exports of a step as (chunk, tokens of it, target): the k-th of request r goes to unit requests + 7 r + k.
std::vector<std::int64_t> exports_of(const std::vector<Span>& spans, std::int64_t requests) {
  std::vector<std::int64_t> out;
  for (std::int64_t chunk = 0; chunk < std::ssize(spans); ++chunk) {
    const Span& span = spans[static_cast<std::size_t>(chunk)];
    for (std::int64_t k = 0; k < std::ssize(kExports); ++k) {
      if (span.first < kExports[k] && kExports[k] <= span.last) {
        out.insert(out.end(), {chunk, kExports[k] - span.first, requests + 7 * span.request + k});
      }
    }
  }
  return out;
}

// Requests through a layer: the same outputs, states and snapshots however they are cut.
void run(Record& record, const std::string& name, const Format& format, const Shape& shape,
         const std::vector<Cuts>& requests) {
  const Layer layer(shape, requests);
  const std::int64_t count = std::ssize(requests);
  const States states(format, shape, 8 * count);
  auto out = empty_rows(requests, shape.values());
  for (std::size_t number = 0; number < steps_of(requests); ++number) {
    const std::vector<Span> spans = spans_of(requests, number);
    layer.step(spans, Batch(spans, {}, exports_of(spans, count)), states.view(), out);
  }
  for (std::int64_t r = 0; r < count; ++r) {
    const std::string request = name + "/" + std::to_string(r);
    record.floats(request + "/y", out[static_cast<std::size_t>(r)]);
    states.record(record, request + "/state", r);
    for (std::int64_t k = 0; k < 7; ++k)
      states.record(record, request + "/export-" + std::to_string(k), count + 7 * r + k);
  }
}

// The convolution alone, whose state is the same as within the layer.
void convolution(Record& record, const std::vector<Cuts>& requests) {
  const Shape shape{2, 2, 11, 13, 5, true, false};
  Draw draw(5);
  const auto rows = draw_rows(draw, requests, shape.channels() + 3);
  const std::vector<float> weight = draw.normals(shape.channels() * shape.width);
  const States states(kF32, shape, 8 * std::ssize(requests));
  auto out = empty_rows(requests, shape.channels());
  for (std::size_t number = 0; number < steps_of(requests); ++number) {
    const std::vector<Span> spans = spans_of(requests, number);
    const Batch batch(spans, {}, exports_of(spans, std::ssize(requests)));
    const std::vector<float> x = gather(spans, rows, shape.channels() + 3);
    std::vector<float> y(static_cast<std::size_t>(batch.tokens() * shape.channels()));
    kernels().mixers->conv(batch.view(), states.view(), x.data(), shape.channels() + 3, weight.data(),
                           y.data());
    scatter(spans, y, shape.channels(), out);
  }
  for (std::int64_t unit = 0; unit < 8 * std::ssize(requests); ++unit) {
    states.record(record, "conv/unit-" + std::to_string(unit), unit);
  }
  for (std::size_t r = 0; r < out.size(); ++r) record.floats("conv/" + std::to_string(r), out[r]);
}

}  // namespace

void recurrence_cases(Record& record) {
  // Chunks without tokens among them.
  const std::vector<Cuts> whole = {{1}, {300}, {2}, {70}, {37}};
  const std::vector<Cuts> ragged = {{0, 1, 1}, {5, 40, 40, 41, 256, 300}, {1, 2}, {69, 70}, one_by_one(37)};
  for (const Format& format : {kF32, kBf16, kF16}) {
    const std::string name = std::string("delta/") + format.name;
    for (const auto& requests : {whole, ragged}) {
      run(record, name + "/uneven", format, {2, 2, 24, 40, 4, true, true}, requests);
      run(record, name + "/no-conv", format, {1, 1, 33, 50, 2, false, true}, requests);
      run(record, name + "/no-norm", format, {1, 3, 17, 16, 6, true, false}, requests);
    }
    run(record, name + "/one", format, {3, 1, 1, 1, 2, true, true}, {{20}, {3}});
    run(record, name + "/one", format, {3, 1, 1, 1, 2, true, true}, {{19, 20}, {1, 3}});
  }
  convolution(record, whole);
  convolution(record, ragged);
}

}  // namespace plait::cases
