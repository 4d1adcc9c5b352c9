// The inner loops of linear layers: R rows times P panels, sums in registers.
//
// Every output is one chain over k, in order: fused multiply-adds for floats; for integers exact sums, which
// are turned into floats at the same k in every tile. So an output's bits depend neither on R and P, nor on
// how rows and panels are dealt out to tiles and threads.
#pragma once

#include <type_traits>

#include "../simd/dot.hpp"
#include "activations.hpp"

namespace plait::PLAIT_ISA {

// How many sums of sixteen lanes a tile holds: what fits into registers beside weights and inputs.
inline constexpr int kSums = kRegisters / kRegs >= 32 ? 24 : kRegisters / kRegs >= 8 ? 6 : 2;
inline constexpr int kMaxRows = kSums >= 24 ? kSums / 2 : kSums;

// Panels that a tile of `rows` rows takes at once. One row needs several: one chain would wait for itself.
constexpr int panels_at_once(int rows) { return 4 * rows <= kSums ? 4 : 2 * rows <= kSums ? 2 : 1; }

// While rows are few, memory is what holds things up: weights are fetched this many bytes ahead, into the second
// cache. Into the first, which can wait for fewer lines at once, it is slower than not at all.
inline constexpr std::int64_t kAhead = 1536;
inline constexpr int kFewRows = 4;

struct TileInput {
  const std::int32_t* units;    // [units][R]
  const float* scales;          // [scales][R]
  const std::int32_t* offsets;  // [scales][R]
};

// Where a tile's R rows of 16 P outputs go, all of them: see `Ragged` for the end of a matrix.
struct TileOutput {
  float* y;
  std::int64_t stride;      // between rows
  const float* bias;        // of the first column, or null
  std::int64_t apart = 16;  // from one panel's outputs to the next's

  template <int R, int P>
  [[gnu::always_inline]] void get(f32x16 (&sums)[R][P]) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p] = load(y + r * stride + apart * p);
    }
  }
  template <int R, int P>
  [[gnu::always_inline]] void put(const f32x16 (&sums)[R][P]) const {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      if (bias) {
        const f32x16 b = load(bias + apart * p);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(y + r * stride + apart * p, sums[r][p] + b);
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(y + r * stride + apart * p, sums[r][p]);
      }
    }
  }
};

// Stands in for an output of R rows by fewer than 16 P columns: as wide as the tile wants, and copied back.
template <int R, int P>
class Ragged {
 public:
  Ragged(TileOutput real, std::int64_t columns) : real_(real), columns_(columns) {
    for (int r = 0; r < R; ++r) std::memcpy(y_ + 16 * P * r, real_.y + r * real_.stride, bytes());
    if (real_.bias) std::memcpy(bias_, real_.bias, bytes());
  }
  TileOutput wide() { return {y_, 16 * P, real_.bias ? bias_ : nullptr}; }
  void copy_back() const {
    for (int r = 0; r < R; ++r) std::memcpy(real_.y + r * real_.stride, y_ + 16 * P * r, bytes());
  }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(columns_) * sizeof(float); }

  TileOutput real_;
  std::int64_t columns_;
  float y_[R * 16 * P] = {};
  float bias_[16 * P] = {};
};

template <class Sum, int R, int P>
[[gnu::always_inline]] inline void clear(Sum (&sums)[R][P]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sums[r][p] = Sum{};
  }
}

[[gnu::always_inline]] inline f32x16 splat_unit(const std::int32_t* unit) {
  float value;
  std::memcpy(&value, unit, sizeof value);
  return splat(value);
}

// P panels that are read side by side, from their starts, `apart` bytes from one to the next. The next tile
// reads the panel behind each of them.
template <int P>
struct Panels {
  const std::byte* start[P];
  std::int64_t stride;

