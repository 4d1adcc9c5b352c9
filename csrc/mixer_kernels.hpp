// Attention, recurrence, norms, rotary and mixture-of-experts kernels: their signatures.
#pragma once

namespace plait {

struct MixerKernels {};

}  // namespace plait
