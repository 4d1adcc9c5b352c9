// exp, sigmoid, SiLU and softplus over sixteen lanes: polynomials, the same bits on every instruction set.
#pragma once

namespace plait::PLAIT_ISA {

// e^a to 1 unit in the last place; 0 below -104, infinity above 88.73, NaN for NaN.
//
// a = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder 2^-27); 2^n in two
// factors, since n reaches from -150 to 129 and an exponent from -126 to 127.
[[gnu::always_inline]] inline f32x16 exp(f32x16 a) {
  const f32x16 x = min(max(a, splat(-104.0f)), splat(89.0f));
  const f32x16 n = round_even(x * splat(0x1.715476p0f));
  f32x16 r = fma(n, splat(-0x1.62e400p-1f), x);  // ln 2 in two parts, the first with trailing zeros
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  f32x16 p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const i32x16 power = round_to_int(n);
  const i32x16 half = shift_right<1>(power);
  const f32x16 low = from_bits(shift_left<23>(half + splat(127)));
  const f32x16 high = from_bits(shift_left<23>((power - half) + splat(127)));
  const f32x16 tiny = select(less(a, splat(-104.0f)), zero(), (p * low) * high);
  return select(is_nan(a), a, tiny);
}

// 1 / (1 + e^-a)
[[gnu::always_inline]] inline f32x16 sigmoid(f32x16 a) {
  return splat(1.0f) / (splat(1.0f) + exp(negate(a)));
}

// a / (1 + e^-a)
[[gnu::always_inline]] inline f32x16 silu(f32x16 a) { return a / (splat(1.0f) + exp(negate(a))); }

// ln(1 + u) for 0 <= u <= 1, as 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...) with s = u / (2 + u) <= 1/3.
[[gnu::always_inline]] inline f32x16 log1p_unit(f32x16 u) {
  const f32x16 s = u / (splat(2.0f) + u);
  const f32x16 square = s * s;
  f32x16 p = splat(1.0f / 15);
  p = fma(p, square, splat(1.0f / 13));
  p = fma(p, square, splat(1.0f / 11));
  p = fma(p, square, splat(1.0f / 9));
  p = fma(p, square, splat(1.0f / 7));
  p = fma(p, square, splat(1.0f / 5));
  p = fma(p, square, splat(1.0f / 3));
  const f32x16 twice = s + s;
  return fma(twice, square * p, twice);
}

// ln(1 + e^a) = max(a, 0) + ln(1 + e^-|a|); NaN for NaN.
[[gnu::always_inline]] inline f32x16 softplus(f32x16 a) {
  return max(zero(), a) + log1p_unit(exp(negate(abs(a))));
}

}  // namespace plait::PLAIT_ISA
