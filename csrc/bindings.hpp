// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <vector>

#include "mixer_kernels.hpp"

namespace plait {

namespace nb = nanobind;

// For functions that run kernels: other Python threads go on meanwhile.
using no_gil = nb::call_guard<nb::gil_scoped_release>;

// An address from Python (`tensor.data_ptr()`); 0 is null.
template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A batch's view with its exports; the other arrays belong to the caller.
struct OwnedBatch {
  BatchView view;
  std::vector<std::int64_t> exports;
};

void bind_linear(nb::module_& m);
void bind_mixers(nb::module_& m);
void bind_layers(nb::module_& m);  // after linear layers and mixers
void bind_sampling(nb::module_& m);
void bind_ceilings(nb::module_& m);

}  // namespace plait
