// Causal attention over pages.
//
// The query heads of one key-value head, and several tokens, are the rows of a query tile. Every sum has one
// order, fixed by absolute positions:
//
//   keys      | tile of 64 | tile of 64 | ...              online softmax from tile to tile
//   partials  | 512 keys: 8 tiles       | 512 keys | ...   each starts anew; then combined in order
//
// So partials may be computed by different threads, and chunks may end anywhere.
#include "attention_rows.hpp"
#include "mixers.hpp"

namespace plait::PLAIT_ISA {
namespace {

constexpr int kPartialKeys = 512;
constexpr int kTileRows = 96;                  // their sums stay in the second-level cache
constexpr std::int64_t kMostApart = 4 << 20;   // numbers kept for partials that are computed apart

// Row r is query head `head * group + r % group` of token r / group of the chunk, so positions rise with rows.
struct QueryTile {
  std::int64_t chunk, first_row;
  std::int64_t first_part;  // where its partials start among those of all tiles
  int head, rows;
};

// One call: what its tasks share.
template <class E>
class Attention {
 public:
  Attention(const BatchView& batch, const PagesView& pages, const AttentionCall& call)
      : batch_(batch),
        pages_(pages),
        call_(call),
        group_(call.heads / pages.kv_heads),
        dim_(pages.head_dim),
        padded_(pages.padded_dim()) {
    cut_tiles();
  }

  void run() const {
    // A few tiles with long contexts, as in decoding: their partials are computed apart, if there is room.
    const bool few = threads() > 1 && num_tiles_ < 4 * threads() && num_parts_ > num_tiles_;
    if (few && room_ <= kMostApart) {
      run_apart();
    } else {
      // From the last: later tokens have more keys, and long tasks should not come last.
      run_tasks(num_tiles_, work_, [&](std::int64_t task) { run_whole(tiles_[num_tiles_ - 1 - task]); });
    }
  }

 private:
  void cut_tiles() {
    std::int64_t most = 0;
    for (std::int64_t c = 0; c < batch_.chunks; ++c) most += pages_.kv_heads * ceil_div(rows_of(c), kTileRows);
    tiles_ = static_cast<QueryTile*>(scratch(4, static_cast<std::size_t>(most) * sizeof(QueryTile)));
    for (std::int64_t c = 0; c < batch_.chunks; ++c) {
      work_ += rows_of(c) * pages_.kv_heads * (batch_.context[c] + rows_of(c) / group_) * padded_ * 4;
      for (int head = 0; head < pages_.kv_heads; ++head) {
        for (std::int64_t row = 0; row < rows_of(c); row += kTileRows) {
          QueryTile& tile = tiles_[num_tiles_++];
          tile = {c, row, num_parts_, head, static_cast<int>(smaller(kTileRows, rows_of(c) - row))};
          num_parts_ += parts_of(tile);
          room_ += parts_of(tile) * tile.rows * Sums::size(padded_);
        }
      }
    }
  }

  std::int64_t rows_of(std::int64_t chunk) const {
    return (batch_.query_start[chunk + 1] - batch_.query_start[chunk]) * static_cast<std::int64_t>(group_);
  }
  std::int64_t position(const QueryTile& tile, std::int64_t row) const {
    return batch_.context[tile.chunk] + (tile.first_row + row) / group_;
  }
  std::int64_t last_position(const QueryTile& tile) const { return position(tile, tile.rows - 1); }
  std::int64_t parts_of(const QueryTile& tile) const { return last_position(tile) / kPartialKeys + 1; }

  void run_whole(const QueryTile& tile) const {
    const std::int64_t size = tile.rows * Sums::size(padded_);
    float* memory = static_cast<float*>(scratch(5, static_cast<std::size_t>(2 * size) * sizeof(float)));
    const Sums sums{memory, padded_}, part{memory + size, padded_};
    float* queries = prepare_queries(tile);
    add_part(tile, queries, 0, sums);
    for (std::int64_t p = 1; p < parts_of(tile); ++p) {
      add_part(tile, queries, p, part);
      combine_part(tile, p, part, sums);
    }
    finish(tile, sums);
  }

