// Activations as linear layers read them: units of 32 bits, rows side by side.
//
// A unit is one float, two int16 or four int8 inputs, whichever the weights' format works with. Rows are
// dealt out to blocks of at most kMaxRows; in a block of r rows, unit u of row m is at [u][m], so that a
// kernel walks one stream for all of them.
//
// Formulas, per row for int16 and per block of the weights' for int8, with A the largest |x| there:
//
//   int16   scale = A / 2047, q = nearest(x * (2047 / A))    12 bits and a sign
//   int8    scale = A / 127,  q = nearest(x * (127 / A))
//
// They depend on the row alone. Where A is not finite the scale is NaN, so that the outputs are: a fault
// shows. Where A < 2^-100 all q and the scale are 0.
#pragma once

#include "../panels.hpp"
#include "../simd.hpp"

namespace plait::PLAIT_ISA {

enum class Units { floats, pairs, quads };

constexpr Units units_of(WeightFormat format) {
  if (has_nibbles(format)) return Units::quads;
  return format == WeightFormat::int8 || format == WeightFormat::q8_0 ? Units::pairs : Units::floats;
}

// Units of one row.
constexpr std::int64_t unit_count(WeightFormat format, std::int64_t inputs) {
  const std::int64_t stored = stored_inputs(format, inputs);
  return units_of(format) == Units::floats ? stored : stored / (units_of(format) == Units::pairs ? 2 : 4);
}

// Scales of one row.
constexpr std::int64_t scale_count(WeightFormat format, std::int64_t inputs) {
  if (units_of(format) == Units::floats) return 0;
  return units_of(format) == Units::pairs ? 1 : stored_inputs(format, inputs) / block_of(format);
}

// Where the parts of one row go; consecutive units, scales and offsets are `step` apart.
//
// `offset` is what a block of quads adds beside Σ q_weight * q: -8 Σ q as int32 for weights stored with 8
// added, and scale * Σ q as float, the factor of the minimum, for q4_1.
struct RowTarget {
  std::int32_t* units;
  float* scales;
  std::int32_t* offsets;
  int step;
};

struct Scaling {
  float scale, inverse;
};

[[gnu::always_inline]] inline Scaling scaling(i32x16 largest_bits, float steps) {
  const std::int32_t most = reduce_max(largest_bits);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  if (most >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
  if (largest < 0x1p-100f) return {0.0f, 0.0f};
  return {largest / steps, steps / largest};
}

[[gnu::always_inline]] inline void scatter(const std::int32_t* units, std::int64_t count, RowTarget target) {
  for (std::int64_t u = 0; u < count; ++u) target.units[u * target.step] = units[u];
}

// Sixteen inputs from k on; 0 beyond the row's end.
[[gnu::always_inline]] inline f32x16 inputs_at(const float* x, std::int64_t k, std::int64_t inputs) {
  if (k + 16 <= inputs) return load(x + k);
  return k < inputs ? load_first(x + k, static_cast<int>(inputs - k)) : zero();
}

[[gnu::always_inline]] inline i32x16 magnitude_bits(f32x16 a) { return bits(a) & splat(0x7fffffff); }

// An infinity or NaN times an inverse of 0 would be NaN, and no integer; NaN fails the first test.
[[gnu::always_inline]] inline i32x16 quantised(f32x16 x, float inverse) {
  const f32x16 scaled = x * splat(inverse);
  return round_to_int(select(is_nan(scaled), zero(), scaled));
}

inline void pack_pairs(const float* x, std::int64_t inputs, RowTarget target) {
  constexpr std::int64_t kTile = 512;
  i32x16 most = zero_int();
  for (std::int64_t k = 0; k < inputs; k += 16) most = max(most, magnitude_bits(inputs_at(x, k, inputs)));
  const Scaling by = scaling(most, 2047.0f);
  *target.scales = by.scale;
  for (std::int64_t k = 0; k < inputs; k += kTile) {
    alignas(64) std::int32_t units[kTile / 2];
    const std::int64_t end = inputs - k < kTile ? inputs - k : kTile;
    for (std::int64_t i = 0; i < end; i += 16) {
      narrow(reinterpret_cast<std::uint16_t*>(units) + i, quantised(inputs_at(x, k + i, inputs), by.inverse));
    }
    scatter(units, (end + 1) / 2, {target.units + k / 2 * target.step, nullptr, nullptr, target.step});
  }
}

// Inputs that fill the last block are 0.
inline void pad_units(std::int64_t from, std::int64_t to, RowTarget target) {
  for (std::int64_t u = from; u < to; ++u) target.units[u * target.step] = 0;
}

template <WeightFormat format>
inline void pack_quads(const float* x, std::int64_t inputs, RowTarget target) {
  constexpr int kBlock = block_of(format);
  const std::int64_t blocks = stored_inputs(format, inputs) / kBlock;
  for (std::int64_t b = 0; b < blocks; ++b) {
    f32x16 part[kBlock / 16];
    i32x16 most = zero_int();
    for (int i = 0; i < kBlock / 16; ++i) {
      part[i] = inputs_at(x, b * kBlock + 16 * i, inputs);
      most = max(most, magnitude_bits(part[i]));
    }
    const Scaling by = scaling(most, 127.0f);
    alignas(64) std::int32_t units[kBlock / 4];
    i32x16 sum = zero_int();
    for (int i = 0; i < kBlock / 16; ++i) {
      const i32x16 q = quantised(part[i], by.inverse);
      narrow(reinterpret_cast<std::int8_t*>(units) + 16 * i, q);
      sum = sum + q;
    }
    scatter(units, kBlock / 4,
            {target.units + b * (kBlock / 4) * target.step, nullptr, nullptr, target.step});
    target.scales[b * target.step] = by.scale;
    const std::int32_t total = reduce_add(sum);
    std::int32_t offset = -8 * total;
    if constexpr (format == WeightFormat::q4_1) {
      const float product = by.scale * static_cast<float>(total);
      std::memcpy(&offset, &product, sizeof offset);
    }
    target.offsets[b * target.step] = offset;
  }
}

template <WeightFormat format>
inline void pack_row(const float* x, std::int64_t inputs, RowTarget target) {
  if constexpr (units_of(format) == Units::floats) {
    for (std::int64_t k = 0; k < inputs; ++k)
      std::memcpy(&target.units[k * target.step], &x[k], sizeof(float));
  } else if constexpr (units_of(format) == Units::pairs) {
    pack_pairs(x, inputs, target);
    pad_units((inputs + 1) / 2, unit_count(format, inputs), target);
  } else {
    pack_quads<format>(x, inputs, target);
  }
}

}  // namespace plait::PLAIT_ISA
