#include "../kernels.hpp"

namespace plait::PLAIT_ISA {

extern const LinearKernels linear_kernels;
extern const MixerKernels mixer_kernels;
extern const SamplingKernels sampling_kernels;
extern const CeilingKernels ceiling_kernels;

// Nothing but addresses, so that it is safe to look at on any processor.
extern const Kernels table;
constinit const Kernels table{&linear_kernels, &mixer_kernels, &sampling_kernels, &ceiling_kernels};

}  // namespace plait::PLAIT_ISA
