#include "../sampling_kernels.hpp"

#include "../simd.hpp"
#include "tasks.hpp"

namespace plait::PLAIT_ISA {
namespace {

// -- exp and log, as in plait/worker/exact.py: +, -, * and / alone, each rounded on its own ----------------------

constexpr double kLn2High = 0x1.62e42feep-1;  // times an integer below 2^20 it is exact
constexpr double kLn2Low = 1.9082149292705877e-10;
constexpr double kOneOverLn2 = 1 / 0.693147180559945309417;
constexpr double kExpFloor = -700.0;
constexpr double kMagic = 0x1.8p52;  // added to |a| < 2^51, it rounds to an integer, ties to even

constexpr double kExpTerms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                0.5,             1.0,            1.0};
constexpr double kLogTerms[] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};

[[gnu::always_inline]] inline double exp_of(double x) {
  x = x < kExpFloor ? kExpFloor : x;
  const double shifted = x * kOneOverLn2 + kMagic;
  const double power = shifted - kMagic;
  x = (x - power * kLn2High) - power * kLn2Low;
  double series = kExpTerms[0];
#pragma GCC unroll 12
  for (int i = 1; i < 13; ++i) series = series * x + kExpTerms[i];
  const std::int64_t exponent = __builtin_bit_cast(std::int64_t, shifted) - __builtin_bit_cast(std::int64_t, kMagic);
  return series * __builtin_bit_cast(double, (exponent + 1023) << 52);
}

double log_of(double x) {
  const std::int64_t bits = __builtin_bit_cast(std::int64_t, x);
  double mantissa = __builtin_bit_cast(double, (bits & 0xfffffffffffff) | (std::int64_t{1022} << 52));  // from 1/2 to 1
  std::int64_t exponent = (bits >> 52) - 1022;
  if (mantissa < 0.70710678118654757) {
    mantissa = mantissa * 2;
    --exponent;
  }
  const double power = static_cast<double>(exponent);
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double series = kLogTerms[0];
  for (int i = 1; i < 12; ++i) series = series * square + kLogTerms[i];
  return power * kLn2High + (power * kLn2Low + 2 * s * series);
}

// -- sums of weights ----------------------------------------------------------------------------------------

constexpr std::int64_t kSumBlock = 16384;

// One block of columns, filled up with minus infinities and added up by folding halves.
double sum_block(const float* logits, std::int64_t count, double peak, double temperature) {
  double* x = static_cast<double*>(scratch(4, kSumBlock * sizeof(double)));
  for (std::int64_t i = 0; i < count; ++i) x[i] = exp_of((static_cast<double>(logits[i]) - peak) / temperature);
  for (std::int64_t i = count; i < kSumBlock; ++i) x[i] = exp_of(kExpFloor);
  for (std::int64_t width = kSumBlock / 2; width > 0; width /= 2) {
    for (std::int64_t i = 0; i < width; ++i) x[i] = x[i] + x[width + i];
  }
  return x[0];
}

// -- draws --------------------------------------------------------------------------------------------------

constexpr int kDraws = 512;                 // tokens at once
constexpr std::int64_t kDrawTask = 16384;   // tokens of a task
constexpr std::uint32_t kDomain = 0x544F4B4E;  // as in plait/worker/philox.py

// u = bits[i] · 2^-53 for tokens first .. first + 511: Philox-4x32-10 (Salmon et al., 2011).
void draw_bits(std::uint64_t seed, std::uint64_t position, std::uint32_t first, std::int64_t* bits) {
  std::uint32_t c0[kDraws], c1[kDraws], c2[kDraws], c3[kDraws];
  for (int i = 0; i < kDraws; ++i) {
    c0[i] = first + static_cast<std::uint32_t>(i);
    c1[i] = static_cast<std::uint32_t>(position);
    c2[i] = static_cast<std::uint32_t>(position >> 32);
    c3[i] = kDomain;
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    for (int i = 0; i < kDraws; ++i) {
      const std::uint64_t p0 = static_cast<std::uint64_t>(c0[i]) * 0xD2511F53u;
      const std::uint64_t p1 = static_cast<std::uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<std::uint32_t>(p1);
      c3[i] = static_cast<std::uint32_t>(p0);
    }
  }
  for (int i = 0; i < kDraws; ++i) {
    bits[i] = (static_cast<std::int64_t>(c0[i]) << 21) | (c1[i] >> 11) | 1;
  }
}

struct Best {
  double score = -__builtin_inf();
  std::int64_t token = -1;

  void offer(double other, std::int64_t id) {
    if (other > score || (other == score && id < token)) {
      score = other;
      token = id;
    }
  }
};

