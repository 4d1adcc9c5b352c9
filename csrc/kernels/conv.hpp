// The short causal convolution with its state, and SiLU.
//
// A token's inputs are its own row and the width - 1 rows before it: of its chunk, and before the chunk of the
// state's columns (oldest first), which are zeros by definition where the chunk has no context.
#pragma once

#include "../mixer_kernels.hpp"
#include "rows.hpp"
#include "tasks.hpp"

namespace plait::PLAIT_ISA {

inline constexpr int kConvTokens = 32;  // tokens that share the transposed taps
inline constexpr int kConvAhead = 64;   // numbers of a row fetched ahead

// Where the inputs of one chunk and group lie, by position in the chunk; from -(width - 1) on.
class ConvInputs {
 public:
  ConvInputs(const BatchView& batch, const StatesView& states, std::int64_t chunk, int group, const float* x,
             std::int64_t stride)
      : rows_(x + batch.query_start[chunk] * stride + group * static_cast<std::int64_t>(states.group_channels())),
        columns_(column(states, batch.slots[chunk], group, 0)),
        stride_(stride),
        channels_(states.group_channels()),
        before_(states.width - 1),
        fresh_(batch.context[chunk] == 0) {}

  // Null: zeros.
  const float* at(std::int64_t token) const {
    if (token >= 0) return rows_ + token * stride_;
    return fresh_ ? nullptr : columns_ + (token + before_) * channels_;
  }

  static float* column(const StatesView& states, std::int64_t unit, int group, std::int64_t index) {
    std::byte* base = reinterpret_cast<std::byte*>(states.conv) + unit * states.unit_bytes + group * states.group_bytes;
    return reinterpret_cast<float*>(base) + index * states.group_channels();
  }

 private:
  const float *rows_, *columns_;
  std::int64_t stride_, channels_, before_;
  bool fresh_;
};

// SiLU of the convolution of `channels` channels from `first` of a group, for tokens begin .. end - 1 of a chunk, at
// most kConvTokens; weight [channels][width] is that of channel `first` on. Rows of `out` are whole runs of sixteen.
inline void convolve(const ConvInputs& inputs, const float* weight, int width, int first, int channels,
                     std::int64_t begin, std::int64_t end, float* out, std::int64_t out_stride, bool whole_runs) {
  const float* rows[kConvTokens + kMostTaps];
  for (std::int64_t t = begin - width + 1; t < end; ++t) {
    const float* row = inputs.at(t);
    rows[t - begin + width - 1] = row == nullptr ? nullptr : row + first;
  }
  by_sixteen(channels, [&](std::int64_t c, int n) {
    alignas(64) float taps[kMostTaps][16] = {};
    for (int lane = 0; lane < n; ++lane) {
      for (int j = 0; j < width; ++j) taps[j][lane] = weight[(c + lane) * width + j];
    }
    for (std::int64_t t = 0; t < end - begin; ++t) {
      // Rows lie pages apart, and there are more of them than a processor follows by itself.
      if (rows[t + width - 1] != nullptr) __builtin_prefetch(rows[t + width - 1] + c + kConvAhead);
      f32x16 sum = zero();
      for (int j = 0; j < width; ++j) {
        const float* row = rows[t + j];
        if (row != nullptr) sum = fma(load(taps[j]), load_up_to(row + c, n), sum);
      }
      store_up_to(out + t * out_stride + c, silu(sum), whole_runs ? 16 : n);
    }
  });
}

// The columns after `tokens` tokens of a chunk, into a unit. It may be the chunk's own: a column then moves to an
// older place, so going from the oldest up overwrites nothing that is still to be read.
inline void store_columns(const ConvInputs& inputs, const StatesView& states, int group, std::int64_t tokens,
                          std::int64_t unit) {
  const std::size_t bytes = static_cast<std::size_t>(states.group_channels()) * sizeof(float);
  for (std::int64_t j = 0; j < states.width - 1; ++j) {
    const float* from = inputs.at(tokens - states.width + 1 + j);
    float* to = ConvInputs::column(states, unit, group, j);
    if (from == nullptr) {
      std::memset(to, 0, bytes);
    } else if (from != to) {
      std::memcpy(to, from, bytes);
    }
  }
}

// All exports of a batch, then the chunks' own units. No thread may still read columns.
inline void store_all_columns(const BatchView& batch, const StatesView& states, const float* x, std::int64_t stride) {
  const std::int64_t count = batch.chunks * states.groups;
  const std::int64_t grain = ceil_div(16384, states.group_channels());
  parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t chunk = item / states.groups;
      const int group = static_cast<int>(item % states.groups);
      const std::int64_t length = batch.query_start[chunk + 1] - batch.query_start[chunk];
      if (length == 0) continue;
      const ConvInputs inputs(batch, states, chunk, group, x, stride);
      for (std::int64_t e = 0; e < batch.num_exports; ++e) {
        const std::int64_t* entry = batch.exports + 3 * e;
        if (entry[0] == chunk) store_columns(inputs, states, group, entry[1], entry[2]);
      }
      store_columns(inputs, states, group, length, batch.slots[chunk]);
    }
  });
}

}  // namespace plait::PLAIT_ISA
