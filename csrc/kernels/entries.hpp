// Formats of cache entries beyond those of simd.hpp, and the scales that quantised ones have.
//
// A quantised vector of one token and head is stored as
//
//     scale = max |x| / M,    entry = round(x / scale),    M = 448 (e4m3) or 127 (int8),
//
// rounded to nearest, ties to even; all zeros have scale 0. An infinity or NaN anywhere makes the scale NaN, so
// that it shows in whatever reads the vector.
#pragma once

#include "../mixer_kernels.hpp"
#include "../simd.hpp"

namespace plait {

// 1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinity; 0x7f is NaN and never stored.
struct e4m3 {
  std::uint8_t bits;
};

}  // namespace plait

namespace plait::PLAIT_ISA {

template <class E>
inline constexpr float kLargestEntry = 0;  // 0: the format has no scale
template <>
inline constexpr float kLargestEntry<e4m3> = 448;
template <>
inline constexpr float kLargestEntry<std::int8_t> = 127;

template <class E>
inline constexpr bool kScaled = kLargestEntry<E> != 0;

// Exponent and mantissa move to where float32 has them; 2^120 makes up for the difference of the biases, for
// subnormals too.
[[gnu::always_inline]] inline f32x16 load(const e4m3* p) {
  const i32x16 wide = shift_left<20>(widen(reinterpret_cast<const std::int8_t*>(p)));
  return from_bits(wide & splat(static_cast<std::int32_t>(0x87f00000u))) * splat(0x1p120f);
}

// Wants |a| <= 448 up to rounding.
[[gnu::always_inline]] inline void store(e4m3* p, f32x16 a) {
  const f32x16 size = min(abs(a), splat(448.0f));
  const i32x16 b = bits(size);
  const i32x16 odd = shift_right<20>(b) & splat(1);
  const i32x16 normal = shift_right<20>(b + (splat(0x7ffff) + odd)) - splat(120 << 3);
  const i32x16 tiny = round_to_int(size * splat(512.0f));  // multiples of 2^-9 below 2^-6; 8 of them are 0x08
  const i32x16 sign = shift_right<24>(bits(a)) & splat(0x80);
  std::int32_t code[16];
  store(code, sign | select(less(size, splat(0x1p-6f)), tiny, normal));
  for (int lane = 0; lane < 16; ++lane) p[lane].bits = static_cast<std::uint8_t>(code[lane]);
}

// Wants |a| <= 127 up to rounding.
[[gnu::always_inline]] inline void store(std::int8_t* p, f32x16 a) {
  std::int32_t code[16];
  store(code, round_to_int(min(max(a, splat(-127.0f)), splat(127.0f))));
  for (int lane = 0; lane < 16; ++lane) p[lane] = static_cast<std::int8_t>(code[lane]);
}

// Calls f(E{}) with the type of entries.
template <class F>
void with_format(CacheFormat format, F&& f) {
  switch (format) {
    case CacheFormat::f32: return f(float{});
    case CacheFormat::bf16: return f(bf16{});
    case CacheFormat::f16: return f(f16{});
    case CacheFormat::e4m3: return f(e4m3{});
    case CacheFormat::int8: return f(std::int8_t{});
  }
}

}  // namespace plait::PLAIT_ISA
