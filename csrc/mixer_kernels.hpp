// Attention, recurrence, norms, rotary and mixture-of-experts kernels: their signatures.
//
// All of them are row-invariant: the arithmetic of a token depends neither on its neighbours in the batch, nor on
// where chunks end, nor on the number of threads, nor on the page size. Activations are float32. Rows are `stride`
// numbers apart and hold consecutive numbers. Sizes and strides count elements unless said.
#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

inline constexpr int kLargestHead = 256;  // numbers of an attention head
inline constexpr int kMostTaps = 16;      // of a convolution

// One step's batch (plait/kernels/batch.py), on the host. A chunk without tokens leaves its state as it is.
struct BatchView {
  const std::int32_t* query_start;  // [chunks + 1]
  const std::int32_t* context;      // [chunks]
  const std::int32_t* slots;        // [chunks]
  const std::int32_t* page_table;   // [chunks][table_width]
  const std::int64_t* exports;      // [num_exports][3]: chunk, tokens, target; ordered by chunk, then tokens
  std::int64_t chunks, table_width, num_exports;

  std::int64_t tokens() const { return query_start[chunks]; }
};

enum class CacheFormat : int { f32, bf16, f16, e4m3, int8 };

// One attention layer over all pages (plait/kernels/layout.py); pointers are to page 0, head 0.
struct PagesView {
  std::byte *k, *v;
  std::byte *k_scale, *v_scale;          // float32 [page_size]; null unless the format has scales
  std::int64_t page_bytes, head_bytes;   // from page to page, from head to head
  int page_size, kv_heads, head_dim;
  CacheFormat format;

  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
};

// One recurrent layer over all state units; pointers are to unit 0, group 0.
struct StatesView {
  float* conv;                            // [width - 1][group_channels]
  std::byte* temporal;                    // [value_heads][key_dim][value_dim]
  std::int64_t unit_bytes, group_bytes;   // from unit to unit, from group to group
  int groups, value_heads, key_dim, value_dim, width;
  CacheFormat format;  // of the temporal state

  int heads() const { return groups * value_heads; }
  int group_channels() const { return 2 * key_dim + value_heads * value_dim; }
  int channels() const { return groups * group_channels(); }
};

// Rows of q [heads][head_dim], k and v [kv_heads][head_dim], and gate (null without) as q; rotary turns the first
// 2 * rotary_half numbers of each head (none for 0); head norms are left out where their weight is null.
struct AttentionCall {
  const float *q, *k, *v, *gate;
  std::int64_t q_stride, k_stride, v_stride, gate_stride;
  const float *q_norm, *k_norm;
  const float *cos, *sin;  // [tokens][rotary_half]
  float* out;              // [tokens][heads * head_dim]
  int heads, rotary_half;
  float scale, eps;
};

// The convolution reads x [channels] in its rows; the rule reads b and a [heads]. `z` [heads * value_dim] and
// `norm` [value_dim] belong to the gated norm, which is left out where z is null.
struct DeltaCall {
  const float *x, *b, *a, *z;
  std::int64_t x_stride, b_stride, a_stride, z_stride;
  const float* conv_weight;  // [channels][width]; null: x is taken as it comes, after a convolution elsewhere
  const float *decay_rate, *dt_bias, *norm;
  float eps;
  float* out;  // [tokens][heads * value_dim]
};

// Which experts each row visits. Visits are sorted by expert, and by row within one: visit i of expert e lies at
// starts[e] <= i < starts[e + 1] and is one of row sources[i]. The k-th best expert of a row has the weight
// weights[row][k] and is visited at places[row][k].
struct RouteCall {
  const float* logits;  // [rows][experts]
  std::int64_t rows;
  int experts, top_k;
  bool renormalise;
  float* weights;         // [rows][top_k]
  std::int64_t* places;   // [rows][top_k]
  std::int64_t* starts;   // [experts + 1]
  std::int64_t* sources;  // [rows * top_k]
};

struct MixerKernels {
  // Writes k and v into the pages, then attends.
  void (*attention)(const BatchView&, const PagesView&, const AttentionCall&);
  // Convolution, delta rule and gated norm; advances and exports the states.
  void (*delta)(const BatchView&, const StatesView&, const DeltaCall&);
  // The convolution alone: x [tokens][channels] to out [tokens][channels].
  void (*conv)(const BatchView&, const StatesView&, const float* x, std::int64_t x_stride, const float* weight,
               float* out);
  // out = x / sqrt(mean(x²) + eps) · weight, times SiLU(gate) unless null. With `residual`: x + residual goes to
  // `sum` first, and is what is normed. All [rows][size], `x_stride` and `gate_stride` apart where named.
  void (*rms_norm)(const float* x, std::int64_t x_stride, const float* residual, float* sum, const float* gate,
                   std::int64_t gate_stride, const float* weight, float eps, float* out, std::int64_t rows,
                   std::int64_t size);
  // x [tokens][heads][dim] to out.
  void (*rotary)(const float* x, const float* cos, const float* sin, float* out, std::int64_t tokens, int heads,
                 int dim, int half);
  // x [rows][2 * size] to out [rows][size]: SiLU of the first half times the second.
  void (*silu_and_mul)(const float* x, float* out, std::int64_t rows, std::int64_t size);
  // Softmax of logits [rows][experts], and the choice of the top_k largest, ties to the lower id.
  void (*route)(const RouteCall&);
  // out[row] = Σ over ranks, in order, of weights[row][rank] · y[places[row][rank]], plus sigmoid(gate[row]) ·
  // shared[row] unless null (1 · shared[row] where only gate is null). y, shared and out have rows of `size`.
  void (*combine)(const float* y, const std::int64_t* places, const float* weights, const float* shared,
                  const float* gate, float* out, std::int64_t rows, int top_k, std::int64_t size);
};

}  // namespace plait
