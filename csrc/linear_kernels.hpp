// Linear layers and embeddings: their signatures.
#pragma once

#include <cstdint>

#include "panels.hpp"

namespace plait {

// y[i] = W x[i] + bias for each of `rows` rows; x [rows][inputs] and y float32, rows of y `y_stride` apart.
struct LinearCall {
  Matrix weight;
  const float* x;
  std::int64_t rows;
  float* y;
  std::int64_t y_stride;
};

// The same for E experts of equal shape and format, whose panels follow each other. Row i of y is that of
// expert e for starts[e] <= i < starts[e + 1], starts[0] being 0, and of the row sources[i] of x (of i where
// sources is null).
struct ExpertsCall {
  Matrix first;  // expert 0; without bias
  std::int64_t experts;
  const std::int64_t* starts;
  const std::int64_t* sources;
  const float* x;
  float* y;
};

struct LinearKernels {
  void (*linear)(const LinearCall& call);
  void (*experts)(const ExpertsCall& call);
  // y[i] = row ids[i] of the table, as float32 [inputs].
  void (*embedding)(const Matrix& table, const std::int64_t* ids, std::int64_t count, float* y);
};

}  // namespace plait
