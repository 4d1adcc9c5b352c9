// Sixteen lanes in two 256-bit registers; needs AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace plait::PLAIT_ISA {

inline constexpr int kLanes = 8;
inline constexpr int kRegisters = 16;

using f32reg [[gnu::vector_size(32)]] = float;
using i32reg [[gnu::vector_size(32)]] = std::int32_t;

struct f32x16 {
  f32reg r[2];
};
struct i32x16 {
  i32reg r[2];
};

[[gnu::always_inline]] inline f32reg reg_fma(f32reg a, f32reg b, f32reg c) {
  return _mm256_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline f32reg reg_sqrt(f32reg a) { return _mm256_sqrt_ps(a); }
[[gnu::always_inline]] inline f32reg reg_max(f32reg a, f32reg b) { return _mm256_max_ps(a, b); }
[[gnu::always_inline]] inline f32reg reg_min(f32reg a, f32reg b) { return _mm256_min_ps(a, b); }

[[gnu::always_inline]] inline __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
[[gnu::always_inline]] inline __m128i load_64(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}

[[gnu::always_inline]] inline i32x16 widen(const std::uint16_t* p) {
  return {{(i32reg)_mm256_cvtepu16_epi32(load_128(p)), (i32reg)_mm256_cvtepu16_epi32(load_128(p + 8))}};
}
[[gnu::always_inline]] inline i32x16 widen(const std::uint8_t* p) {
  return {{(i32reg)_mm256_cvtepu8_epi32(load_64(p)), (i32reg)_mm256_cvtepu8_epi32(load_64(p + 8))}};
}
[[gnu::always_inline]] inline i32x16 widen(const std::int8_t* p) {
  return {{(i32reg)_mm256_cvtepi8_epi32(load_64(p)), (i32reg)_mm256_cvtepi8_epi32(load_64(p + 8))}};
}
// The low 16 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::uint16_t* p, i32x16 a) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i both =
      _mm256_packus_epi32(_mm256_and_si256((__m256i)a.r[0], low), _mm256_and_si256((__m256i)a.r[1], low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0b11011000));
}
// The low 8 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::int8_t* p, i32x16 a) {
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i both =
      _mm256_packus_epi32(_mm256_and_si256((__m256i)a.r[0], low), _mm256_and_si256((__m256i)a.r[1], low));
  const __m256i words = _mm256_permute4x64_epi64(both, 0b11011000);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
[[gnu::always_inline]] inline f32x16 half_to_float(const std::uint16_t* p) {
  return {{_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}};
}
[[gnu::always_inline]] inline void float_to_half(std::uint16_t* p, f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.r[0], kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.r[1], kNearest));
}

}  // namespace plait::PLAIT_ISA