  Panels(const std::byte* first, std::int64_t panel_stride, std::int64_t apart) : stride(panel_stride) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) start[p] = first + p * apart;
  }
  template <class T>
  [[gnu::always_inline]] const T* at(int p, std::int64_t byte) const {
    return reinterpret_cast<const T*>(start[p] + byte);
  }
  // Fetches what will be read kAhead bytes after `byte`, at a panel's end what the next tile begins with.
  [[gnu::always_inline]] void fetch(std::int64_t byte) const {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) __builtin_prefetch(start[p] + byte + kAhead, 0, 2);
  }
  // Fetches this place of the next tile's panels.
  [[gnu::always_inline]] void fetch_next(std::int64_t byte) const {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) __builtin_prefetch(start[p] + stride + byte);
  }
};

// -- floats -------------------------------------------------------------------------------------------------

// Continues the chains in `sums` over the inputs from k = 0 of these pointers on.
template <class T, int R, int P>
[[gnu::always_inline]] inline void float_chains(f32x16 (&sums)[R][P], const Panels<P>& panels,
                                                const std::int32_t* units, std::int64_t inputs) {
  constexpr int kBytes = 16 * sizeof(T);
  constexpr int kStep = 4;
  const auto step = [&](std::int64_t k) __attribute__((always_inline)) {
    f32x16 w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) w[p] = load(panels.template at<T>(p, kBytes * k));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const f32x16 x = splat_unit(units + k * R + r);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p] = fma(x, w[p], sums[r][p]);
    }
  };
  std::int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    if constexpr (R <= kFewRows) {
#pragma GCC unroll 4
      for (int byte = 0; byte < kStep * kBytes; byte += 64) panels.fetch(kBytes * k + byte);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) step(k + i);
  }
  for (; k < inputs; ++k) step(k);
}

// Inputs from k = 0 of these pointers on. Sums so far are read from the output when `resume` is set; the
// output has a bias for the last stretch of k alone.
template <class T, int R, int P>
inline void float_tile(const Panels<P>& panels, std::int64_t inputs, TileInput in, TileOutput out,
                       bool resume) {
  f32x16 sums[R][P];
  if (resume) {
    out.get(sums);
  } else {
    clear(sums);
  }
  float_chains<T>(sums, panels, in.units, inputs);
  out.put(sums);
}

// -- integers -----------------------------------------------------------------------------------------------

// int8 weights times 12-bit inputs, one scale an output and one a row. 2,047 * 127 * 8,192 is just below
// 2^31: sums become floats every 8,192 inputs.
inline constexpr std::int64_t kFlush = 8192;

template <int R, int P>
[[gnu::always_inline]] inline void add_pairs(i32x16 (&sums)[R][P], const Panels<P>& panels,
                                             const std::int32_t* units, std::int64_t u) {
  Pairs w[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) w[p] = load_pairs(panels.template at<std::int8_t>(p, 32 * u));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const std::int32_t x = units[u * R + r];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sums[r][p] = dot(sums[r][p], w[p], x);
  }
}

template <int R, int P>
inline void int8_tile(const Panels<P>& panels, std::int64_t inputs, TileInput in, TileOutput out) {
  f32x16 values[R][P];
  clear(values);
  const std::int64_t end = unit_count(WeightFormat::int8, inputs);
  for (std::int64_t from = 0; from < end; from += kFlush / 2) {
    const std::int64_t to = end - from < kFlush / 2 ? end : from + kFlush / 2;
    i32x16 sums[R][P];
    clear(sums);
    std::int64_t u = from;
    for (; u + 2 <= to; u += 2) {
      if constexpr (R <= kFewRows) panels.fetch(32 * u);
      add_pairs(sums, panels, in.units, u);
      add_pairs(sums, panels, in.units, u + 1);
    }
    if (u < to) add_pairs(sums, panels, in.units, u);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) values[r][p] = values[r][p] + to_float(sums[r][p]);
    }
  }
  const std::int64_t scales = weights_bytes(WeightFormat::int8, inputs);
  for (int p = 0; p < P; ++p) {
    const f32x16 scale = load(panels.template at<float>(p, scales));
    for (int r = 0; r < R; ++r) values[r][p] = (values[r][p] * scale) * splat(in.scales[r]);
  }
  out.put(values);
}

