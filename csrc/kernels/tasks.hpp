// Loops whose items differ in cost: threads take the next item when they are free.
#pragma once

#include <cstdint>

#include "../pool.hpp"

namespace plait::PLAIT_ISA {

// Work, in floating-point operations, below which waking a second thread does not pay.
inline constexpr std::int64_t kWorthAThread = 200'000;

// Calls body(task) for 0 .. count - 1, in rising order on each thread. `work` is that of all tasks.
template <class Body>
void run_tasks(std::int64_t count, std::int64_t work, Body&& body) {
  std::int64_t parts = work / kWorthAThread;
  if (parts > count) parts = count;
  if (parts > threads()) parts = threads();
  if (parts < 1) parts = 1;
  std::int64_t next = 0;
  parallel_for(parts, 1, [&](std::int64_t, std::int64_t, int) {
    for (std::int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) body(task);
  });
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace plait::PLAIT_ISA
