// Floats of 16 bits, one at a time: for packing, where nothing is hurried. Kernels use simd.hpp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace plait {

inline float widen_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline float widen_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  const float tiny = static_cast<float>(rest) * 0x1p-24f;
  const std::uint32_t wide = (rest << 13) + ((rest >= 0x7c00 ? 224u : 112u) << 23);
  return std::bit_cast<float>(sign | (rest < 0x400 ? std::bit_cast<std::uint32_t>(tiny) : wide));
}

// To nearest, ties to even; so below.
inline std::uint16_t narrow_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t narrow_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (rest < 0x38800000) {
    const float shifted = std::bit_cast<float>(rest) * 0x1p24f + 0x1p23f;  // rounds to an integer
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x4b000000));
  }
  return static_cast<std::uint16_t>(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

}  // namespace plait
