// The table of kernels of one instruction set.
//
// Each file in kernels/ is compiled once per instruction set, into the namespace plait::<its name>, and
// defines one group of function pointers there as a constant. Nothing in those namespaces may run, not even
// the initialiser of a static object, before the processor is known to have the instructions.
#pragma once

#include "ceilings.hpp"
#include "linear_kernels.hpp"
#include "mixer_kernels.hpp"
#include "sampling_kernels.hpp"

namespace plait {

struct Kernels {
  const LinearKernels* linear;
  const MixerKernels* mixers;
  const SamplingKernels* sampling;
  const CeilingKernels* ceilings;
};

// The kernels of the instruction set in use (see isa.hpp).
const Kernels& kernels();

}  // namespace plait
