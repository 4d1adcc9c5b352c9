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

// Four streams side by side, each fetched ahead: one alone leaves bandwidth unused.
float read(const float* x, std::int64_t count) {
  constexpr int kStreams = 4;
  constexpr std::int64_t kAhead = 256;  // floats
  const std::int64_t each = count / kStreams / 32 * 32;
  f32x16 sums[kStreams] = {zero(), zero(), zero(), zero()};  // no more, or they would not fit into registers
  for (std::int64_t i = 0; i < each; i += 32) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const float* at = x + s * each + i;
      __builtin_prefetch(at + kAhead);
      __builtin_prefetch(at + kAhead + 16);
      sums[s] = sums[s] + load_registers(at);
      sums[s] = sums[s] + load_registers(at + 16);
    }
  }
  for (std::int64_t i = kStreams * each; i < count; i += 16) sums[0] = sums[0] + load_registers(x + i);
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
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
