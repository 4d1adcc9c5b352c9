#include "bindings.hpp"
#include "kernels.hpp"

namespace plait {

void bind_mixers(nb::module_&) {}

}  // namespace plait
