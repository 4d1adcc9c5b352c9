#include "mixers.hpp"

namespace plait::PLAIT_ISA {

extern const MixerKernels mixer_kernels;
constinit const MixerKernels mixer_kernels{
    .attention = attention,
    .delta = delta,
    .conv = conv,
    .rms_norm = rms_norm,
    .rotary = rotary,
    .silu_and_mul = silu_and_mul,
    .route = route,
    .combine = combine,
};

}  // namespace plait::PLAIT_ISA
