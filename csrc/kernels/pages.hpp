// Writing keys and values into pages.
#pragma once

#include "entries.hpp"
#include "rows.hpp"
#include "tasks.hpp"

namespace plait::PLAIT_ISA {

inline constexpr int kBlock = 16;  // tokens of a block, lanes of a panel

// Where positions of one chunk and head lie. Offsets are 64-bit: an arena may be larger than 2^32 numbers.
struct Place {
  const PagesView& pages;
  const std::int32_t* table;
  int head;

  std::int64_t page(std::int64_t position) const {
    return table[position / pages.page_size] * pages.page_bytes + head * pages.head_bytes;
  }
  // Numbers from the start of a head's K (or V) to a position's block.
  std::int64_t block(std::int64_t position) const {
    return position % pages.page_size / kBlock * kBlock * pages.padded_dim();
  }
  // Bytes from the arena's K (or V) to a position's block.
  template <class E>
  std::int64_t offset(std::int64_t position) const {
    return page(position) + block(position) * static_cast<std::int64_t>(sizeof(E));
  }
  float* scale(std::byte* scales, std::int64_t position) const {
    return reinterpret_cast<float*>(scales + page(position)) + position % pages.page_size;
  }
};

// max |x| / M of a vector whose padding is zero; NaN if any number is infinite or NaN.
inline float entry_scale(const float* x, int padded, float largest) {
  f32x16 top = zero(), poison = zero();
  for (int i = 0; i < padded; i += 16) {
    const f32x16 a = load(x + i);
    top = max(abs(a), top);
    poison = poison + a * zero();
  }
  return reduce_max(top) / largest + reduce_add(poison);
}

// x [padded] in storage format; returns the scale (1 for formats without).
template <class E>
float encode(const float* x, int padded, E* out) {
  if constexpr (kScaled<E>) {
    const float scale = entry_scale(x, padded, kLargestEntry<E>);
    // Without a finite scale entries mean nothing: the scale carries the NaN.
    const bool sound = scale > 0 && scale < __builtin_inff();
    for (int i = 0; i < padded; i += 16) store(out + i, sound ? load(x + i) / splat(scale) : zero());
    return scale;
  } else {
    for (int i = 0; i < padded; i += 16) store(out + i, load(x + i));
    return 1.0f;
  }
}

// One token and head: K goes down a column of its block's panel, V along a row of each of its panels.
template <class E>
void write_entry(const Place& place, std::int64_t position, const float* k, const float* v) {
  const int padded = place.pages.padded_dim();
  const std::int64_t lane = position % kBlock;
  E entry[kLargestHead];
  const float k_scale = encode(k, padded, entry);
  const std::int64_t offset = place.offset<E>(position);
  E* column = reinterpret_cast<E*>(place.pages.k + offset) + lane;
  for (int d = 0; d < padded; ++d) column[d * kBlock] = entry[d];
  const float v_scale = encode(v, padded, entry);
  E* row = reinterpret_cast<E*>(place.pages.v + offset) + lane * kBlock;
  for (int d = 0; d < padded; d += kBlock) std::memcpy(row + d * kBlock, entry + d, kBlock * sizeof(E));
  if constexpr (kScaled<E>) {
    *place.scale(place.pages.k_scale, position) = k_scale;
    *place.scale(place.pages.v_scale, position) = v_scale;
  }
}

// All keys (after norm and rotary) and values of a batch. Tokens are independent, so threads share them evenly.
template <class E>
void write_pages(const BatchView& batch, const PagesView& pages, const AttentionCall& call) {
  const std::int64_t grain = ceil_div(kWorthAThread, 8 * pages.kv_heads * pages.padded_dim());
  parallel_for(batch.tokens(), grain, [&](std::int64_t begin, std::int64_t end, int) {
    alignas(64) float k[kLargestHead], v[kLargestHead];
    std::int64_t chunk = 0;
    for (std::int64_t token = begin; token < end; ++token) {
      while (batch.query_start[chunk + 1] <= token) ++chunk;
      const std::int64_t position = batch.context[chunk] + token - batch.query_start[chunk];
      const float* cos = call.cos + token * call.rotary_half;
      const float* sin = call.sin + token * call.rotary_half;
      for (int head = 0; head < pages.kv_heads; ++head) {
        const float* key = call.k + token * call.k_stride + head * pages.head_dim;
        const float* value = call.v + token * call.v_stride + head * pages.head_dim;
        prepare_head(key, pages.head_dim, call.k_norm, call.eps, cos, sin, call.rotary_half, k);
        by_sixteen(pages.head_dim, [&](std::int64_t i, int n) { store(v + i, load_up_to(value + i, n)); });
        const Place place{pages, batch.page_table + chunk * batch.table_width, head};
        write_entry<E>(place, position, k, v);
      }
    }
  });
}

}  // namespace plait::PLAIT_ISA