// Most tokens are out of the race by a bound on their noise that costs little: -log(-log u) <= -log(1 - u), since
// -log u >= 1 - u, and log(1 - u) is at least ln 2 times the binary exponent of 1 - u. The slack covers roundings.
void race(const DrawCall& call, std::int64_t begin, std::int64_t end, Best& best) {
  constexpr double kSlack = 1e-6;
  std::int64_t bits[kDraws];
  double scaled[kDraws], bound[kDraws];
  for (std::int64_t first = begin; first < end; first += kDraws) {
    const int count = static_cast<int>(smaller(kDraws, end - first));
    double most = -__builtin_inf();
    for (int i = 0; i < count; ++i) {
      scaled[i] = (static_cast<double>(call.logits[first + i]) - call.peak) / call.temperature;
      most = scaled[i] > most ? scaled[i] : most;
    }
    if (!(most >= call.floor)) continue;
    draw_bits(call.seed, call.position, static_cast<std::uint32_t>(first), bits);
    for (int i = 0; i < kDraws; ++i) {
      const double rest = static_cast<double>((std::int64_t{1} << 53) - bits[i]) * 0x1p-53;
      const std::int64_t exponent = (__builtin_bit_cast(std::int64_t, rest) >> 52) - 1023;
      bound[i] = static_cast<double>(exponent) * -0.693147180559945309417 + kSlack;
    }
    for (int i = 0; i < count; ++i) {
      if (!(scaled[i] >= call.floor) || scaled[i] + bound[i] < best.score) continue;
      best.offer(scaled[i] - log_of(-log_of(static_cast<double>(bits[i]) * 0x1p-53)), first + i);
    }
  }
}

// -- the largest -----------------------------------------------------------------------------------------------

constexpr std::int64_t kMaxBlock = 1024;

// The largest of x [count], NaN if any is; -inf for none.
float largest_of(const float* x, std::int64_t count) {
  const f32x16 lowest = splat(-__builtin_inff());
  f32x16 peak[4] = {lowest, lowest, lowest, lowest};
  i32x16 nan = zero_int();
  std::int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const f32x16 v = load(x + i + 16 * j);
      peak[j] = max(peak[j], v);
      nan = nan | is_nan(v);
    }
  }
  float best = reduce_max(max(max(peak[0], peak[1]), max(peak[2], peak[3])));
  bool bad = reduce_add(nan) != 0;
  for (; i < count; ++i) {
    bad = bad || x[i] != x[i];
    best = x[i] > best ? x[i] : best;
  }
  return bad ? __builtin_nanf("") : best;
}

// Block by block, so that only one block is searched for the place.
void largest_of_row(const float* x, std::int64_t count, float& peak, std::int64_t& id) {
  peak = -__builtin_inff();
  id = 0;
  for (std::int64_t first = 0; first < count; first += kMaxBlock) {
    const float found = largest_of(x + first, smaller(kMaxBlock, count - first));
    if (found != found) {
      peak = found;
      id = 0;
      return;
    }
    if (found > peak) {
      peak = found;
      id = first;
    }
  }
  while (x[id] != peak) ++id;
}

}  // namespace

void sum_exp(const float* logits, std::int64_t rows, std::int64_t count, const double* peaks,
             const double* temperatures, double* sums) {
  const std::int64_t blocks = ceil_div(count, kSumBlock);
  double* parts = static_cast<double*>(scratch(5, static_cast<std::size_t>(rows * blocks) * sizeof(double)));
  run_tasks(rows * blocks, rows * count * 32, [&](std::int64_t task) {
    const std::int64_t row = task / blocks, first = task % blocks * kSumBlock;
    parts[task] =
        sum_block(logits + row * count + first, smaller(kSumBlock, count - first), peaks[row], temperatures[row]);
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    sums[row] = 0;
    for (std::int64_t b = 0; b < blocks; ++b) sums[row] = sums[row] + parts[row * blocks + b];
  }
}

std::int64_t draw(const DrawCall& call) {
  const std::int64_t tasks = ceil_div(call.count, kDrawTask);
  Best* found = static_cast<Best*>(scratch(5, static_cast<std::size_t>(tasks) * sizeof(Best)));
  run_tasks(tasks, call.count * 64, [&](std::int64_t task) {
    Best best;
    race(call, task * kDrawTask, smaller((task + 1) * kDrawTask, call.count), best);
    found[task] = best;
  });
  Best best;
  for (std::int64_t task = 0; task < tasks; ++task) {
    if (found[task].token >= 0) best.offer(found[task].score, found[task].token);
  }
  return best.token;
}

void largest(const float* logits, std::int64_t rows, std::int64_t count, float* peaks, std::int64_t* ids) {
  run_tasks(rows, rows * count, [&](std::int64_t row) {
    largest_of_row(logits + row * count, count, peaks[row], ids[row]);
  });
}

extern const SamplingKernels sampling_kernels;
constinit const SamplingKernels sampling_kernels{.sum_exp = sum_exp, .draw = draw, .largest = largest};

}  // namespace plait::PLAIT_ISA
