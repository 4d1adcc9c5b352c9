#include <atomic>

#include "bindings.hpp"
#include "ceilings.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace plait {
namespace {

std::atomic<float> sink;  // keeps results from being optimised away

// Every thread reads its part of x [count], a multiple of 128.
void read_memory(std::uintptr_t x, std::int64_t count) {
  const CeilingKernels& ceilings = *kernels().ceilings;
  parallel_for(count / 128, 1, [&](std::int64_t begin, std::int64_t end, int) {
    sink.store(ceilings.read(at<const float>(x) + 128 * begin, 128 * (end - begin)), std::memory_order_relaxed);
  });
}

// Every thread does `rounds` rounds; returns the floating-point operations of all of them.
std::int64_t multiply_add(std::int64_t rounds) {
  const CeilingKernels& ceilings = *kernels().ceilings;
  const std::int64_t workers = threads();
  parallel_for(workers, 1, [&](std::int64_t begin, std::int64_t end, int) {
    sink.store(ceilings.multiply_add(rounds * (end - begin)), std::memory_order_relaxed);
  });
  return workers * rounds * ceilings.operations_per_round;
}

}  // namespace

void bind_ceilings(nb::module_& m) {
  m.def("read_memory", &read_memory, nb::arg("x"), nb::arg("count"), no_gil());
  m.def("multiply_add", &multiply_add, nb::arg("rounds"), no_gil());
}

}  // namespace plait
