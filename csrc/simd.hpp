// Sixteen lanes of float32 or int32 on whatever the processor has.
//
// Kernels are written once over `f32x16` and `i32x16` and compiled once per instruction set, each time into a
// namespace of its own (PLAIT_ISA, set by the build). Every function here gives the same bits on each of
// them: one rounding per operation, fused multiply-adds only where `fma` is written (the build forbids
// contraction), one order for sums across lanes, and polynomials instead of a mathematics library.
//
// Code in these namespaces must not instantiate templates of the standard library that are not inlined for
// certain: the linker keeps one copy of such a function, perhaps the one that needs AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(PLAIT_PORTABLE)
#include "simd/portable.hpp"
#elif defined(__AVX512F__)
#include "simd/avx512.hpp"
#elif defined(__AVX2__)
#include "simd/avx2.hpp"
#else
#include "simd/neon.hpp"
#endif

namespace plait {

// Storage formats of 16 bits. Arithmetic is always float32.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

}  // namespace plait

namespace plait::PLAIT_ISA {

inline constexpr int kRegs = 16 / kLanes;  // registers that make up sixteen lanes
using u32reg [[gnu::vector_size(kLanes * 4)]] = std::uint32_t;

template <class V, class F>
[[gnu::always_inline]] inline V each(F&& part) {
  // Written out, since a loop would keep values in memory.
  if constexpr (kRegs == 1) {
    return {{part(0)}};
  } else if constexpr (kRegs == 2) {
    return {{part(0), part(1)}};
  } else {
    return {{part(0), part(1), part(2), part(3)}};
  }
}

// -- values, memory -----------------------------------------------------------------------------------------

[[gnu::always_inline]] inline f32x16 splat(float a) {
  // a - 0 is a, for -0 too; the compiler knows that. a + 0 would be an addition.
  return each<f32x16>([=](int) { return a - f32reg{}; });
}
[[gnu::always_inline]] inline i32x16 splat(std::int32_t a) {
  return each<i32x16>([=](int) { return i32reg{} + a; });
}
[[gnu::always_inline]] inline f32x16 zero() {
  return each<f32x16>([](int) { return f32reg{}; });
}
[[gnu::always_inline]] inline i32x16 zero_int() {
  return each<i32x16>([](int) { return i32reg{}; });
}

// Loads and stores need no alignment. They go register by register: larger structs are copied through memory.
template <class R, class T>
[[gnu::always_inline]] inline R load_reg(const T* p) {
  R out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
[[gnu::always_inline]] inline f32x16 load(const float* p) {
  return each<f32x16>([=](int i) { return load_reg<f32reg>(p + i * kLanes); });
}
[[gnu::always_inline]] inline i32x16 load(const std::int32_t* p) {
  return each<i32x16>([=](int i) { return load_reg<i32reg>(p + i * kLanes); });
}
template <class T, class V>
[[gnu::always_inline]] inline void store_regs(T* p, V a) {
  std::memcpy(p, &a.r[0], sizeof a.r[0]);
  if constexpr (kRegs > 1) std::memcpy(p + kLanes, &a.r[1], sizeof a.r[1]);
  if constexpr (kRegs > 2) {
    std::memcpy(p + 2 * kLanes, &a.r[2], sizeof a.r[2]);
    std::memcpy(p + 3 * kLanes, &a.r[3], sizeof a.r[3]);
  }
}
[[gnu::always_inline]] inline void store(float* p, f32x16 a) { store_regs(p, a); }
[[gnu::always_inline]] inline void store(std::int32_t* p, i32x16 a) { store_regs(p, a); }

[[gnu::always_inline]] inline i32x16 bits(f32x16 a) {
  return each<i32x16>([=](int i) { return (i32reg)a.r[i]; });
}
[[gnu::always_inline]] inline f32x16 from_bits(i32x16 a) {
  return each<f32x16>([=](int i) { return (f32reg)a.r[i]; });
}
[[gnu::always_inline]] inline f32x16 to_float(i32x16 a) {
  return each<f32x16>([=](int i) { return __builtin_convertvector(a.r[i], f32reg); });
}

// -- arithmetic ---------------------------------------------------------------------------------------------

[[gnu::always_inline]] inline f32x16 operator+(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return a.r[i] + b.r[i]; });
}
[[gnu::always_inline]] inline f32x16 operator-(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return a.r[i] - b.r[i]; });
}
[[gnu::always_inline]] inline f32x16 operator*(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return a.r[i] * b.r[i]; });
}
[[gnu::always_inline]] inline f32x16 operator/(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return a.r[i] / b.r[i]; });
}
// a * b + c, rounded once.
[[gnu::always_inline]] inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return each<f32x16>([=](int i) { return reg_fma(a.r[i], b.r[i], c.r[i]); });
}
[[gnu::always_inline]] inline f32x16 sqrt(f32x16 a) {
  return each<f32x16>([=](int i) { return reg_sqrt(a.r[i]); });
}
// a > b ? a : b, so b when either is NaN.
[[gnu::always_inline]] inline f32x16 max(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return reg_max(a.r[i], b.r[i]); });
}
// a < b ? a : b, so b when either is NaN.
[[gnu::always_inline]] inline f32x16 min(f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return reg_min(a.r[i], b.r[i]); });
}

