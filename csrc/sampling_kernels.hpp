// Passes over whole rows of logits for the sampler: their signatures. Arithmetic is float64, in the order that
// plait/worker/exact.py gives, so the results are those of the torch operations there, bit for bit.
#pragma once

#include <cstdint>

namespace plait {

struct DrawCall {
  const float* logits;  // [count]
  std::int64_t count;
  double peak, temperature;
  double floor;  // tokens with (logit - peak) / temperature below it are left out
  std::uint64_t seed, position;
};

struct SamplingKernels {
  // sums[r] = Σ exp((logits[r] - peaks[r]) / temperatures[r]); logits [rows][count].
  void (*sum_exp)(const float* logits, std::int64_t rows, std::int64_t count, const double* peaks,
                  const double* temperatures, double* sums);
  // The token of the largest (logit - peak) / temperature - log(-log u), the lowest of equal ones; u by Philox from
  // (seed, position, token). -1 if none is left.
  std::int64_t (*draw)(const DrawCall& call);
  // The largest logit of each row, and the first id that has it; NaN and id 0 for a row with NaN.
  void (*largest)(const float* logits, std::int64_t rows, std::int64_t count, float* peaks, std::int64_t* ids);
};

}  // namespace plait
