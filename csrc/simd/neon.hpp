// Sixteen lanes in four 128-bit NEON registers (Armv8-A).
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace plait::PLAIT_ISA {

inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 32;

using f32reg [[gnu::vector_size(16)]] = float;
using i32reg [[gnu::vector_size(16)]] = std::int32_t;

struct f32x16 {
  f32reg r[4];
};
struct i32x16 {
  i32reg r[4];
};

[[gnu::always_inline]] inline f32reg reg_fma(f32reg a, f32reg b, f32reg c) {
  return (f32reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
[[gnu::always_inline]] inline f32reg reg_sqrt(f32reg a) { return (f32reg)vsqrtq_f32((float32x4_t)a); }
// Arm's own maximum treats NaN and signed zeros otherwise than x86's.
[[gnu::always_inline]] inline f32reg reg_max(f32reg a, f32reg b) { return a > b ? a : b; }
[[gnu::always_inline]] inline f32reg reg_min(f32reg a, f32reg b) { return a < b ? a : b; }

[[gnu::always_inline]] inline i32x16 widen(const std::uint16_t* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  return {{(i32reg)vmovl_u16(vget_low_u16(low)), (i32reg)vmovl_high_u16(low),
           (i32reg)vmovl_u16(vget_low_u16(high)), (i32reg)vmovl_high_u16(high)}};
}
[[gnu::always_inline]] inline i32x16 widen(const std::uint8_t* p) {
  const uint8x16_t all = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
  return {{(i32reg)vmovl_u16(vget_low_u16(low)), (i32reg)vmovl_high_u16(low),
           (i32reg)vmovl_u16(vget_low_u16(high)), (i32reg)vmovl_high_u16(high)}};
}
[[gnu::always_inline]] inline i32x16 widen(const std::int8_t* p) {
  const int8x16_t all = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
  return {{(i32reg)vmovl_s16(vget_low_s16(low)), (i32reg)vmovl_high_s16(low),
           (i32reg)vmovl_s16(vget_low_s16(high)), (i32reg)vmovl_high_s16(high)}};
}
// The low 16 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::uint16_t* p, i32x16 a) {
  vst1q_u16(p, vuzp1q_u16((uint16x8_t)a.r[0], (uint16x8_t)a.r[1]));
  vst1q_u16(p + 8, vuzp1q_u16((uint16x8_t)a.r[2], (uint16x8_t)a.r[3]));
}
// The low 8 bits of each lane.
[[gnu::always_inline]] inline void narrow(std::int8_t* p, i32x16 a) {
  const uint16x8_t low = vuzp1q_u16((uint16x8_t)a.r[0], (uint16x8_t)a.r[1]);
  const uint16x8_t high = vuzp1q_u16((uint16x8_t)a.r[2], (uint16x8_t)a.r[3]);
  vst1q_s8(p, vreinterpretq_s8_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))));
}
[[gnu::always_inline]] inline f32x16 half_to_float(const std::uint16_t* p) {
  f32x16 out;
  for (int i = 0; i < 4; ++i) out.r[i] = (f32reg)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return out;
}
[[gnu::always_inline]] inline void float_to_half(std::uint16_t* p, f32x16 a) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a.r[i])));
  }
}

}  // namespace plait::PLAIT_ISA
