// The Gated DeltaNet mixer: convolution, delta rule (Yang et al., 2024) and gated norm.
//
// It works on panels of a few hundred tokens of the flat batch, whose intermediate numbers stay in cache. Per key
// head and token they are, each padded to runs of sixteen:
//
//   | q [dk] | k [dk] | v of value head 0 [dv], replaced by its output | v of value head 1 | ...
//
// The state passes from panel to panel through its unit, which loses nothing: it is rounded to the unit's format
// after every token anyway.
#include "conv.hpp"
#include "delta_rule.hpp"
#include "mixers.hpp"

namespace plait::PLAIT_ISA {
namespace {

constexpr std::int64_t kPanel = 256;  // tokens

int padded(int n) { return (n + 15) / 16 * 16; }

class Delta {
 public:
  Delta(const BatchView& batch, const StatesView& states, const DeltaCall& call)
      : batch_(batch),
        states_(states),
        call_(call),
        row_(2 * padded(states.key_dim) + states.value_heads * padded(states.value_dim)),
        panel_(smaller(kPanel, batch.tokens())) {
    const std::int64_t size = states.groups * panel_ * row_ + 2 * states.heads() * panel_;
    rows_ = static_cast<float*>(scratch(4, static_cast<std::size_t>(size) * sizeof(float)));
    decay_ = rows_ + states.groups * panel_ * row_;
    beta_ = decay_ + states.heads() * panel_;
  }

  void run() {
    const std::int64_t tokens = batch_.tokens();
    for (first_ = 0; first_ < tokens; first_ = last_) {
      last_ = smaller(first_ + kPanel, tokens);
      cut_chunks();
      prepare();
      with_format(states_.format, [&](auto entry) {
        if constexpr (!kScaled<decltype(entry)>) recur<decltype(entry)>();
      });
      deliver();
    }
    if (call_.conv_weight != nullptr) store_all_columns(batch_, states_, call_.x, call_.x_stride);
  }

 private:
  // Chunks with tokens in the panel.
  void cut_chunks() {
    while (batch_.query_start[first_chunk_ + 1] <= first_) ++first_chunk_;
    last_chunk_ = first_chunk_;
    while (last_chunk_ < batch_.chunks && batch_.query_start[last_chunk_] < last_) ++last_chunk_;
  }

  float* row(int group, std::int64_t token) const { return rows_ + (group * panel_ + token - first_) * row_; }
  float* value(int head, std::int64_t token) const {
    const int member = head % states_.value_heads;
    return row(head / states_.value_heads, token) + 2 * padded(states_.key_dim) + member * padded(states_.value_dim);
  }

  // q, k, v, decay and beta of the panel's tokens. Items are runs of tokens that lie in one chunk, by group.
  void prepare() {
    const std::int64_t runs = ceil_div(last_ - first_, kConvTokens);
    const std::int64_t work = (last_ - first_) * states_.channels() * 16;
    run_tasks(runs * states_.groups, work, [&](std::int64_t item) {
      const int group = static_cast<int>(item % states_.groups);
      const std::int64_t begin = first_ + item / states_.groups * kConvTokens;
      const std::int64_t end = smaller(begin + kConvTokens, last_);
      std::int64_t chunk = first_chunk_;
      for (std::int64_t t = begin; t < end;) {
        while (batch_.query_start[chunk + 1] <= t) ++chunk;
        const std::int64_t stop = smaller(end, batch_.query_start[chunk + 1]);
        fill_rows(chunk, group, t, stop);
        t = stop;
      }
      for (std::int64_t t = begin; t < end; ++t) normalise(row(group, t));
      if (group == 0) fill_gates(begin, end);
    });
  }

  void fill_rows(std::int64_t chunk, int group, std::int64_t begin, std::int64_t end) const {
    const int dk = states_.key_dim, dv = states_.value_dim;
    float* out = row(group, begin);
    for (int part = 0, from = 0; part < 2 + states_.value_heads; ++part) {
      const int size = part < 2 ? dk : dv;
      fill_part(chunk, group, from, size, begin, end, out);
      from += size;
      out += padded(size);
    }
  }

