// What the processor can do at best, measured: the ceilings that kernels are held against (plait bench kernels).
#pragma once

#include <cstdint>

namespace plait {

struct CeilingKernels {
  // Reads `count` numbers (a multiple of 128) once, with little arithmetic, and returns their sum.
  float (*read)(const float* x, std::int64_t count);
  // `rounds` rounds of independent fused multiply-adds in registers; returns something made of all of them.
  float (*multiply_add)(std::int64_t rounds);
  // Floating-point operations of one round.
  std::int64_t operations_per_round;
};

}  // namespace plait
