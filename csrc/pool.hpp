// The extension's own threads: loops over ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace plait {

// Threads that work on a loop, the caller among them. At least 1; takes effect with the next loop.
void set_threads(int count);
int threads();

using RangeFunction = void (*)(void* context, std::int64_t begin, std::int64_t end, int thread);

// See the template below.
void parallel_ranges(std::int64_t count, std::int64_t grain, RangeFunction function, void* context);

// Calls body(begin, end, thread) for ranges that cover 0 .. count once. Ranges are cut evenly, each of
// `grain` items at least (so that small loops run on the caller alone), a few for every thread; a thread
// takes the next when it is free, and `thread` says which one it is (0: the caller). The body must not let
// its results depend on where ranges end, nor on who takes them.
//
// If the processor is busy elsewhere, a worker that has not begun is not waited for: others do its share.
//
// Inside a loop, or while another thread runs one, the body is called once, for all items: loops neither nest
// nor wait for each other. The exception of the lowest range is thrown again here, after all have ended.
// Every body runs in the default floating-point mode (round to nearest, denormals kept), whatever the
// caller's was.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t grain, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  parallel_ranges(
      count, grain,
      [](void* context, std::int64_t begin, std::int64_t end, int thread) {
        (*static_cast<Plain*>(context))(begin, end, thread);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// A block of this thread's memory, aligned to 64 bytes, kept from call to call; its contents are whatever was
// left there. A second call with the same number invalidates the first block. Throws std::bad_alloc.
//
// Blocks are numbered so that kernels which call each other do not share: 0 to 3 belong to the linear layers,
// 4 to 7 to the mixers, 8 and 9 to the layers that call both.
void* scratch(int number, std::size_t bytes);

template <class T>
T* scratch_of(int number, std::int64_t count) {
  return static_cast<T*>(scratch(number, static_cast<std::size_t>(count) * sizeof(T)));
}

}  // namespace plait
