// Attention over pages, in every format of their entries.
#include "../../csrc/kernels.hpp"
#include "batch.hpp"

namespace plait::cases {
namespace {

struct Heads {
  int heads, kv_heads, dim, rotary_half;
  bool extras;  // head norms and the output gate

  std::int64_t columns() const { return (2 * heads + 2 * kv_heads) * static_cast<std::int64_t>(dim); }
};

// Pages of two layers (plait/kernels/layout.py), of which the second is in use.
class Pages {
 public:
  Pages(const Format& format, int page_size, const Heads& heads, std::int64_t count)
      : page_size_(page_size), heads_(heads), format_(format), memory_(count * page_bytes()) {}

  PagesView view() const {
    std::byte* k = memory_.data() + layer_bytes();
    std::byte* scales = scaled() ? k + 2 * block_bytes() : nullptr;
    return {k,
            k + block_bytes(),
            scales,
            scaled() ? scales + 4 * page_size_ : nullptr,
            page_bytes(),
            2 * layer_bytes(),
            page_size_,
            heads_.kv_heads,
            heads_.dim,
            format_.format};
  }
  // All entries of a page and head, and all scales.
  void record(Record& record, const std::string& name, std::int64_t page, int head) const {
    const std::byte* k = view().k + page * page_bytes() + head * view().head_bytes;
    record.bytes(name + "/entries", k, 2 * block_bytes());
    if (scaled())
      record.floats(name + "/scales", reinterpret_cast<const float*>(k + 2 * block_bytes()), 2 * page_size_);
  }

 private:
  bool scaled() const { return format_.bytes == 1; }
  std::int64_t block_bytes() const {
    return static_cast<std::int64_t>(page_size_) * ((heads_.dim + 15) / 16 * 16) * format_.bytes;
  }
  std::int64_t layer_bytes() const { return 2 * block_bytes() + (scaled() ? 8 * page_size_ : 0); }
  std::int64_t page_bytes() const { return heads_.kv_heads * 2 * layer_bytes(); }

  int page_size_;
  Heads heads_;
  Format format_;
  Bytes memory_;
};

// Requests, as rows of q, k, v and gate side by side, and all that belongs to a layer.
struct Layer {
  Heads heads;
  std::vector<std::vector<float>> rows;
  std::vector<float> q_norm, k_norm, cos, sin;  // angles by position

  Layer(const Heads& heads, const std::vector<Cuts>& requests, std::uint64_t seed) : heads(heads) {
    Draw draw(seed);
    rows = draw_rows(draw, requests, heads.columns());
    q_norm = draw.normals(heads.dim, 0.25f, 1);
    k_norm = draw.normals(heads.dim, 0.25f, 1);
    std::int32_t longest = 0;
    for (const Cuts& cuts : requests) longest = std::max(longest, cuts.back());
    cos = draw.uniforms(longest * heads.rotary_half);
    sin = draw.uniforms(longest * heads.rotary_half);
  }

