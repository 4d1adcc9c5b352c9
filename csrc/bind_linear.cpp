#include "bindings.hpp"
#include "kernels.hpp"

namespace plait {

void bind_linear(nb::module_&) {}

}  // namespace plait
