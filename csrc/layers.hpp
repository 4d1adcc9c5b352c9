// Whole decoder layers: their kernels one after another, without a way back to Python in between.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "linear_kernels.hpp"
#include "mixer_kernels.hpp"

namespace plait {

// A linear layer: matrices of the same inputs whose outputs follow each other; at least one.
struct Linear {
  std::vector<Matrix> parts;

  std::int64_t inputs() const { return parts.front().inputs; }
  std::int64_t outputs() const;
};

struct Norm {
  const float* weight;
  float eps;
};

// Projected rows: q, gate (where `gated`), k, v.
struct AttentionLayer {
  int index;  // among the attention layers of the cache
  int heads;
  bool gated;
  const float *q_norm, *k_norm;  // null: no head norms
  float scale, eps;
};

// Projected rows: qkv, z, b, a.
struct DeltaLayer {
  int index;  // among the recurrent layers of the cache
  const float *conv_weight, *decay_rate, *dt_bias, *norm;
  float eps;
};

struct Mlp {
  Linear gate_up, down;
};

// x + mixer(norm(x)), then x + mlp(norm(x)). Without mlp it ends at the second norm.
struct Layer {
  Norm input_norm;
  Linear in_proj;
  std::variant<AttentionLayer, DeltaLayer> mixer;
  Linear out_proj;
  Norm post_norm;
  std::optional<Mlp> mlp;
};

// Layers that follow each other, over rows of `hidden` numbers, and the norm behind them, if it belongs to them.
struct Layers {
  std::int64_t hidden = 0;
  std::vector<Layer> layers;
  std::optional<Norm> last;
};

// The cache of all layers.
struct Caches {
  std::vector<PagesView> pages;
  std::vector<StatesView> states;
};

// What layers work on: float32 [tokens][hidden], changed in place, and cos and sin [tokens][rotary_half].
struct Stream {
  float* x;    // the last output; only written to where there is none yet
  float* sum;  // of all that came before it
  bool first;  // there is no last output yet: the sum alone is normed
  const float *cos, *sin;
  int rotary_half;
};

// Seconds by part; norms between layers, and what lies between kernels, are the rest.
struct LayerSeconds {
  double gemm = 0, attention = 0, recurrence = 0, rest = 0;
};

// Runs the layers. Afterwards x holds what came last (an output, or a norm where the last layer has no mlp or a norm
// is behind it), and the sum all before. The thread keeps the temporaries from call to call (pool.hpp, scratch).
LayerSeconds run_layers(const Layers& layers, const Caches& caches, const BatchView& batch,
                        const Stream& stream);

}  // namespace plait
