// The Python module. Kernels take addresses as integers, so that this needs neither torch nor its headers;
// the Python side (plait/kernels/cpu) checks shapes and types, and keeps the memory alive.
#include "bindings.hpp"
#include "isa.hpp"
#include "pool.hpp"

NB_MODULE(_native, m) {
  using namespace plait;
  nanobind::set_leak_warnings(false);
  m.def("set_threads", &set_threads, nb::arg("count"));
  m.def("threads", &threads);
  m.def("isa", [] { return std::string(isa_name()); });
  m.def("isas", [] {
    nb::list names;
    for (const char* name : isa_names()) names.append(nb::str(name));
    return names;
  });
  m.def("use_isa", [](const std::string& name) { use_isa(name); }, nb::arg("name"));
  bind_linear(m);
  bind_mixers(m);
  bind_layers(m);
  bind_sampling(m);
  bind_ceilings(m);
}