  // `size` channels from `from` of a group: convolved, or as they come.
  void fill_part(std::int64_t chunk, int group, int from, int size, std::int64_t begin, std::int64_t end,
                 float* out) const {
    const std::int64_t channel = group * static_cast<std::int64_t>(states_.group_channels()) + from;
    if (call_.conv_weight != nullptr) {
      const std::int64_t start = batch_.query_start[chunk];
      const ConvInputs inputs(batch_, states_, chunk, group, call_.x, call_.x_stride);
      convolve(inputs, call_.conv_weight + channel * states_.width, states_.width, from, size, begin - start,
               end - start, out, row_, true);
      return;
    }
    for (std::int64_t t = begin; t < end; ++t) {
      const float* x = call_.x + t * call_.x_stride + channel;
      by_sixteen(size, [&](std::int64_t i, int n) { store(out + (t - begin) * row_ + i, load_up_to(x + i, n)); });
    }
  }

  // q and k of a row to unit length, q times dk^-1/2.
  void normalise(float* row) const {
    const int dk = states_.key_dim;
    const float root = inverse_sqrt(static_cast<float>(dk));
    for (int part = 0; part < 2; ++part, row += padded(dk)) {
      const float length = inverse_sqrt(sum_of_squares(row, padded(dk)) + 1e-6f);
      const f32x16 factor = splat(part == 0 ? length * root : length);
      for (int i = 0; i < padded(dk); i += 16) store(row + i, load(row + i) * factor);
    }
  }

  // decay = exp(decay_rate · softplus(a + dt_bias)) and beta = sigmoid(b), by head and token.
  void fill_gates(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* a = call_.a + t * call_.a_stride;
      const float* b = call_.b + t * call_.b_stride;
      by_sixteen(states_.heads(), [&](std::int64_t head, int n) {
        const f32x16 time = softplus(load_up_to(a + head, n) + load_up_to(call_.dt_bias + head, n));
        float decay[16], beta[16];
        store(decay, exp(load_up_to(call_.decay_rate + head, n) * time));
        store(beta, sigmoid(load_up_to(b + head, n)));
        for (int i = 0; i < n; ++i) {
          decay_[(head + i) * panel_ + t - first_] = decay[i];
          beta_[(head + i) * panel_ + t - first_] = beta[i];
        }
      });
    }
  }

  // All chunks' tokens of the panel through their states; items are slabs of heads of chunks.
  template <class S>
  void recur() {
    const std::int64_t slabs = ceil_div(states_.value_dim, kSlab);
    const std::int64_t items = (last_chunk_ - first_chunk_) * states_.heads() * slabs;
    const std::int64_t state = static_cast<std::int64_t>(states_.heads()) * states_.key_dim * states_.value_dim;
    const std::int64_t work = ((last_ - first_) * 8 + (last_chunk_ - first_chunk_) * 8) * state;
    run_tasks(items, work, [&](std::int64_t item) {
      const std::int64_t chunk = first_chunk_ + item / slabs / states_.heads();
      const int head = static_cast<int>(item / slabs % states_.heads());
      const int column = static_cast<int>(item % slabs) * kSlab;
      if (states_.value_dim - column > 16) {
        recur_slab<2, S>(chunk, head, column);
      } else {
        recur_slab<1, S>(chunk, head, column);
      }
    });
  }