  void step(const std::vector<Span>& spans, const Batch& batch, const PagesView& pages,
            std::vector<std::vector<float>>& out) const {
    const std::vector<float> x = gather(spans, rows, heads.columns());
    std::vector<float> c, s;
    for (const Span& span : spans) {
      c.insert(c.end(), cos.begin() + span.first * heads.rotary_half,
               cos.begin() + span.last * heads.rotary_half);
      s.insert(s.end(), sin.begin() + span.first * heads.rotary_half,
               sin.begin() + span.last * heads.rotary_half);
    }
    const std::int64_t width = heads.heads * static_cast<std::int64_t>(heads.dim), stride = heads.columns();
    std::vector<float> y(static_cast<std::size_t>(batch.tokens() * width));
    AttentionCall call{};
    call.q = x.data();
    call.k = call.q + width;
    call.v = call.k + heads.kv_heads * heads.dim;
    call.gate = heads.extras ? call.v + heads.kv_heads * heads.dim : nullptr;
    call.q_stride = call.k_stride = call.v_stride = call.gate_stride = stride;
    call.q_norm = heads.extras ? q_norm.data() : nullptr;
    call.k_norm = heads.extras ? k_norm.data() : nullptr;
    call.cos = c.data();
    call.sin = s.data();
    call.out = y.data();
    call.heads = heads.heads;
    call.rotary_half = heads.rotary_half;
    call.scale = 0.25f;
    call.eps = 1e-6f;
    kernels().mixers->attention(batch.view(), pages, call);
    scatter(spans, y, width, out);
  }
};

// Requests through an attention layer; each of them has the same outputs however it is cut.
void run(Record& record, const std::string& name, const Format& format, const Heads& heads,
         const std::vector<Cuts>& requests, int page_size) {
  const Layer layer(heads, requests, static_cast<std::uint64_t>(heads.dim));
  std::vector<std::vector<std::int32_t>> tables;
  std::int32_t count = 0;
  for (const Cuts& cuts : requests) count += (cuts.back() + page_size - 1) / page_size;
  Draw draw(3);
  std::vector<std::int32_t> free = draw.order(count);
  for (const Cuts& cuts : requests) {
    const auto taken = free.end() - (cuts.back() + page_size - 1) / page_size;
    tables.emplace_back(taken, free.end());
    free.erase(taken, free.end());
  }
  const Pages pages(format, page_size, heads, count);
  auto out = empty_rows(requests, heads.heads * static_cast<std::int64_t>(heads.dim));
  for (std::size_t number = 0; number < steps_of(requests); ++number) {
    const std::vector<Span> spans = spans_of(requests, number);
    layer.step(spans, Batch(spans, tables), pages.view(), out);
  }
  for (std::size_t r = 0; r < out.size(); ++r) record.floats(name + "/" + std::to_string(r), out[r]);
  const std::string place = name + "/page-size-" + std::to_string(page_size);
  // Of the request with the most pages, and of that with the fewest, whose page is not full.
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto [least, most] = std::minmax_element(tables.begin(), tables.end(), fewer);
  pages.record(record, place + "/least", least->front(), heads.kv_heads - 1);
  pages.record(record, place + "/most", most->front(), heads.kv_heads - 1);
}

// Keys and values of any bits at all, as they are stored. (Without a scale the outputs mean nothing.)
void store_anything(Record& record, const Format& format) {
  const Heads heads{1, 1, 48, 0, false};
  const std::vector<Cuts> request = {{16}};
  Layer layer(heads, request, 1);
  Draw draw(2);
  for (int part = 0; part < 40; ++part) {
    layer.rows[0] = draw.anything(16 * heads.columns());
    for (int t = 0; t < 12; ++t) {  // all but four tokens finite, else there would be no scales to see
      for (int i = 0; i < heads.columns(); ++i) {
        float& x = layer.rows[0][static_cast<std::size_t>(t * heads.columns() + i)];
        if (!(x - x == 0)) x = draw.normal();
      }
    }
    const Pages pages(format, 16, heads, 1);
    std::vector<std::vector<float>> out = empty_rows(request, heads.dim);
    const std::vector<Span> spans = spans_of(request, 0);
    layer.step(spans, Batch(spans, {{0}}), pages.view(), out);
    pages.record(record, std::string("attention/") + format.name + "/anything/" + std::to_string(part), 0, 0);
    record.floats(std::string("attention/") + format.name + "/anything/" + std::to_string(part) + "/y",
                  out[0]);
  }
}

}  // namespace

void attention_cases(Record& record) {
  for (const Format& format : {kF32, kBf16, kF16, kE4m3, kInt8}) {
    const std::string name = std::string("attention/") + format.name;
    const Heads grouped{6, 2, 24, 5, true};
    const std::vector<Cuts> whole = {{1}, {150}, {16}, {70}, {33}};
    const std::vector<Cuts> ragged = {
        {0, 1, 1}, {7, 8, 63, 64, 64, 149, 150}, {15, 16}, {1, 2, 70}, {32, 33}};
    for (const int page_size : {16, 48, 64}) {
      run(record, name + "/grouped", format, grouped, whole, page_size);
      run(record, name + "/grouped", format, grouped, ragged, page_size);
    }
    // Several partials of 512 keys; two threads compute those of the last tokens apart.
    const Heads small{2, 1, 9, 4, false};
    run(record, name + "/long", format, small, {{1030}}, 32);
    run(record, name + "/long", format, small, {{500, 1020, 1021, 1026, 1030}}, 32);
    run(record, name + "/largest-head", format, {2, 1, 256, 32, true}, {{40}}, 16);
    run(record, name + "/largest-head", format, {2, 1, 256, 32, true}, {one_by_one(40)}, 16);
    run(record, name + "/smallest-head", format, {3, 3, 1, 0, false}, {{20}, {3}}, 16);
    store_anything(record, format);
  }
}

}  // namespace plait::cases
