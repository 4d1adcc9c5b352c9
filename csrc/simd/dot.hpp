// Dot products of small integers: sixteen outputs at once, int32 sums. Integers are exact, so that every way
// of adding them gives the same bits.
//
// Weights come in the order of packed panels (see panels.hpp), activations as units of 32 bits: two int16, or
// four int8.
#pragma once

#include "../simd.hpp"

namespace plait::PLAIT_ISA {

// Pairs: 16 outputs x 2 inputs as int16, stored as int8 [16][2].
//   Pairs load_pairs(const int8*);  i32x16 dot(i32x16 sum, Pairs, int32 unit of two int16)
//
// Nibbles: 16 outputs x 8 inputs, each 0 to 15, stored in 64 bytes: byte [output][j] holds input j in its low
// half and input j + 4 in its high half.
//   Nibbles load_nibbles(const uint8*);  Partial add(Partial, Nibbles, int32 low, int32 high)
//   i32x16 total(Partial)
// A Partial starts as Partial{} and takes four Nibbles at most: where it is made of int16, each Nibbles adds
// up to 2 x 15 x 127 x 2 = 7,620, and 4 x 7,620 = 30,480 still fits.

#if defined(PLAIT_PORTABLE)

struct Pairs {
  std::int16_t w[16][2];
};
struct Nibbles {
  std::uint8_t w[16][8];
};
using Partial = i32x16;

[[gnu::always_inline]] inline Pairs load_pairs(const std::int8_t* p) {
  Pairs out;
  for (int i = 0; i < 32; ++i) out.w[i / 2][i % 2] = p[i];
  return out;
}
[[gnu::always_inline]] inline i32x16 dot(i32x16 sum, const Pairs& pairs, std::int32_t unit) {
  std::int16_t x[2];
  std::memcpy(x, &unit, sizeof x);
  for (int o = 0; o < 16; ++o) sum.r[o / 4][o % 4] += pairs.w[o][0] * x[0] + pairs.w[o][1] * x[1];
  return sum;
}
[[gnu::always_inline]] inline Nibbles load_nibbles(const std::uint8_t* p) {
  Nibbles out;
  for (int o = 0; o < 16; ++o) {
    for (int j = 0; j < 4; ++j) {
      out.w[o][j] = p[4 * o + j] & 15;
      out.w[o][j + 4] = p[4 * o + j] >> 4;
    }
  }
  return out;
}
[[gnu::always_inline]] inline Partial add(Partial sum, const Nibbles& nibbles, std::int32_t low,
                                          std::int32_t high) {
  std::int8_t x[8];
  std::memcpy(x, &low, 4);
  std::memcpy(x + 4, &high, 4);
  for (int o = 0; o < 16; ++o) {
    std::int32_t dot = 0;
    for (int j = 0; j < 8; ++j) dot += nibbles.w[o][j] * x[j];
    sum.r[o / 4][o % 4] += dot;
  }
  return sum;
}
[[gnu::always_inline]] inline i32x16 total(Partial sum) { return sum; }

#elif defined(__AVX512F__)

struct Pairs {
  __m512i w;
};
struct Nibbles {
  __m512i low, high;
};

[[gnu::always_inline]] inline Pairs load_pairs(const std::int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
[[gnu::always_inline]] inline Nibbles load_nibbles(const std::uint8_t* p) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}

#if defined(__AVX512VNNI__)

[[gnu::always_inline]] inline i32x16 dot(i32x16 sum, Pairs pairs, std::int32_t unit) {
  return {(i32reg)_mm512_dpwssd_epi32((__m512i)sum.r[0], pairs.w, _mm512_set1_epi32(unit))};
}
using Partial = i32x16;
[[gnu::always_inline]] inline Partial add(Partial sum, Nibbles nibbles, std::int32_t low, std::int32_t high) {
  const __m512i half = _mm512_dpbusd_epi32((__m512i)sum.r[0], nibbles.low, _mm512_set1_epi32(low));
  return {(i32reg)_mm512_dpbusd_epi32(half, nibbles.high, _mm512_set1_epi32(high))};
}
[[gnu::always_inline]] inline i32x16 total(Partial sum) { return sum; }

#else

[[gnu::always_inline]] inline i32x16 dot(i32x16 sum, Pairs pairs, std::int32_t unit) {
  return {sum.r[0] + (i32reg)_mm512_madd_epi16(pairs.w, _mm512_set1_epi32(unit))};
}
struct Partial {
  __m512i sum;
};
[[gnu::always_inline]] inline Partial add(Partial sum, Nibbles nibbles, std::int32_t low, std::int32_t high) {
  const __m512i first = _mm512_maddubs_epi16(nibbles.low, _mm512_set1_epi32(low));
  const __m512i second = _mm512_maddubs_epi16(nibbles.high, _mm512_set1_epi32(high));
  return {_mm512_add_epi16(sum.sum, _mm512_add_epi16(first, second))};
}
[[gnu::always_inline]] inline i32x16 total(Partial sum) {
  return {(i32reg)_mm512_madd_epi16(sum.sum, _mm512_set1_epi16(1))};
}

#endif

#elif defined(__AVX2__)

struct Pairs {
  __m256i w[2];
};
struct Nibbles {
  __m256i low[2], high[2];
};
struct Partial {
  __m256i sum[2];
};

[[gnu::always_inline]] inline Pairs load_pairs(const std::int8_t* p) {
  return {{_mm256_cvtepi8_epi16(load_128(p)), _mm256_cvtepi8_epi16(load_128(p + 16))}};
}
[[gnu::always_inline]] inline i32x16 dot(i32x16 sum, Pairs pairs, std::int32_t unit) {
  const __m256i x = _mm256_set1_epi32(unit);
  return each<i32x16>([=](int i) { return sum.r[i] + (i32reg)_mm256_madd_epi16(pairs.w[i], x); });
}
[[gnu::always_inline]] inline Nibbles load_nibbles(const std::uint8_t* p) {
  const __m256i mask = _mm256_set1_epi8(15);
  Nibbles out;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
    out.low[i] = _mm256_and_si256(both, mask);
    out.high[i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
  }
  return out;
}
[[gnu::always_inline]] inline Partial add(Partial sum, Nibbles nibbles, std::int32_t low, std::int32_t high) {
  const __m256i x = _mm256_set1_epi32(low), y = _mm256_set1_epi32(high);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i first = _mm256_maddubs_epi16(nibbles.low[i], x);
    const __m256i second = _mm256_maddubs_epi16(nibbles.high[i], y);
    sum.sum[i] = _mm256_add_epi16(sum.sum[i], _mm256_add_epi16(first, second));
  }
  return sum;
}
[[gnu::always_inline]] inline i32x16 total(Partial sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return each<i32x16>([=](int i) { return (i32reg)_mm256_madd_epi16(sum.sum[i], ones); });
}

