// Sums of weights, and draws.
#include <algorithm>

#include "../../csrc/kernels.hpp"
#include "record.hpp"

namespace plait::cases {
namespace {

constexpr std::int64_t kRows = 4;

// Rows of logits: a bell, one whose half is left out, ties, and one with a wide spread.
std::vector<float> draw_logits(Draw& draw, std::int64_t vocab, float spread) {
  std::vector<float> logits = draw.normals(kRows * vocab, spread);
  std::fill_n(logits.begin() + vocab, vocab / 2, -__builtin_inff());
  std::fill_n(logits.begin() + 2 * vocab, vocab, 1.25f);
  for (std::int64_t i = 0; i < vocab; ++i)
    logits[static_cast<std::size_t>(3 * vocab + i)] -= static_cast<float>(i % 900);
  return logits;
}

void run(Record& record, std::int64_t vocab, float spread) {
  Draw draw(static_cast<std::uint64_t>(vocab));
  const std::vector<float> logits = draw_logits(draw, vocab, spread);
  std::vector<double> peaks;
  for (std::int64_t r = 0; r < kRows; ++r) {
    peaks.push_back(*std::max_element(logits.begin() + r * vocab, logits.begin() + (r + 1) * vocab));
  }
  const std::vector<double> temperatures = {1.0, 0.7, 1e-3, 3.3};
  std::vector<double> sums(kRows);
  const SamplingKernels& sampling = *kernels().sampling;
  sampling.sum_exp(logits.data(), kRows, vocab, peaks.data(), temperatures.data(), sums.data());
  const std::string name =
      "sampling/" + std::to_string(vocab) + "/" + std::to_string(static_cast<int>(spread));
  record.doubles(name + "/sums", sums);

  std::vector<std::int64_t> tokens;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::uint64_t i = 0; i < 12; ++i) {
      const double floor = i % 3 == 0 ? -3.0 : -__builtin_inf();
      const std::uint64_t seed = draw.next(), position = i < 6 ? i : draw.next();
      tokens.push_back(sampling.draw({logits.data() + r * vocab, vocab, peaks[static_cast<std::size_t>(r)],
                                      0.9, floor, seed, position}));
    }
  }
  record.integers(name + "/draws", tokens);
}

}  // namespace

void sampling_cases(Record& record) {
  for (const std::int64_t vocab : {1, 7, 997, 16384, 16385, 50'001}) {
    run(record, vocab, 0);
    run(record, vocab, 3);
    run(record, vocab, 40);
  }
}

}  // namespace plait::cases
