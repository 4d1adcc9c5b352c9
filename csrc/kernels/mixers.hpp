// The kernels of mixer_kernels.hpp, as functions of one instruction set.
#pragma once

#include "../mixer_kernels.hpp"

namespace plait::PLAIT_ISA {

void attention(const BatchView& batch, const PagesView& pages, const AttentionCall& call);
void delta(const BatchView& batch, const StatesView& states, const DeltaCall& call);
void conv(const BatchView& batch, const StatesView& states, const float* x, std::int64_t x_stride,
          const float* weight, float* out);
void rms_norm(const float* x, std::int64_t x_stride, const float* residual, float* sum, const float* gate,
              std::int64_t gate_stride, const float* weight, float eps, float* out, std::int64_t rows,
              std::int64_t size);
void rotary(const float* x, const float* cos, const float* sin, float* out, std::int64_t tokens, int heads, int dim,
            int half);
void silu_and_mul(const float* x, float* out, std::int64_t rows, std::int64_t size);
void route(const RouteCall& call);
void combine(const float* y, const std::int64_t* places, const float* weights, const float* shared, const float* gate,
             float* out, std::int64_t rows, int top_k, std::int64_t size);

}  // namespace plait::PLAIT_ISA