#else

struct Pairs {
  int16x8_t even[2], odd[2];
};
struct Nibbles {
  int8x16_t low[4], high[4];
};
struct Partial {
  int16x8_t sum[4];
};

[[gnu::always_inline]] inline Pairs load_pairs(const std::int8_t* p) {
  const int8x16x2_t both = vld2q_s8(p);
  return {{vmovl_s8(vget_low_s8(both.val[0])), vmovl_high_s8(both.val[0])},
          {vmovl_s8(vget_low_s8(both.val[1])), vmovl_high_s8(both.val[1])}};
}
[[gnu::always_inline]] inline i32x16 dot(i32x16 sum, Pairs pairs, std::int32_t unit) {
  const int16x4_t x = vreinterpret_s16_s32(vdup_n_s32(unit));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    int32x4_t low = (int32x4_t)sum.r[2 * i], high = (int32x4_t)sum.r[2 * i + 1];
    low = vmlal_lane_s16(low, vget_low_s16(pairs.even[i]), x, 0);
    low = vmlal_lane_s16(low, vget_low_s16(pairs.odd[i]), x, 1);
    high = vmlal_high_lane_s16(high, pairs.even[i], x, 0);
    high = vmlal_high_lane_s16(high, pairs.odd[i], x, 1);
    sum.r[2 * i] = (i32reg)low;
    sum.r[2 * i + 1] = (i32reg)high;
  }
  return sum;
}
[[gnu::always_inline]] inline Nibbles load_nibbles(const std::uint8_t* p) {
  Nibbles out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t both = vld1q_u8(p + 16 * i);
    out.low[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    out.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  }
  return out;
}
[[gnu::always_inline]] inline Partial add(Partial sum, Nibbles nibbles, std::int32_t low, std::int32_t high) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(low)), y = vreinterpretq_s8_s32(vdupq_n_s32(high));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    int16x8_t first = vmull_s8(vget_low_s8(nibbles.low[i]), vget_low_s8(x));
    int16x8_t second = vmull_high_s8(nibbles.low[i], x);
    first = vmlal_s8(first, vget_low_s8(nibbles.high[i]), vget_low_s8(y));
    second = vmlal_high_s8(second, nibbles.high[i], y);
    sum.sum[i] = vaddq_s16(sum.sum[i], vpaddq_s16(first, second));
  }
  return sum;
}
[[gnu::always_inline]] inline i32x16 total(Partial sum) {
  return each<i32x16>([=](int i) { return (i32reg)vpaddlq_s16(sum.sum[i]); });
}

#endif

}  // namespace plait::PLAIT_ISA
