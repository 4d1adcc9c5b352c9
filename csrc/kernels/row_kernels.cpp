// Kernels that work on each row alone: norms, rotary, SiLU-and-mul, and the two ends of a mixture of experts.
#include "mixers.hpp"
#include "rows.hpp"
#include "tasks.hpp"

namespace plait::PLAIT_ISA {
namespace {

// Rows that make waking a thread worth while, when a number costs `work` operations.
std::int64_t grain(std::int64_t size, int work) { return ceil_div(kWorthAThread / work, size); }

void softmax(const float* logits, int count, float* p) {
  float peak = logits[0];
  for (int e = 1; e < count; ++e) peak = logits[e] > peak ? logits[e] : peak;
  f32x16 lanes = zero();
  by_sixteen(count, [&](std::int64_t e, int n) {
    const f32x16 weight = exp(load_up_to(logits + e, n) - splat(peak));
    store_up_to(p + e, weight, n);
    lanes = lanes + load_up_to(p + e, n);  // without the lanes behind the last
  });
  const f32x16 total = splat(reduce_add(lanes));
  by_sixteen(count, [=](std::int64_t e, int n) { store_up_to(p + e, load_up_to(p + e, n) / total, n); });
}

// The top_k largest of p in falling order, the lowest id of equal ones first; p is spoiled. Returns their sum. Ids
// stay in range even where p is NaN.
float take_largest(float* p, int count, int top_k, float* values, std::int64_t* ids) {
  float sum = 0;
  for (int k = 0; k < top_k; ++k) {
    int best = 0;
    for (int e = 1; e < count; ++e) best = p[e] > p[best] ? e : best;
    values[k] = p[best];
    ids[k] = best;
    sum += p[best];
    p[best] = -1;
  }
  return sum;
}

}  // namespace

void rms_norm(const float* x, std::int64_t x_stride, const float* residual, float* sum, const float* gate,
              std::int64_t gate_stride, const float* weight, float eps, float* out, std::int64_t rows,
              std::int64_t size) {
  parallel_for(rows, grain(size, 8), [=](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* row = x + r * x_stride;
      if (residual != nullptr) {
        float* total = sum + r * size;
        by_sixteen(size, [=](std::int64_t i, int n) {
          store_up_to(total + i, load_up_to(row + i, n) + load_up_to(residual + r * size + i, n), n);
        });
        row = total;
      }
      const float* by = gate == nullptr ? nullptr : gate + r * gate_stride;
      norm_row(row, by, weight, norm_factor(row, size, eps), out + r * size, size);
    }
  });
}

void rotary(const float* x, const float* cos, const float* sin, float* out, std::int64_t tokens, int heads, int dim,
            int half) {
  const std::int64_t size = static_cast<std::int64_t>(heads) * dim;
  parallel_for(tokens, grain(size, 4), [=](std::int64_t begin, std::int64_t end, int) {
    std::memcpy(out + begin * size, x + begin * size, static_cast<std::size_t>((end - begin) * size) * sizeof(float));
    for (std::int64_t t = begin; t < end; ++t) {
      for (int head = 0; head < heads; ++head) {
        rotate_head(out + t * size + head * dim, cos + t * half, sin + t * half, half);
      }
    }
  });
}

void silu_and_mul(const float* x, float* out, std::int64_t rows, std::int64_t size) {
  parallel_for(rows, grain(size, 40), [=](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* gate = x + 2 * r * size;
      by_sixteen(size, [=](std::int64_t i, int n) {
        const f32x16 y = silu(load_up_to(gate + i, n)) * load_up_to(gate + size + i, n);
        store_up_to(out + r * size + i, y, n);
      });
    }
  });
}

void route(const RouteCall& call) {
  const int experts = call.experts, top_k = call.top_k;
  parallel_for(call.rows, grain(experts, 40), [&](std::int64_t begin, std::int64_t end, int) {
    float* p = static_cast<float*>(scratch(4, static_cast<std::size_t>(experts) * sizeof(float)));
    for (std::int64_t r = begin; r < end; ++r) {
      softmax(call.logits + r * experts, experts, p);
      float* weights = call.weights + r * top_k;
      const float total = take_largest(p, experts, top_k, weights, call.places + r * top_k);
      for (int k = 0; call.renormalise && k < top_k; ++k) weights[k] = weights[k] / total;
    }
  });
  // Places hold experts so far: a counting sort turns them into places.
  const std::int64_t visits = call.rows * top_k;
  for (int e = 0; e <= experts; ++e) call.starts[e] = 0;
  for (std::int64_t i = 0; i < visits; ++i) ++call.starts[call.places[i] + 1];
  for (int e = 0; e < experts; ++e) call.starts[e + 1] += call.starts[e];
  std::int64_t* next = static_cast<std::int64_t*>(scratch(4, static_cast<std::size_t>(experts) * sizeof(std::int64_t)));
  for (int e = 0; e < experts; ++e) next[e] = call.starts[e];
  for (std::int64_t i = 0; i < visits; ++i) {
    call.places[i] = next[call.places[i]]++;
    call.sources[call.places[i]] = i / top_k;
  }
}

void combine(const float* y, const std::int64_t* places, const float* weights, const float* shared, const float* gate,
             float* out, std::int64_t rows, int top_k, std::int64_t size) {
  parallel_for(rows, grain(size, 2 * top_k + 2), [=](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float factor = gate == nullptr ? 1.0f : first(sigmoid(splat(gate[r])));
      by_sixteen(size, [=](std::int64_t i, int n) {
        f32x16 sum = zero();
        for (int k = 0; k < top_k; ++k) {
          const std::int64_t at = r * top_k + k;
          sum = fma(splat(weights[at]), load_up_to(y + places[at] * size + i, n), sum);
        }
        if (shared != nullptr) sum = fma(splat(factor), load_up_to(shared + r * size + i, n), sum);
        store_up_to(out + r * size + i, sum, n);
      });
    }
  });
}

}  // namespace plait::PLAIT_ISA
