// Sixteen lanes in four 128-bit vectors of the compiler's own, for any processor: right before quick.
#pragma once

#include <cstdint>
#include <cstring>

namespace plait::PLAIT_ISA {

inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 16;

using f32reg [[gnu::vector_size(16)]] = float;
using i32reg [[gnu::vector_size(16)]] = std::int32_t;

struct f32x16 {
  f32reg r[4];
};
struct i32x16 {
  i32reg r[4];
};

// a * b + c rounded once, without the instruction for it. The product of two floats is exact in double, but
// its sum with c is rounded to double and would be rounded again to float. Rounding the first time *to odd*
// (when inexact, to the neighbour whose last bit is 1) makes the second rounding right (Boldo and Melquiond,
// "Emulation of a FMA and correctly rounded sums", 2008). Not inlined: it would take minutes to compile.
[[gnu::noinline]] inline f32reg reg_fma(f32reg a, f32reg b, f32reg c) {
  using f64x2 [[gnu::vector_size(16)]] = double;
  using i64x2 [[gnu::vector_size(16)]] = std::int64_t;
  f32reg out;
#pragma GCC unroll 2
  for (int half = 0; half < 4; half += 2) {
    const f64x2 x = {a[half], a[half + 1]}, y = {b[half], b[half + 1]}, z = {c[half], c[half + 1]};
    const f64x2 product = x * y;
    const f64x2 sum = product + z;
    const f64x2 rest = sum - product;
    const f64x2 error = (product - (sum - rest)) + (z - rest);  // exact (Knuth's two-sum)
    const i64x2 bits = (i64x2)sum;
    const i64x2 outward = (sum > 0) ^ (error < 0);  // -1: the exact sum lies further from zero
    const i64x2 inexact = ((error > 0) | (error < 0)) & ((bits & 1) == 0);
    const f64x2 odd = (f64x2)(bits + (inexact & (1 + 2 * ~outward)));
    out[half] = static_cast<float>(odd[0]);
    out[half + 1] = static_cast<float>(odd[1]);
  }
  return out;
}
[[gnu::always_inline]] inline f32reg reg_sqrt(f32reg a) {
  return f32reg{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
[[gnu::always_inline]] inline f32reg reg_max(f32reg a, f32reg b) { return a > b ? a : b; }
[[gnu::always_inline]] inline f32reg reg_min(f32reg a, f32reg b) { return a < b ? a : b; }

template <class T>
[[gnu::always_inline]] inline i32x16 widen(const T* p) {
  i32x16 out;
  for (int lane = 0; lane < 16; ++lane) out.r[lane / 4][lane % 4] = p[lane];
  return out;
}
// The low 16 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::uint16_t* p, i32x16 a) {
  for (int lane = 0; lane < 16; ++lane) p[lane] = static_cast<std::uint16_t>(a.r[lane / 4][lane % 4]);
}
// The low 8 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::int8_t* p, i32x16 a) {
  for (int lane = 0; lane < 16; ++lane) p[lane] = static_cast<std::int8_t>(a.r[lane / 4][lane % 4]);
}
[[gnu::always_inline]] inline f32x16 half_to_float(const std::uint16_t* p) {
  const i32x16 half = widen(p);
  f32x16 out;
  for (int i = 0; i < 4; ++i) {
    const i32reg sign = (half.r[i] & 0x8000) << 16;
    const i32reg rest = half.r[i] & 0x7fff;
    const i32reg normal = (rest << 13) + (112 << 23);
    const i32reg tiny = (i32reg)(__builtin_convertvector(rest, f32reg) * 0x1p-24f);
    const i32reg special = (rest << 13) | 0x7f800000 | (rest > 0x7c00 ? i32reg{} + 0x400000 : i32reg{});
    out.r[i] = (f32reg)(sign | (rest < 0x400 ? tiny : rest >= 0x7c00 ? special : normal));
  }
  return out;
}
[[gnu::always_inline]] inline void float_to_half(std::uint16_t* p, f32x16 a) {
  i32x16 out;
  for (int i = 0; i < 4; ++i) {
    const i32reg bits = (i32reg)a.r[i];
    const i32reg rest = bits & 0x7fffffff;
    const i32reg normal = (rest - (112 << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    const f32reg scaled = (f32reg)rest * 0x1p24f;
    const i32reg tiny = (i32reg)(scaled + 0x1p23f) - 0x4b000000;
    const i32reg nan = 0x7e00 | ((rest >> 13) & 0x3ff);
    const i32reg value = rest < 0x38800000    ? tiny
                         : rest > 0x7f800000  ? nan
                         : rest >= 0x477ff000 ? i32reg{} + 0x7c00
                                              : normal;
    out.r[i] = value | ((bits >> 16) & 0x8000);
  }
  narrow(p, out);
}

}  // namespace plait::PLAIT_ISA