// Sums and differences of integers wrap around.
[[gnu::always_inline]] inline i32x16 operator+(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return (i32reg)((u32reg)a.r[i] + (u32reg)b.r[i]); });
}
[[gnu::always_inline]] inline i32x16 operator-(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return (i32reg)((u32reg)a.r[i] - (u32reg)b.r[i]); });
}
[[gnu::always_inline]] inline i32x16 operator&(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return a.r[i] & b.r[i]; });
}
[[gnu::always_inline]] inline i32x16 operator|(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return a.r[i] | b.r[i]; });
}
[[gnu::always_inline]] inline i32x16 operator^(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return a.r[i] ^ b.r[i]; });
}
template <int n>
[[gnu::always_inline]] inline i32x16 shift_left(i32x16 a) {
  return each<i32x16>([=](int i) { return a.r[i] << n; });
}
// Keeps the sign.
template <int n>
[[gnu::always_inline]] inline i32x16 shift_right(i32x16 a) {
  return each<i32x16>([=](int i) { return a.r[i] >> n; });
}

[[gnu::always_inline]] inline i32x16 max(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return a.r[i] > b.r[i] ? a.r[i] : b.r[i]; });
}

[[gnu::always_inline]] inline f32x16 abs(f32x16 a) { return from_bits(bits(a) & splat(0x7fffffff)); }
[[gnu::always_inline]] inline f32x16 negate(f32x16 a) {
  return from_bits(each<i32x16>([=](int i) { return (i32reg)a.r[i] ^ (i32reg{} + INT32_MIN); }));
}

// -- comparison: lanes of all ones or all zeros -------------------------------------------------------------

