#include "quantise.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "narrow.hpp"

namespace plait {
namespace {

constexpr int kLanes = 16;   // of sums: one order on every processor, and vectors for the compiler
constexpr int kRefined = 2;  // times that scale and minimum are fitted to the codes, from each start

// Of the range of a group, how much the codes of a start span: less, and its ends are cut off.
constexpr float kSpans[] = {1.0f, 0.9f, 0.8f, 0.7f};

float sum_of(const float (&values)[kGroup4]) {
  float lanes[kLanes] = {};
  for (int from = 0; from < kGroup4; from += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[from + lane];
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// To the nearest integer, ties to even, of numbers below 2^22.
float nearest(float a) { return (a + 0x1.8p23f) - 0x1.8p23f; }

// Weights, and what an error of each counts: 0 behind the last. That of a large weight counts more,
// 1 + |w| / rms: training made it large, and models lose a little less than with equal ones.
struct Group {
  float weights[kGroup4] = {}, counts[kGroup4] = {};

  Group(const float* from, std::int64_t count) {
    float squares = 0;
    for (std::int64_t i = 0; i < count; ++i) squares += from[i] * from[i];
    const float rms = std::sqrt(squares / static_cast<float>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      weights[i] = from[i];
      counts[i] = rms > 0 ? 1.0f + std::abs(from[i]) / rms : 1.0f;
    }
  }
};

// A scale and a minimum as they are stored, the codes nearest to the weights, and what their errors count.
struct Choice {
  std::uint16_t scale, minimum;
  float codes[kGroup4];
  float error;
};

Choice choose(const Group& group, float scale, float minimum) {
  Choice out{narrow_f16(scale), narrow_f16(minimum), {}, 0};
  float codes[kGroup4], errors[kGroup4];  // own arrays, which nothing else points to, become vectors
  const float step = widen_f16(out.scale), least = widen_f16(out.minimum);
  const float inverse = step > 0 ? 1.0f / step : 0.0f;  // a group of equals, nearly: all codes are 0
  for (int i = 0; i < kGroup4; ++i) {
    const float code = (group.weights[i] - least) * inverse, upper = code < 15.0f ? code : 15.0f;
    codes[i] = nearest(upper > 0.0f ? upper : 0.0f);
    const float error = codes[i] * step + least - group.weights[i];
    errors[i] = group.counts[i] * (error * error);
  }
  std::copy_n(codes, kGroup4, out.codes);
  out.error = sum_of(errors);
  return out;
}

// The scale and minimum of least error for given codes (weighted least squares); as they were where all codes
// are the same.
void fit(const Group& group, const Choice& choice, float& scale, float& minimum) {
  float n[kGroup4], q[kGroup4], qq[kGroup4], w[kGroup4], qw[kGroup4];
  for (int i = 0; i < kGroup4; ++i) {
    n[i] = group.counts[i];
    q[i] = n[i] * choice.codes[i];
    qq[i] = q[i] * choice.codes[i];
    w[i] = n[i] * group.weights[i];
    qw[i] = q[i] * group.weights[i];
  }
  const float count = sum_of(n), codes = sum_of(q), weights = sum_of(w);
  const float spread = count * sum_of(qq) - codes * codes;
  if (spread <= 0) return;
  scale = (count * sum_of(qw) - codes * weights) / spread;
  minimum = (weights - scale * codes) / count;
}

}  // namespace

Group4 quantise_4(const float* weights, std::int64_t count) {
  const Group group(weights, count);
  const auto [least, most] = std::minmax_element(weights, weights + count);
  const float range = *most / 15.0f - *least / 15.0f, middle = *least / 2.0f + *most / 2.0f;  // finite
  if (std::max(-*least, *most) > 65000.0f)
    throw std::invalid_argument("a weight is beyond 65,000: too large for 4 bits with a scale in float16");
  Choice best = choose(group, range, *least);
  for (const float span : kSpans) {
    float scale = range * span, minimum = middle - 7.5f * scale;
    for (int round = 0; round <= kRefined; ++round) {
      const Choice choice = choose(group, scale, minimum);
      if (choice.error < best.error) best = choice;
      fit(group, choice, scale, minimum);
    }
  }
  Group4 out{best.scale, best.minimum, {}};
  for (std::int64_t i = 0; i < count; ++i) out.codes[i] = static_cast<std::uint8_t>(best.codes[i]);
  return out;
}

}  // namespace plait