  template <int N, class S>
  void recur_slab(std::int64_t chunk, int head, int column) const {
    const int dk = states_.key_dim, dv = states_.value_dim;
    const int columns = static_cast<int>(smaller(16 * N, dv - column));
    const std::int64_t start = batch_.query_start[chunk];
    const std::int64_t begin = larger(first_, start), end = smaller(last_, batch_.query_start[chunk + 1]);
    if (begin == end) return;
    float* slab = static_cast<float*>(scratch(5, static_cast<std::size_t>(dk) * 16 * N * sizeof(float)));
    const auto state = [&](std::int64_t unit) {
      const int group = head / states_.value_heads, member = head % states_.value_heads;
      std::byte* base = states_.temporal + unit * states_.unit_bytes + group * states_.group_bytes;
      return reinterpret_cast<S*>(base) + static_cast<std::int64_t>(member) * dk * dv + column;
    };
    if (begin == start && batch_.context[chunk] == 0) {
      for (int i = 0; i < dk * 16 * N; i += 16) store(slab + i, zero());
    } else {
      load_slab<N>(state(batch_.slots[chunk]), dk, dv, columns, slab);
    }
    const float* q = row(head / states_.value_heads, begin);
    const std::int64_t gate = head * panel_ + begin - first_;
    const HeadRows rows{q, q + padded(dk), value(head, begin) + column, decay_ + gate, beta_ + gate, row_};
    // Exports of this chunk that lie in the panel, in their order.
    std::int64_t e = 0;
    while (e < batch_.num_exports && (batch_.exports[3 * e] < chunk || (batch_.exports[3 * e] == chunk &&
                                      batch_.exports[3 * e + 1] <= begin - start))) {
      ++e;
    }
    pass_tokens<N, S>(slab, rows, end - begin, dk, [&](std::int64_t passed) {
      for (; e < batch_.num_exports && batch_.exports[3 * e] == chunk &&
             batch_.exports[3 * e + 1] == begin - start + passed;
           ++e) {
        store_slab<N>(slab, dk, dv, columns, state(batch_.exports[3 * e + 2]));
      }
    });
    store_slab<N>(slab, dk, dv, columns, state(batch_.slots[chunk]));
  }

  // Outputs of the panel: normed and gated, or as they are.
  void deliver() const {
    const int heads = states_.heads(), dv = states_.value_dim;
    const std::int64_t grain = ceil_div(16384, static_cast<std::int64_t>(heads) * dv);
    parallel_for(last_ - first_, grain, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = first_ + begin; t < first_ + end; ++t) {
        for (int head = 0; head < heads; ++head) {
          const float* o = value(head, t);
          float* out = call_.out + (t * heads + head) * dv;
          if (call_.z == nullptr) {
            std::memcpy(out, o, static_cast<std::size_t>(dv) * sizeof(float));
          } else {
            const float* z = call_.z + t * call_.z_stride + head * static_cast<std::int64_t>(dv);
            norm_row(o, z, call_.norm, norm_factor(o, dv, call_.eps), out, dv);
          }
        }
      }
    });
  }

  const BatchView& batch_;
  const StatesView& states_;
  const DeltaCall& call_;
  const int row_;             // numbers of a token in a group
  const std::int64_t panel_;  // tokens that the memory below has room for
  float *rows_, *decay_, *beta_;
  std::int64_t first_ = 0, last_ = 0, first_chunk_ = 0, last_chunk_ = 0;
};

}  // namespace

void delta(const BatchView& batch, const StatesView& states, const DeltaCall& call) {
  Delta(batch, states, call).run();
}

void conv(const BatchView& batch, const StatesView& states, const float* x, std::int64_t x_stride,
          const float* weight, float* out) {
  const std::int64_t channels = states.channels();
  for (std::int64_t chunk = 0; chunk < batch.chunks; ++chunk) {
    const std::int64_t start = batch.query_start[chunk];
    const std::int64_t length = batch.query_start[chunk + 1] - start;
    const std::int64_t runs = ceil_div(length, kConvTokens);
    run_tasks(runs * states.groups, length * channels * 16, [&](std::int64_t item) {
      const int group = static_cast<int>(item % states.groups);
      const std::int64_t begin = item / states.groups * kConvTokens;
      const std::int64_t first = group * static_cast<std::int64_t>(states.group_channels());
      convolve(ConvInputs(batch, states, chunk, group, x, x_stride), weight + first * states.width, states.width, 0,
               states.group_channels(), begin, smaller(begin + kConvTokens, length),
               out + (start + begin) * channels + first, channels, false);
    });
  }
  store_all_columns(batch, states, x, x_stride);
}

}  // namespace plait::PLAIT_ISA
