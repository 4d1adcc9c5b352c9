// Rows of a packed table as float32. A row lies across its panel: one weight of every sixteen.
#pragma once

#include <bit>
#include <cstddef>

#include "../linear_kernels.hpp"
#include "../pool.hpp"
#include "../simd.hpp"

namespace plait::PLAIT_ISA {

inline float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float to_float(f16 value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  const float tiny = static_cast<float>(rest) * 0x1p-24f;
  const std::uint32_t wide = (rest << 13) + ((rest >= 0x7c00 ? 224u : 112u) << 23);
  return std::bit_cast<float>(sign | (rest < 0x400 ? std::bit_cast<std::uint32_t>(tiny) : wide));
}

inline int nibble_at(WeightFormat format, const std::byte* panel, std::int64_t k, int lane) {
  const int byte = std::to_integer<int>(panel[eight_at(format, k / 8) + lane * 4 + k % 4]);
  return k % 8 < 4 ? byte & 15 : byte >> 4;
}

inline int pair_at(const std::byte* panel, std::int64_t k, int lane) {
  return static_cast<std::int8_t>(panel[k / 2 * 32 + lane * 2 + k % 2]);
}

// What weight k of an output stands for (see panels.hpp).
template <WeightFormat format>
float weight_at(const std::byte* panel, std::int64_t inputs, std::int64_t k, int lane) {
  if constexpr (format == WeightFormat::f32) {
    return reinterpret_cast<const float*>(panel)[16 * k + lane];
  } else if constexpr (format == WeightFormat::bf16) {
    return to_float(reinterpret_cast<const bf16*>(panel)[16 * k + lane]);
  } else if constexpr (format == WeightFormat::f16) {
    return to_float(reinterpret_cast<const f16*>(panel)[16 * k + lane]);
  } else if constexpr (format == WeightFormat::int8) {
    const auto* scales = reinterpret_cast<const float*>(panel + weights_bytes(format, inputs));
    return static_cast<float>(pair_at(panel, k, lane)) * scales[lane];
  } else {
    const auto* scales = reinterpret_cast<const f16*>(panel + scales_at(format, inputs, k / 32));
    const float scale = to_float(scales[lane]);
    if constexpr (format == WeightFormat::q8_0) return static_cast<float>(pair_at(panel, k, lane)) * scale;
    const float q = static_cast<float>(nibble_at(format, panel, k, lane));
    if constexpr (format == WeightFormat::q4_0) return (q - 8) * scale;
    return q * scale + to_float(scales[16 + lane]);
  }
}

template <WeightFormat format>
void rows_of(const Matrix& table, const std::int64_t* ids, std::int64_t count, float* y) {
  const std::int64_t stride = panel_bytes(format, table.inputs);
  parallel_for(count, (1 << 16) / (table.inputs + 1) + 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::byte* panel = table.panels + ids[i] / 16 * stride;
      const int lane = static_cast<int>(ids[i] % 16);
      for (std::int64_t k = 0; k < table.inputs; ++k) {
        y[i * table.inputs + k] = weight_at<format>(panel, table.inputs, k, lane);
      }
    }
  });
}

inline void embedding(const Matrix& table, const std::int64_t* ids, std::int64_t count, float* y) {
  switch (table.format) {
    case WeightFormat::f32: return rows_of<WeightFormat::f32>(table, ids, count, y);
    case WeightFormat::bf16: return rows_of<WeightFormat::bf16>(table, ids, count, y);
    case WeightFormat::f16: return rows_of<WeightFormat::f16>(table, ids, count, y);
    case WeightFormat::int8: return rows_of<WeightFormat::int8>(table, ids, count, y);
    case WeightFormat::q8_0: return rows_of<WeightFormat::q8_0>(table, ids, count, y);
    case WeightFormat::q4_0: return rows_of<WeightFormat::q4_0>(table, ids, count, y);
    case WeightFormat::q4_1: return rows_of<WeightFormat::q4_1>(table, ids, count, y);
  }
}

}  // namespace plait::PLAIT_ISA