[[gnu::always_inline]] inline i32x16 less(f32x16 a, f32x16 b) {
  return each<i32x16>([=](int i) { return (i32reg)(a.r[i] < b.r[i]); });
}
[[gnu::always_inline]] inline i32x16 less(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return (i32reg)(a.r[i] < b.r[i]); });
}
[[gnu::always_inline]] inline i32x16 equal(i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return (i32reg)(a.r[i] == b.r[i]); });
}
[[gnu::always_inline]] inline i32x16 is_nan(f32x16 a) {
  return each<i32x16>([=](int i) { return (i32reg)(a.r[i] != a.r[i]); });
}
[[gnu::always_inline]] inline f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
  return each<f32x16>([=](int i) { return mask.r[i] ? a.r[i] : b.r[i]; });
}
[[gnu::always_inline]] inline i32x16 select(i32x16 mask, i32x16 a, i32x16 b) {
  return each<i32x16>([=](int i) { return mask.r[i] ? a.r[i] : b.r[i]; });
}
// 0, 1, ... 15.
[[gnu::always_inline]] inline i32x16 lane_ids() {
  alignas(64) static constexpr std::int32_t ids[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(ids);
}

// -- formats ------------------------------------------------------------------------------------------------

[[gnu::always_inline]] inline f32x16 load(const bf16* p) {
  return from_bits(shift_left<16>(widen(reinterpret_cast<const std::uint16_t*>(p))));
}
[[gnu::always_inline]] inline f32x16 load(const f16* p) {
  return half_to_float(reinterpret_cast<const std::uint16_t*>(p));
}
[[gnu::always_inline]] inline f32x16 load(const std::int8_t* p) { return to_float(widen(p)); }
[[gnu::always_inline]] inline f32x16 load(const std::uint8_t* p) { return to_float(widen(p)); }

// Rounds to nearest, ties to even; NaN stays NaN.
[[gnu::always_inline]] inline void store(bf16* p, f32x16 a) {
  const i32x16 b = bits(a);
  const i32x16 odd = shift_right<16>(b) & splat(1);
  const i32x16 rounded = select(is_nan(a), b | splat(0x400000), b + (splat(0x7fff) + odd));
  narrow(reinterpret_cast<std::uint16_t*>(p), shift_right<16>(rounded));
}
// Rounds to nearest, ties to even; NaN stays NaN.
[[gnu::always_inline]] inline void store(f16* p, f32x16 a) {
  float_to_half(reinterpret_cast<std::uint16_t*>(p), a);
}

// The first n of sixteen lanes, 0 <= n <= 16; the others are zero, and their memory is not touched.
template <class T>
[[gnu::always_inline]] inline f32x16 load_first(const T* p, int n) {
  T whole[16] = {};
  std::memcpy(whole, p, static_cast<std::size_t>(n) * sizeof(T));
  return load(whole);
}
template <class T>
[[gnu::always_inline]] inline void store_first(T* p, f32x16 a, int n) {
  T whole[16];
  store(whole, a);
  std::memcpy(p, whole, static_cast<std::size_t>(n) * sizeof(T));
}

// The nearest integer, ties to even, for |a| < 2^22.
[[gnu::always_inline]] inline f32x16 round_even(f32x16 a) {
  const f32x16 magic = splat(0x1.8p23f);
  return (a + magic) - magic;
}
[[gnu::always_inline]] inline i32x16 round_to_int(f32x16 a) {
  const f32x16 magic = splat(0x1.8p23f);
  return bits(a + magic) - bits(magic);
}

// -- across lanes -------------------------------------------------------------------------------------------

template <int n, class R, std::size_t... I>
[[gnu::always_inline]] inline R rotate(R a, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, a, (static_cast<int>(I + n) % kLanes)...);
}

// Folds sixteen lanes in halves: lane i with lane i + 8, then i + 4, i + 2, i + 1.
template <class Op>
[[gnu::always_inline]] inline float fold(f32x16 a, Op op) {
  f32reg r = a.r[0];
  if constexpr (kRegs == 2) r = op(a.r[0], a.r[1]);
  if constexpr (kRegs == 4) r = op(op(a.r[0], a.r[2]), op(a.r[1], a.r[3]));
  const auto ids = std::make_index_sequence<kLanes>{};
  if constexpr (kLanes > 8) r = op(r, rotate<8>(r, ids));
  if constexpr (kLanes > 4) r = op(r, rotate<4>(r, ids));
  r = op(r, rotate<2>(r, ids));
  r = op(r, rotate<1>(r, ids));
  return r[0];
}
[[gnu::always_inline]] inline float reduce_add(f32x16 a) {
  return fold(a, [](f32reg x, f32reg y) { return x + y; });
}
// NaN lanes are ignored or not, as it comes.
[[gnu::always_inline]] inline float reduce_max(f32x16 a) {
  return fold(a, [](f32reg x, f32reg y) { return reg_max(x, y); });
}
// Integers, so that the order does not matter.
[[gnu::always_inline]] inline std::int32_t reduce_add(i32x16 a) {
  std::int32_t sum = 0;
#pragma GCC unroll 16
  for (int lane = 0; lane < 16; ++lane) sum += a.r[lane / kLanes][lane % kLanes];
  return sum;
}
[[gnu::always_inline]] inline std::int32_t reduce_max(i32x16 a) {
  std::int32_t most = a.r[0][0];
#pragma GCC unroll 16
  for (int lane = 1; lane < 16; ++lane) {
    const std::int32_t other = a.r[lane / kLanes][lane % kLanes];
    most = most > other ? most : other;
  }
  return most;
}
[[gnu::always_inline]] inline float first(f32x16 a) { return a.r[0][0]; }

}  // namespace plait::PLAIT_ISA

#include "simd/functions.hpp"
