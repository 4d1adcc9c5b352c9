// The gated delta rule over a slab of state: dk rows of 16 or 32 columns that stay in the first-level cache while
// all tokens at hand pass through. Columns of a state do not depend on each other.
#pragma once

#include "entries.hpp"
#include "rows.hpp"

namespace plait::PLAIT_ISA {

inline constexpr int kSlab = 32;  // columns of a slab

// What of one head goes into the rule. Rows of q, k and v are `stride` numbers apart.
struct HeadRows {
  const float *q, *k;
  float* v;  // replaced by the outputs
  const float *decay, *beta;
  std::int64_t stride;
};

// a as it comes back from storage in format S.
template <class S>
[[gnu::always_inline]] inline f32x16 rounded(f32x16 a) {
  if constexpr (std::is_same_v<S, bf16>) {
    const i32x16 b = bits(a);
    const i32x16 even = b + (splat(0x7fff) + (shift_right<16>(b) & splat(1)));
    return from_bits(select(is_nan(a), b | splat(0x400000), even) & splat(static_cast<std::int32_t>(0xffff0000u)));
  } else if constexpr (std::is_same_v<S, f16>) {
    f16 stored[16];
    store(stored, a);
    return load(stored);
  } else {
    return a;
  }
}

// Sᵀk of a slab [dk][16 N].
template <int N>
void project(const float* slab, const float* k, int dk, f32x16 (&out)[N]) {
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) out[n] = zero();
  for (int i = 0; i < dk; ++i) {
    const f32x16 x = splat(k[i]);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) out[n] = fma(x, load(slab + (i * N + n) * 16), out[n]);
  }
}

// One token: slab ← decay · slab + k deltaᵀ, rounded to S. Returns o = slabᵀ q, and with `ahead` the projection of
// the new slab on the next token's key, by the same sums that `project` takes.
template <int N, class S, bool ahead>
[[gnu::always_inline]] inline void step(float* slab, const float* q, const float* k, const float* next, int dk,
                                        float decay, const f32x16 (&delta)[N], f32x16 (&o)[N],
                                        f32x16 (&projected)[N]) {
  const f32x16 shrink = splat(decay);
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) o[n] = projected[n] = zero();
  for (int i = 0; i < dk; ++i) {
    const f32x16 key = splat(k[i]), query = splat(q[i]);
    f32x16 following;
    if constexpr (ahead) following = splat(next[i]);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* place = slab + (i * N + n) * 16;
      const f32x16 x = rounded<S>(fma(key, delta[n], shrink * load(place)));
      store(place, x);
      o[n] = fma(query, x, o[n]);
      if constexpr (ahead) projected[n] = fma(following, x, projected[n]);
    }
  }
}

// `count` tokens, from 1 up, of one head pass through a slab. `passed(t)` is called when t tokens have.
template <int N, class S, class Passed>
void pass_tokens(float* slab, const HeadRows& rows, std::int64_t count, int dk, Passed&& passed) {
  f32x16 projected[N], delta[N], o[N];
  project<N>(slab, rows.k, dk, projected);
  for (std::int64_t t = 0; t < count; ++t) {
    const float* q = rows.q + t * rows.stride;
    const float* k = rows.k + t * rows.stride;
    float* v = rows.v + t * rows.stride;
    const f32x16 shrink = splat(rows.decay[t]), beta = splat(rows.beta[t]);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      // The decayed state's projection is the projection, decayed.
      delta[n] = beta * fma(negate(shrink), projected[n], load(v + 16 * n));
    }
    if (t + 1 < count) {
      step<N, S, true>(slab, q, k, k + rows.stride, dk, rows.decay[t], delta, o, projected);
    } else {
      step<N, S, false>(slab, q, k, k, dk, rows.decay[t], delta, o, projected);
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) store(v + 16 * n, o[n]);
    passed(t + 1);
  }
}

// Copies columns of a state [dk][dv] in format S to a slab [dk][16 N], zeros behind the last column, and back.
template <int N, class S>
void load_slab(const S* state, int dk, int dv, int columns, float* slab) {
  for (int i = 0; i < dk; ++i) {
    for (int n = 0; n < N; ++n) {
      const int left = columns - 16 * n;
      const S* from = state + static_cast<std::int64_t>(i) * dv + 16 * n;
      store(slab + (i * N + n) * 16, left >= 16 ? load(from) : load_first(from, left));
    }
  }
}
template <int N, class S>
void store_slab(const float* slab, int dk, int dv, int columns, S* state) {
  for (int i = 0; i < dk; ++i) {
    for (int n = 0; n < N; ++n) {
      const int left = columns - 16 * n;
      S* to = state + static_cast<std::int64_t>(i) * dv + 16 * n;
      const f32x16 x = load(slab + (i * N + n) * 16);
      if (left >= 16) {
        store(to, x);
      } else {
        store_first(to, x, left);
      }
    }
  }
}

}  // namespace plait::PLAIT_ISA
