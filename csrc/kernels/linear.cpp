#include "../linear_kernels.hpp"
#include "../simd.hpp"

namespace plait::PLAIT_ISA {

extern const LinearKernels linear_kernels;
constinit const LinearKernels linear_kernels{};

}  // namespace plait::PLAIT_ISA
