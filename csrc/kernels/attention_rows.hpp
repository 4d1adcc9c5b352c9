// Rows of queries against tiles of keys: the inner part of attention.
//
// A block of 16 keys is a panel [D][16] for the scores, and D/16 panels [16][16] for the values
// (plait/kernels/layout.py). Both products are small matrix products with one chain of fused multiply-adds for
// each number, so a row computes the same whatever rows are beside it.
#pragma once

#include "pages.hpp"

namespace plait::PLAIT_ISA {

inline constexpr int kTileKeys = 64;
inline constexpr int kTileBlocks = kTileKeys / kBlock;
// Rows and panels of the innermost product: as many sums as fill the registers.
#if defined(PLAIT_PORTABLE)
inline constexpr int kRows = 2, kPanels = 1;
#else
inline constexpr int kRows = 6, kPanels = kLanes == 16 ? 4 : 1;
#endif

// Keys and values of 64 positions from `first`, a multiple of 64, on. Blocks that do not exist are null. `next`
// are the keys that will be read after these, or these again.
template <class E, bool scaled>
struct KeyTile {
  const E *k[kTileBlocks], *v[kTileBlocks], *next[kTileBlocks];
  const float *k_scale[kTileBlocks], *v_scale[kTileBlocks];
  std::int64_t first;
};

// What a row has summed up: its weighted values [padded], the largest score, the sum of weights. The last two
// stand at [padded] and [padded + 1]; the odd sixteen keep rows off one another's cache sets.
struct Sums {
  float* data;
  int padded;

  static std::int64_t size(int padded) { return padded + 16; }
  float* row(std::int64_t r) const { return data + r * size(padded); }

  void clear(std::int64_t rows) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (int i = 0; i < padded; i += 16) store(row(r) + i, zero());
      row(r)[padded] = -__builtin_inff();
      row(r)[padded + 1] = 0;
    }
  }
};

// sums[m][n] += numbers a[m][0 .. depth) times panel b[n] [depth][16]. What will be read next, as large as the
// panels, is fetched meanwhile: with few rows memory is the limit, and blocks are too short for the processor to
// see where it goes on.
template <int M, int N, class E>
[[gnu::always_inline]] inline void multiply(f32x16 (&sums)[M][N], const float* const* a, const E* const* b,
                                            const E* const* next, int depth) {
  constexpr int kLine = 64 / (kBlock * sizeof(E));  // steps that read one line of the cache
  for (int k = 0; k < depth; ++k) {
    f32x16 panel[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) panel[n] = load(b[n] + k * kBlock);
    if (k % kLine == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) __builtin_prefetch(next[n] + k * kBlock, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const f32x16 x = splat(a[m][k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = fma(x, panel[n], sums[m][n]);
    }
  }
}

// Scores of M rows with N blocks of keys; `scores` points at the first block's, rows kTileKeys apart. Fetches
// `v`.
template <int M, int N, class E>
void score_blocks(const float* const* q, const E* const* k, const E* const* v, int dim, float* scores) {
  f32x16 sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[m][n] = zero();
  }
  multiply<M, N>(sums, q, k, v, dim);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(scores + m * kTileKeys + n * kBlock, sums[m][n]);
  }
}

// N panels of each row's sums: shrunk, then the first `keys` values of the tile added by weight. Fetches
// `next`.
template <int M, int N, class E>
void add_values(const float* weights, const float* shrink, const E* const* v, const E* const* next, int keys,
                int panel, float* const* sums) {
  f32x16 total[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) total[m][n] = splat(shrink[m]) * load(sums[m] + (panel + n) * kBlock);
  }
  for (int b = 0; b * kBlock < keys; ++b) {
    const float* rows[M];
    const E *panels[N], *ahead[N];
    for (int m = 0; m < M; ++m) rows[m] = weights + m * kTileKeys + b * kBlock;
    for (int n = 0; n < N; ++n) {
      panels[n] = v[b] + (panel + n) * kBlock * kBlock;
      ahead[n] = next[b] + (panel + n) * kBlock * kBlock;
    }
    const int left = keys - b * kBlock;
    multiply<M, N>(total, rows, panels, ahead, left < kBlock ? left : kBlock);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(sums[m] + (panel + n) * kBlock, total[m][n]);
  }
}

// Scales one row's scores and sets those of keys behind `position` to minus infinity; returns the largest.
template <class E, bool scaled>
float mask_scores(const KeyTile<E, scaled>& tile, std::int64_t position, float* scores) {
  f32x16 top = splat(-__builtin_inff());
  for (int b = 0; b < kTileBlocks; ++b) {
    const std::int64_t ahead = position - tile.first - b * kBlock;  // visible keys of the block after its first
    f32x16 x = splat(-__builtin_inff());
    if (ahead >= 0) {
      x = load(scores + b * kBlock);
      if constexpr (scaled) x = x * load(tile.k_scale[b]);
      if (ahead < kBlock - 1) x = select(less(splat(static_cast<std::int32_t>(ahead)), lane_ids()), splat(-__builtin_inff()), x);
    }
    store(scores + b * kBlock, x);
    top = max(x, top);
  }
  return reduce_max(top);
}