// GGUF's Q8_0: as above, but a scale for every 32 inputs of an output. A block's sum is below 2^24.
template <int R, int P>
inline void q8_0_tile(const Panels<P>& panels, std::int64_t inputs, TileInput in, TileOutput out) {
  f32x16 values[R][P];
  clear(values);
  const std::int64_t scales = weights_bytes(WeightFormat::q8_0, inputs);
  const std::int64_t blocks = stored_inputs(WeightFormat::q8_0, inputs) / 32;
  for (std::int64_t b = 0; b < blocks; ++b) {
    i32x16 sums[R][P];
    clear(sums);
    if constexpr (R <= kFewRows) panels.fetch_next(scales + 32 * b);
#pragma GCC unroll 4
    for (int u = 0; u < 16; u += 2) {
      if constexpr (R <= kFewRows) panels.fetch(32 * (16 * b + u));
      add_pairs(sums, panels, in.units, 16 * b + u);
      add_pairs(sums, panels, in.units, 16 * b + u + 1);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const f32x16 scale = load(panels.template at<f16>(p, scales + 32 * b));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) values[r][p] = fma(to_float(sums[r][p]), scale, values[r][p]);
    }
  }
  for (int p = 0; p < P; ++p) {
    for (int r = 0; r < R; ++r) values[r][p] = values[r][p] * splat(in.scales[r]);
  }
  out.put(values);
}

// Weights of 4 bits times 8-bit inputs; both have a scale for every block.
template <WeightFormat format, int R, int P>
inline void nibble_tile(const Panels<P>& panels, std::int64_t inputs, TileInput in, TileOutput out) {
  constexpr int kBlock = block_of(format);
  f32x16 values[R][P];
  clear(values);
  const std::int64_t blocks = stored_inputs(format, inputs) / kBlock;
  for (std::int64_t b = 0; b < blocks; ++b) {
    i32x16 sums[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
        sums[r][p] = splat(format == WeightFormat::q4_1 ? 0 : in.offsets[b * R + r]);
    }
    const std::int64_t scales = scales_at(format, inputs, b);
    if constexpr (R <= kFewRows) {
      if constexpr (format == WeightFormat::q4_1) {
        panels.fetch(scales);
      } else {
        panels.fetch_next(scales);
      }
    }
    Partial partial[R][P];
    clear(partial);
#pragma GCC unroll 4
    for (int i = 0; i < kBlock / 8; ++i) {
      const std::int64_t eight = b * (kBlock / 8) + i;
      const std::int64_t at = eight_at(format, 4 * b) + 64 * i;
      if constexpr (R <= kFewRows) panels.fetch(at);
      Nibbles w[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) w[p] = load_nibbles(panels.template at<std::uint8_t>(p, at));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const std::int32_t low = in.units[2 * eight * R + r], high = in.units[(2 * eight + 1) * R + r];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) partial[r][p] = add(partial[r][p], w[p], low, high);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p] = sums[r][p] + total(partial[r][p]);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const f32x16 scale = load(panels.template at<f16>(p, scales));
      f32x16 minimum = zero();
      if constexpr (format == WeightFormat::q4_1) minimum = load(panels.template at<f16>(p, scales + 32));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const f32x16 both = scale * splat(in.scales[b * R + r]);
        values[r][p] = fma(to_float(sums[r][p]), both, values[r][p]);
        if constexpr (format == WeightFormat::q4_1) {
          values[r][p] = fma(minimum, splat_unit(in.offsets + b * R + r), values[r][p]);
        }
      }
    }
  }
  out.put(values);
}

}  // namespace plait::PLAIT_ISA
