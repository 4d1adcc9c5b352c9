#include "pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace plait {
namespace {

// About 30 µs. Long enough to bridge the gaps between the kernels of a step, short enough to leave the
// processor to others between steps.
constexpr int kSpins = 1500;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Waits until `value` differs from `old`: spins, then sleeps.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// The default floating-point mode, for as long as this lives.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, xzr");
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  std::uint64_t before_;
#endif
};

struct Loop {
  RangeFunction function;
  void* context;
  std::int64_t count;
  int parts;
};

struct alignas(64) Worker {
  std::atomic<std::uint32_t> calls{0};  // raised for each loop this worker is called to
};

thread_local bool inside_loop = false;

void run_part(const Loop& loop, int part, int thread) {
  const FloatMode mode;
  inside_loop = true;
  struct Leave {
    ~Leave() { inside_loop = false; }
  } leave;
  // Products of 128 bits: count may be any.
  const auto edge = [&](int index) {
    return static_cast<std::int64_t>(static_cast<__int128>(loop.count) * index / loop.parts);
  };
  loop.function(loop.context, edge(part), edge(part + 1), thread);
}

// One loop runs at a time: `owner` is held by its caller. Parts are claimed by raising `open_`, which holds
// the number of parts above the next one to claim. Whoever has claimed a part may read `loop_`: it does not
// change before all parts are done. A worker that comes late finds nothing to claim, and nobody waits for it.
//
// Workers are made when first needed, never end, and sleep when idle.
class Pool {
 public:
  std::mutex owner;

  void run(const Loop& loop, int helpers) {
    while (static_cast<int>(workers_.size()) < helpers) start_worker();
    loop_ = loop;
    error_ = nullptr;
    done_.store(0, std::memory_order_relaxed);
    open_.store(static_cast<std::uint64_t>(loop.parts) << 32, std::memory_order_release);
    for (int i = 0; i < helpers; ++i) {
      workers_[i]->calls.fetch_add(1, std::memory_order_release);
      workers_[i]->calls.notify_one();
    }
    work(0);
    for (int done; (done = done_.load(std::memory_order_acquire)) != loop.parts;) wait_while(done_, done);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void start_worker() {
    const int thread = static_cast<int>(workers_.size()) + 1;
    Worker* worker = workers_.emplace_back(std::make_unique<Worker>()).get();
    try {
      std::thread([this, worker, thread] {
        for (std::uint32_t seen = 0;; seen = worker->calls.load(std::memory_order_acquire)) {
          wait_while(worker->calls, seen);
          work(thread);
        }
      }).detach();
    } catch (...) {
      workers_.pop_back();
      throw;
    }
  }

  // Claims parts and runs them until there are none.
  void work(int thread) {
    std::uint64_t open = open_.load(std::memory_order_acquire);
    while ((open & 0xffffffff) < open >> 32) {
      if (!open_.compare_exchange_weak(open, open + 1, std::memory_order_acq_rel)) continue;
      const int part = static_cast<int>(open & 0xffffffff), parts = loop_.parts;
      try {
        run_part(loop_, part, thread);
      } catch (...) {
        const std::lock_guard lock(error_owner_);
        if (!error_ || part < error_part_) {
          error_ = std::current_exception();
          error_part_ = part;
        }
      }
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) done_.notify_one();
      open = open_.load(std::memory_order_acquire);
    }
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  Loop loop_{};
  std::atomic<std::uint64_t> open_{0};
  std::atomic<int> done_{0};
  std::mutex error_owner_;
  std::exception_ptr error_;
  int error_part_ = 0;
};

std::atomic<int> thread_count{1};

// Never destroyed: detached workers may outlive static objects.
Pool* current_pool = nullptr;

Pool& pool() {
  static const bool once = [] {
    current_pool = new Pool;
    // A forked child has none of the workers. It starts anew and leaves the old pool where it is.
    pthread_atfork(nullptr, nullptr, [] {
      current_pool = new Pool;
      inside_loop = false;
    });
    return true;
  }();
  static_cast<void>(once);
  return *current_pool;
}

}  // namespace

void set_threads(int count) {
  if (count < 1) throw std::invalid_argument("threads: " + std::to_string(count) + " must be from 1 up");
  thread_count.store(count, std::memory_order_relaxed);
}

int threads() { return thread_count.load(std::memory_order_relaxed); }

void parallel_ranges(std::int64_t count, std::int64_t grain, RangeFunction function, void* context) {
  if (count <= 0) return;
  if (inside_loop) return function(context, 0, count, 0);
  constexpr int kPartsEach = 4;
  const std::int64_t most = std::max<std::int64_t>(1, count / std::max<std::int64_t>(1, grain));
  const int team = static_cast<int>(std::min<std::int64_t>(threads(), most));
  if (team > 1) {
    const int each = static_cast<int>(std::min<std::int64_t>(most / team, kPartsEach));
    Pool& shared = pool();
    const std::unique_lock lock(shared.owner, std::try_to_lock);
    if (lock.owns_lock()) return shared.run({function, context, count, team * each}, team - 1);
  }
  run_part({function, context, count, 1}, 0, 0);
}

void* scratch(int number, std::size_t bytes) {
  constexpr int kBlocks = 10;
  constexpr std::size_t kAlignment = 64;
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
    ~Block() { std::free(data); }
  };
  thread_local Block blocks[kBlocks];
  Block& block = blocks[number];
  if (block.bytes < bytes) {
    std::free(block.data);
    block = Block{};
    const std::size_t size = (bytes + bytes / 2 + kAlignment - 1) / kAlignment * kAlignment;
    block.data = std::aligned_alloc(kAlignment, size);
    if (block.data == nullptr) throw std::bad_alloc();
    block.bytes = size;
  }
  return block.data;
}

}  // namespace plait