// Turns one row's scores into weights e^(score - peak), each times its value's scale; returns the sum of the e^...
template <class E, bool scaled>
float weigh(const KeyTile<E, scaled>& tile, int blocks, float peak, float* scores) {
  f32x16 weight[kTileBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kTileBlocks; ++b) {
    weight[b] = exp(load(scores + b * kBlock) - splat(peak));
    f32x16 times_scale = weight[b];
    if constexpr (scaled) {
      if (b < blocks) times_scale = weight[b] * load(tile.v_scale[b]);
    }
    store(scores + b * kBlock, times_scale);
  }
  return reduce_add((weight[0] + weight[1]) + (weight[2] + weight[3]));
}

// Adds a tile of keys to the sums of M rows: one step of the online softmax. Rows stand at rising positions, and
// the last sees at least one of the keys. Keys beyond the last row's may never have been written, and nothing is
// multiplied with them; a row that does not see a key which others see gives it the weight 0.
template <int M, class E, bool scaled>
void attend_rows(const float* const* q, const std::int64_t* position, int dim, int padded,
                 const KeyTile<E, scaled>& tile, float* const* sums) {
  const std::int64_t seen = position[M - 1] + 1 - tile.first;
  const int keys = seen < kTileKeys ? static_cast<int>(seen) : kTileKeys;
  const int blocks = (keys + kBlock - 1) / kBlock;
  alignas(64) float scores[M * kTileKeys];
  int b = 0;
  for (; b + kPanels <= blocks; b += kPanels) {
    score_blocks<M, kPanels>(q, tile.k + b, tile.v + b, dim, scores + b * kBlock);
  }
  for (; b < blocks; ++b) score_blocks<M, 1>(q, tile.k + b, tile.v + b, dim, scores + b * kBlock);

  alignas(64) float old_peak[16] = {}, peak[16] = {}, shrink[16];
  for (int m = 0; m < M; ++m) {
    if (position[m] < tile.first) continue;
    const float top = mask_scores(tile, position[m], scores + m * kTileKeys);
    old_peak[m] = sums[m][padded];
    peak[m] = old_peak[m] > top ? old_peak[m] : top;
    sums[m][padded] = peak[m];
  }
  store(shrink, exp(load(old_peak) - load(peak)));  // 1 for rows that see none of these keys
  for (int m = 0; m < M; ++m) {
    float* row = scores + m * kTileKeys;
    if (position[m] < tile.first) {
      for (int j = 0; j < kTileKeys; j += 16) store(row + j, zero());
      continue;
    }
    const float total = weigh(tile, blocks, peak[m], row);
    sums[m][padded + 1] = sums[m][padded + 1] * shrink[m] + total;
  }

  const int panels = padded / kBlock;
  int panel = 0;
  for (; panel + kPanels <= panels; panel += kPanels) {
    add_values<M, kPanels>(scores, shrink, tile.v, tile.next, keys, panel, sums);
  }
  for (; panel < panels; ++panel) add_values<M, 1>(scores, shrink, tile.v, tile.next, keys, panel, sums);
}

// attend_rows for a number of rows, from 1 to kRows, known when it runs.
template <int M = kRows, class E, bool scaled>
void attend_up_to(int count, const float* const* q, const std::int64_t* position, int dim, int padded,
                  const KeyTile<E, scaled>& tile, float* const* sums) {
  if (count == M) {
    attend_rows<M>(q, position, dim, padded, tile, sums);
  } else if constexpr (M > 1) {
    attend_up_to<M - 1>(count, q, position, dim, padded, tile, sums);
  }
}

// into = into and from, as if their keys had been one softmax.
inline void combine(Sums into, Sums from, std::int64_t row) {
  float* a = into.row(row);
  const float* b = from.row(row);
  const int padded = into.padded;
  const float peak = a[padded] > b[padded] ? a[padded] : b[padded];
  alignas(64) float factors[16] = {a[padded] - peak, b[padded] - peak};
  store(factors, exp(load(factors)));
  const f32x16 ours = splat(factors[0]), theirs = splat(factors[1]);
  for (int i = 0; i < padded; i += 16) store(a + i, fma(load(b + i), theirs, load(a + i) * ours));
  a[padded] = peak;
  a[padded + 1] = a[padded + 1] * factors[0] + b[padded + 1] * factors[1];
}

}  // namespace plait::PLAIT_ISA
