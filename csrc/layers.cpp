#include "layers.hpp"

#include <algorithm>
#include <chrono>

#include "kernels.hpp"
#include "pool.hpp"

namespace plait {
namespace {

enum Scratch { kWide = 8, kNarrow };

class StopWatch {
 public:
  LayerSeconds spent;

  // What has passed since the last lap belongs to `part`.
  void lap(double LayerSeconds::* part) {
    const Clock::time_point now = Clock::now();
    spent.*part += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

// y = x through all parts of a layer.
void linear(const Linear& layer, const float* x, std::int64_t rows, float* y) {
  const std::int64_t stride = layer.outputs();
  for (const Matrix& part : layer.parts) {
    kernels().linear->linear({part, x, rows, y, stride});
    y += part.outputs;
  }
}

// One call. `wide_` holds what comes out of in_proj and gate_up, `narrow_` what goes into out_proj and down.
class Pass {
 public:
  Pass(const Layers& layers, const Caches& caches, const BatchView& batch, const Stream& stream)
      : caches_(caches),
        batch_(batch),
        stream_(stream),
        hidden_(layers.hidden),
        tokens_(batch.tokens()),
        first_(stream.first) {
    std::int64_t wide = 0, narrow = 0;
    for (const Layer& layer : layers.layers) {
      wide = std::max(wide, layer.in_proj.outputs());
      narrow = std::max(narrow, layer.out_proj.inputs());
      if (!layer.mlp) continue;
      wide = std::max(wide, layer.mlp->gate_up.outputs());
      narrow = std::max(narrow, layer.mlp->down.inputs());
    }
    wide_ = scratch_of<float>(kWide, tokens_ * wide);
    narrow_ = scratch_of<float>(kNarrow, tokens_ * narrow);
  }

  void run(const Layer& layer) {
    norm(layer.input_norm);
    linear(layer.in_proj, stream_.x, tokens_, wide_);
    watch_.lap(&LayerSeconds::gemm);
    const std::int64_t row = layer.in_proj.outputs();
    if (const auto* attention = std::get_if<AttentionLayer>(&layer.mixer)) {
      mix(*attention, row);
      watch_.lap(&LayerSeconds::attention);
    } else {
      mix(std::get<DeltaLayer>(layer.mixer), row);
      watch_.lap(&LayerSeconds::recurrence);
    }
    linear(layer.out_proj, narrow_, tokens_, stream_.x);
    watch_.lap(&LayerSeconds::gemm);
    norm(layer.post_norm);
    if (!layer.mlp) return;
    linear(layer.mlp->gate_up, stream_.x, tokens_, wide_);
    kernels().mixers->silu_and_mul(wide_, narrow_, tokens_, layer.mlp->down.inputs());
    linear(layer.mlp->down, narrow_, tokens_, stream_.x);
    watch_.lap(&LayerSeconds::gemm);
  }

  // The sum takes the last output in, and x becomes the norm of it.
  void norm(const Norm& norm) {
    const float* x = first_ ? stream_.sum : stream_.x;
    const float* residual = first_ ? nullptr : stream_.sum;
    kernels().mixers->rms_norm(x, hidden_, residual, stream_.sum, nullptr, 0, norm.weight, norm.eps, stream_.x,
                               tokens_, hidden_);
    first_ = false;
    watch_.lap(&LayerSeconds::rest);
  }

  const LayerSeconds& spent() const { return watch_.spent; }

 private:

  void mix(const AttentionLayer& layer, std::int64_t row) {
    const PagesView& pages = caches_.pages[layer.index];
    const std::int64_t queries = static_cast<std::int64_t>(layer.heads) * pages.head_dim;
    const float* gate = wide_ + queries;
    const float* k = layer.gated ? gate + queries : gate;
    const float* v = k + static_cast<std::int64_t>(pages.kv_heads) * pages.head_dim;
    kernels().mixers->attention(batch_, pages,
                                {.q = wide_,
                                 .k = k,
                                 .v = v,
                                 .gate = layer.gated ? gate : nullptr,
                                 .q_stride = row,
                                 .k_stride = row,
                                 .v_stride = row,
                                 .gate_stride = row,
                                 .q_norm = layer.q_norm,
                                 .k_norm = layer.k_norm,
                                 .cos = stream_.cos,
                                 .sin = stream_.sin,
                                 .out = narrow_,
                                 .heads = layer.heads,
                                 .rotary_half = stream_.rotary_half,
                                 .scale = layer.scale,
                                 .eps = layer.eps});
  }

  void mix(const DeltaLayer& layer, std::int64_t row) {
    const StatesView& states = caches_.states[layer.index];
    const float* z = wide_ + states.channels();
    const float* b = z + static_cast<std::int64_t>(states.heads()) * states.value_dim;
    const float* a = b + states.heads();
    kernels().mixers->delta(batch_, states,
                            {.x = wide_,
                             .b = b,
                             .a = a,
                             .z = z,
                             .x_stride = row,
                             .b_stride = row,
                             .a_stride = row,
                             .z_stride = row,
                             .conv_weight = layer.conv_weight,
                             .decay_rate = layer.decay_rate,
                             .dt_bias = layer.dt_bias,
                             .norm = layer.norm,
                             .eps = layer.eps,
                             .out = narrow_});
  }

  const Caches& caches_;
  const BatchView& batch_;
  const Stream& stream_;
  const std::int64_t hidden_, tokens_;
  bool first_;
  float *wide_, *narrow_;
  StopWatch watch_;
};

}  // namespace

std::int64_t Linear::outputs() const {
  std::int64_t sum = 0;
  for (const Matrix& part : parts) sum += part.outputs;
  return sum;
}

LayerSeconds run_layers(const Layers& layers, const Caches& caches, const BatchView& batch,
                        const Stream& stream) {
  Pass pass(layers, caches, batch, stream);
  for (const Layer& layer : layers.layers) pass.run(layer);
  if (layers.last) pass.norm(*layers.last);
  return pass.spent();
}

}  // namespace plait
