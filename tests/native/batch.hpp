// Batches for the kernels of mixer_kernels.hpp: requests that are computed in chunks, side by side.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "../../csrc/mixer_kernels.hpp"
#include "record.hpp"

namespace plait::cases {

struct Format {
  CacheFormat format;
  const char* name;
  int bytes;
};
inline constexpr Format kF32{CacheFormat::f32, "f32", 4};
inline constexpr Format kBf16{CacheFormat::bf16, "bf16", 2};
inline constexpr Format kF16{CacheFormat::f16, "f16", 2};
inline constexpr Format kE4m3{CacheFormat::e4m3, "e4m3", 1};
inline constexpr Format kInt8{CacheFormat::int8, "int8", 1};

// Where a request's chunks end, in rising order; the last is its length.
using Cuts = std::vector<std::int32_t>;

// Tokens first .. last - 1 of a request.
struct Span {
  std::int32_t request, first, last;
};

// Step `number`: the chunk of that number of each request that has so many, later requests first.
inline std::vector<Span> spans_of(const std::vector<Cuts>& requests, std::size_t number) {
  std::vector<Span> out;
  for (std::size_t r = requests.size(); r-- > 0;) {
    const Cuts& cuts = requests[r];
    if (number < cuts.size()) {
      out.push_back({static_cast<std::int32_t>(r), number == 0 ? 0 : cuts[number - 1], cuts[number]});
    }
  }
  return out;
}

inline std::size_t steps_of(const std::vector<Cuts>& requests) {
  std::size_t most = 0;
  for (const Cuts& cuts : requests) most = std::max(most, cuts.size());
  return most;
}

// Ends of a request that is cut into single tokens.
inline Cuts one_by_one(std::int32_t length) {
  Cuts out;
  for (std::int32_t t = 1; t <= length; ++t) out.push_back(t);
  return out;
}

// A step's batch; request r has the slot r and the pages tables[r].
class Batch {
 public:
  Batch(const std::vector<Span>& spans, const std::vector<std::vector<std::int32_t>>& tables,
        std::vector<std::int64_t> exports = {})
      : exports_(std::move(exports)) {
    for (const auto& table : tables) width_ = std::max(width_, std::ssize(table));
    for (const Span& span : spans) {
      starts_.push_back(starts_.back() + span.last - span.first);
      contexts_.push_back(span.first);
      slots_.push_back(span.request);
      std::vector<std::int32_t> row =
          tables.empty() ? std::vector<std::int32_t>() : tables[static_cast<std::size_t>(span.request)];
      row.resize(static_cast<std::size_t>(width_));
      table_.insert(table_.end(), row.begin(), row.end());
    }
  }

  std::int64_t tokens() const { return starts_.back(); }
  BatchView view() const {
    return {starts_.data(),  contexts_.data(),   slots_.data(), table_.data(),
            exports_.data(), std::ssize(slots_), width_,        std::ssize(exports_) / 3};
  }

 private:
  std::vector<std::int32_t> starts_{0}, contexts_, slots_, table_;
  std::vector<std::int64_t> exports_;  // chunk, tokens of it, target
  std::int64_t width_ = 0;
};

// Rows of a step out of each request's rows of `size` numbers, and back.
inline std::vector<float> gather(const std::vector<Span>& spans, const std::vector<std::vector<float>>& rows,
                                 std::int64_t size) {
  std::vector<float> out;
  for (const Span& span : spans) {
    const float* from = rows[static_cast<std::size_t>(span.request)].data();
    out.insert(out.end(), from + span.first * size, from + span.last * size);
  }
  return out;
}
inline void scatter(const std::vector<Span>& spans, const std::vector<float>& step, std::int64_t size,
                    std::vector<std::vector<float>>& rows) {
  const float* from = step.data();
  for (const Span& span : spans) {
    const std::int64_t count = (span.last - span.first) * size;
    std::copy_n(from, count, rows[static_cast<std::size_t>(span.request)].data() + span.first * size);
    from += count;
  }
}

inline std::vector<std::vector<float>> draw_rows(Draw& draw, const std::vector<Cuts>& requests,
                                                 std::int64_t size) {
  std::vector<std::vector<float>> out;
  for (const Cuts& cuts : requests) out.push_back(draw.normals(cuts.back() * size));
  return out;
}
inline std::vector<std::vector<float>> empty_rows(const std::vector<Cuts>& requests, std::int64_t size) {
  std::vector<std::vector<float>> out;
  for (const Cuts& cuts : requests) out.emplace_back(static_cast<std::size_t>(cuts.back() * size));
  return out;
}

}  // namespace plait::cases
