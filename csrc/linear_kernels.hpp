// Linear layers and embeddings: their signatures.
#pragma once

namespace plait {

struct LinearKernels {};

}  // namespace plait
