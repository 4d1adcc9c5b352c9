#include "../ceilings.hpp"

#include "../simd.hpp"

namespace plait::PLAIT_ISA {
namespace {

// Two multiply-adds a cycle with a latency of four or five need eight to ten in flight; twelve registers leave
// enough for the operands on every instruction set.
constexpr int kChains = 12 / kRegs > 1 ? 12 / kRegs : 1;

// Register by register: a copy of all sixteen lanes at once goes through the stack where they need several.
[[gnu::always_inline]] inline f32x16 load_registers(const float* p) {
  return each<f32x16>([=](int i) {
    f32reg part;
    std::memcpy(&part, p + kLanes * i, sizeof part);
    return part;
  });
}

float read(const float* x, std::int64_t count) {
  f32x16 a = zero(), b = zero(), c = zero(), d = zero();  // no more, or they would not all fit into registers
  for (std::int64_t i = 0; i < count; i += 128) {
#pragma GCC unroll 2
    for (int j = 0; j < 128; j += 64) {
      a = a + load_registers(x + i + j);
      b = b + load_registers(x + i + j + 16);
      c = c + load_registers(x + i + j + 32);
      d = d + load_registers(x + i + j + 48);
    }
  }
  return reduce_add((a + b) + (c + d));
}

float multiply_add(std::int64_t rounds) {
  f32x16 chains[kChains];
  for (int j = 0; j < kChains; ++j) chains[j] = splat(static_cast<float>(j));
  const f32x16 factor = splat(0.999f), term = splat(0.001f);  // stays within normal numbers
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) chains[j] = fma(chains[j], factor, term);
  }
  f32x16 total = zero();
  for (const f32x16& chain : chains) total = total + chain;
  return reduce_add(total);
}

}  // namespace

extern const CeilingKernels ceiling_kernels;
constinit const CeilingKernels ceiling_kernels{read, multiply_add, std::int64_t{kChains} * 16 * 2};

}  // namespace plait::PLAIT_ISA
