#include "../mixer_kernels.hpp"
#include "../simd.hpp"

namespace plait::PLAIT_ISA {

extern const MixerKernels mixer_kernels;
constinit const MixerKernels mixer_kernels{};

}  // namespace plait::PLAIT_ISA
