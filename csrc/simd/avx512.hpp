// Sixteen lanes in one 512-bit register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace plait::PLAIT_ISA {

inline constexpr int kLanes = 16;
inline constexpr int kRegisters = 32;

using f32reg [[gnu::vector_size(64)]] = float;
using i32reg [[gnu::vector_size(64)]] = std::int32_t;

struct f32x16 {
  f32reg r[1];
};
struct i32x16 {
  i32reg r[1];
};

[[gnu::always_inline]] inline f32reg reg_fma(f32reg a, f32reg b, f32reg c) {
  return _mm512_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline f32reg reg_sqrt(f32reg a) { return _mm512_sqrt_ps(a); }
[[gnu::always_inline]] inline f32reg reg_max(f32reg a, f32reg b) { return _mm512_max_ps(a, b); }
[[gnu::always_inline]] inline f32reg reg_min(f32reg a, f32reg b) { return _mm512_min_ps(a, b); }

[[gnu::always_inline]] inline i32x16 widen(const std::uint16_t* p) {
  return {(i32reg)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
[[gnu::always_inline]] inline i32x16 widen(const std::uint8_t* p) {
  return {(i32reg)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
[[gnu::always_inline]] inline i32x16 widen(const std::int8_t* p) {
  return {(i32reg)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The low 16 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::uint16_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)a.r[0]));
}
// The low 8 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)a.r[0]));
}
[[gnu::always_inline]] inline f32x16 half_to_float(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
[[gnu::always_inline]] inline void float_to_half(std::uint16_t* p, f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.r[0], kNearest));
}

}  // namespace plait::PLAIT_ISA