  void run_apart() const {
    struct Part {
      std::int64_t tile, number;
      float* sums;
    };
    const std::size_t bytes = static_cast<std::size_t>(room_) * sizeof(float);
    float* memory = static_cast<float*>(scratch(6, bytes + static_cast<std::size_t>(num_parts_) * sizeof(Part)));
    Part* parts = reinterpret_cast<Part*>(memory + room_);  // room_ is a multiple of 16
    for (std::int64_t t = 0; t < num_tiles_; ++t) {
      for (std::int64_t p = 0; p < parts_of(tiles_[t]); ++p) {
        parts[tiles_[t].first_part + p] = {t, p, memory};
        memory += tiles_[t].rows * Sums::size(padded_);
      }
    }
    run_tasks(num_parts_, work_, [&](std::int64_t task) {
      const QueryTile& tile = tiles_[parts[task].tile];
      add_part(tile, prepare_queries(tile), parts[task].number, {parts[task].sums, padded_});
    });
    run_tasks(num_tiles_, 2 * room_, [&](std::int64_t task) {
      const QueryTile& tile = tiles_[task];
      const Part* own = parts + tile.first_part;
      for (std::int64_t p = 1; p < parts_of(tile); ++p) {
        combine_part(tile, p, {own[p].sums, padded_}, {own[0].sums, padded_});
      }
      finish(tile, {own[0].sums, padded_});
    });
  }

  // Queries of a tile [rows][padded], after norm, rotary and the factor on scores, and behind them room for a
  // widened tile of keys.
  float* prepare_queries(const QueryTile& tile) const {
    const std::int64_t size = (kTileRows + 2 * kTileKeys) * static_cast<std::int64_t>(padded_);
    float* out = static_cast<float*>(scratch(7, static_cast<std::size_t>(size) * sizeof(float)));
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const std::int64_t token = token_of(tile, r);
      const std::int64_t turn = token * call_.rotary_half;
      float* q = out + r * padded_;
      prepare_head(call_.q + token * call_.q_stride + head_of(tile, r) * dim_, dim_, call_.q_norm, call_.eps,
                   call_.cos + turn, call_.sin + turn, call_.rotary_half, q);
      for (int i = 0; i < padded_; i += 16) store(q + i, load(q + i) * splat(call_.scale));
    }
    return out;
  }

  std::int64_t token_of(const QueryTile& tile, std::int64_t row) const {
    return batch_.query_start[tile.chunk] + (tile.first_row + row) / group_;
  }
  std::int64_t head_of(const QueryTile& tile, std::int64_t row) const {
    return static_cast<std::int64_t>(tile.head) * group_ + (tile.first_row + row) % group_;
  }

  // The sums of a tile's rows over the keys of one partial, from nothing; rows before these keys keep none.
  void add_part(const QueryTile& tile, float* queries, std::int64_t part, Sums sums) const {
    sums.clear(tile.rows);
    const std::int64_t end = smaller((part + 1) * kPartialKeys, last_position(tile) + 1);
    auto keys = find_keys(tile, part * kPartialKeys);
    for (std::int64_t first = part * kPartialKeys; first < end; first += kTileKeys) {
      const auto next = find_next_keys(tile, keys);
      for (int b = 0; b < kTileBlocks; ++b) keys.next[b] = next.k[b] != nullptr ? next.k[b] : keys.k[b];
      // Many rows share the work of widening; the numbers are the same either way.
      if (!std::is_same_v<E, float> && tile.rows > 2 * kRows) {
        add_tile(tile, queries, widen_keys(keys, queries + kTileRows * padded_), sums);
      } else {
        add_tile(tile, queries, keys, sums);
      }
      keys = next;
    }
  }

  template <class Keys>
  void add_tile(const QueryTile& tile, const float* queries, const Keys& keys, Sums sums) const {
    for (int r = 0; r < tile.rows; r += kRows) {
      const int count = tile.rows - r < kRows ? tile.rows - r : kRows;
      const float* q[kRows];
      float* rows[kRows];
      std::int64_t positions[kRows];
      for (int m = 0; m < count; ++m) {
        q[m] = queries + (r + m) * padded_;
        rows[m] = sums.row(r + m);
        positions[m] = position(tile, r + m);
      }
      if (positions[count - 1] < keys.first) continue;
      attend_up_to(count, q, positions, dim_, padded_, keys, rows);
    }
  }

