// Norms and rotary of one row: the same arithmetic wherever they are fused in.
#pragma once

#include "../simd.hpp"

namespace plait::PLAIT_ISA {

// Calls f(index, count) for runs of sixteen numbers of a row of n; the last may have fewer.
template <class F>
[[gnu::always_inline]] inline void by_sixteen(std::int64_t n, F&& f) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, static_cast<int>(n - i));
}

[[gnu::always_inline]] inline f32x16 load_up_to(const float* p, int n) {
  return n == 16 ? load(p) : load_first(p, n);
}
[[gnu::always_inline]] inline void store_up_to(float* p, f32x16 a, int n) {
  if (n == 16) {
    store(p, a);
  } else {
    store_first(p, a, n);
  }
}

// Σ x². Four accumulators take runs of sixteen in turn, so that additions overlap.
inline float sum_of_squares(const float* x, std::int64_t n) {
  f32x16 s[4] = {zero(), zero(), zero(), zero()};
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const f32x16 v = load(x + i + 16 * j);
      s[j] = fma(v, v, s[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j, i += 16) {
    if (i >= n) break;
    const f32x16 v = load_up_to(x + i, n - i < 16 ? static_cast<int>(n - i) : 16);
    s[j] = fma(v, v, s[j]);
  }
  return reduce_add((s[0] + s[1]) + (s[2] + s[3]));
}

// 1 / sqrt(a)
inline float inverse_sqrt(float a) { return 1.0f / __builtin_sqrtf(a); }

inline float norm_factor(const float* x, std::int64_t n, float eps) {
  return inverse_sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

// out = x · factor · weight, times SiLU(gate) unless null.
inline void norm_row(const float* x, const float* gate, const float* weight, float factor, float* out,
                     std::int64_t n) {
  by_sixteen(n, [=](std::int64_t i, int count) {
    f32x16 y = (load_up_to(x + i, count) * splat(factor)) * load_up_to(weight + i, count);
    if (gate != nullptr) y = y * silu(load_up_to(gate + i, count));
    store_up_to(out + i, y, count);
  });
}

// Turns the first 2 * half numbers of x by angles given as cos and sin [half]; number i pairs with i + half.
inline void rotate_head(float* x, const float* cos, const float* sin, int half) {
  by_sixteen(half, [=](std::int64_t i, int n) {
    const f32x16 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    const f32x16 left = load_up_to(x + i, n), right = load_up_to(x + half + i, n);
    store_up_to(x + i, fma(left, c, negate(right * s)), n);
    store_up_to(x + half + i, fma(right, c, left * s), n);
  });
}

// A head as attention wants it: out = rotary(norm(x)), zeros from dim up to the next multiple of 16.
inline void prepare_head(const float* x, int dim, const float* norm, float eps, const float* cos, const float* sin,
                         int half, float* out) {
  if (norm != nullptr) {
    const f32x16 factor = splat(norm_factor(x, dim, eps));
    by_sixteen(dim, [=](std::int64_t i, int n) {
      store(out + i, (load_up_to(x + i, n) * factor) * load_up_to(norm + i, n));
    });
  } else {
    by_sixteen(dim, [=](std::int64_t i, int n) { store(out + i, load_up_to(x + i, n)); });
  }
  rotate_head(out, cos, sin, half);
}

}  // namespace plait::PLAIT_ISA