  KeyTile<E, kScaled<E>> find_keys(const QueryTile& tile, std::int64_t first) const {
    const Place place{pages_, batch_.page_table + tile.chunk * batch_.table_width, tile.head};
    const std::int64_t last = last_position(tile);
    KeyTile<E, kScaled<E>> keys{};
    keys.first = first;
    for (int b = 0; b < kTileBlocks && first + b * kBlock <= last; ++b) {
      const std::int64_t at = first + b * kBlock;
      const std::int64_t offset = place.offset<E>(at);
      keys.k[b] = reinterpret_cast<const E*>(pages_.k + offset);
      keys.v[b] = reinterpret_cast<const E*>(pages_.v + offset);
      if constexpr (kScaled<E>) {
        keys.k_scale[b] = place.scale(pages_.k_scale, at);
        keys.v_scale[b] = place.scale(pages_.v_scale, at);
      }
    }
    return keys;
  }

  // The tile of keys after one, or what the next task begins with (see `run`), or the same keys.
  KeyTile<E, kScaled<E>> find_next_keys(const QueryTile& tile, const KeyTile<E, kScaled<E>>& keys) const {
    if (keys.first + kTileKeys <= last_position(tile)) return find_keys(tile, keys.first + kTileKeys);
    return &tile == tiles_ ? keys : find_keys(*(&tile - 1), 0);
  }

  KeyTile<float, kScaled<E>> widen_keys(const KeyTile<E, kScaled<E>>& keys, float* memory) const {
    KeyTile<float, kScaled<E>> wide{};
    wide.first = keys.first;
    for (int b = 0; b < kTileBlocks && keys.k[b] != nullptr; ++b) {
      float* k = memory + 2 * b * kBlock * padded_;
      float* v = k + kBlock * padded_;
      for (int i = 0; i < kBlock * padded_; i += 16) {
        store(k + i, load(keys.k[b] + i));
        store(v + i, load(keys.v[b] + i));
      }
      wide.k[b] = wide.next[b] = k;  // nothing to fetch: these lie in the cache
      wide.v[b] = v;
      wide.k_scale[b] = keys.k_scale[b];
      wide.v_scale[b] = keys.v_scale[b];
    }
    return wide;
  }

  // Rows that stand before a partial's first key have nothing in it.
  void combine_part(const QueryTile& tile, std::int64_t part, Sums from, Sums into) const {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      if (position(tile, r) >= part * kPartialKeys) combine(into, from, r);
    }
  }

  // Divides by the sum of weights and multiplies by the gate. Adding 0 makes -0 of sums that vanished to +0, so
  // that not even signs of zeros tell rows beside a masked key from others.
  void finish(const QueryTile& tile, Sums sums) const {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const float* row = sums.row(r);
      const f32x16 factor = splat(1.0f / row[padded_ + 1]);
      const std::int64_t token = token_of(tile, r), column = head_of(tile, r) * dim_;
      float* out = call_.out + token * call_.heads * dim_ + column;
      const float* gate = call_.gate == nullptr ? nullptr : call_.gate + token * call_.gate_stride + column;
      by_sixteen(dim_, [&](std::int64_t i, int n) {
        f32x16 x = fma(load(row + i), factor, zero());
        if (gate != nullptr) x = x * sigmoid(load_up_to(gate + i, n));
        store_up_to(out + i, x, n);
      });
    }
  }

  const BatchView& batch_;
  const PagesView& pages_;
  const AttentionCall& call_;
  const int group_, dim_, padded_;
  QueryTile* tiles_ = nullptr;
  std::int64_t num_tiles_ = 0, num_parts_ = 0;
  std::int64_t room_ = 0;  // numbers that the sums of all partials take
  std::int64_t work_ = 0;  // floating-point operations, about
};

}  // namespace

void attention(const BatchView& batch, const PagesView& pages, const AttentionCall& call) {
  with_format(pages.format, [&](auto entry) {
    using E = decltype(entry);
    write_pages<E>(batch, pages, call);
    Attention<E>(batch, pages, call).run();
  });
}

}  // namespace plait::PLAIT_ISA
