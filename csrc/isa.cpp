#include "isa.hpp"

#include <stdexcept>
#include <string>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace plait {

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512vnni {
extern const Kernels table;
}
namespace neon {
extern const Kernels table;
}

namespace {

struct Isa {
  const char* name;
  bool tested;  // one that the tests never ran on is used only when asked for
  bool (*present)();
  const Kernels* kernels;
};

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
// __builtin_cpu_supports also asks whether the system saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

bool always() { return true; }

// From the slowest to the fastest.
const Isa kIsas[] = {
    {"baseline", true, always, &baseline::table},
#if defined(__x86_64__)
    {"avx2", true, has_avx2, &avx2::table},
    {"avx512", true, has_avx512, &avx512::table},
    {"avx512vnni", true, has_avx512vnni, &avx512vnni::table},
#elif defined(__aarch64__)
    {"neon", true, always, &neon::table},
#endif
};

const Isa* best() {
  const Isa* found = &kIsas[0];
  for (const Isa& isa : kIsas) {
    if (isa.tested && isa.present()) found = &isa;
  }
  return found;
}

const Isa*& current() {
  static const Isa* isa = best();
  return isa;
}

}  // namespace

const Kernels& kernels() { return *current()->kernels; }

const char* isa_name() { return current()->name; }

std::vector<const char*> isa_names() {
  std::vector<const char*> names;
  for (const Isa& isa : kIsas) {
    if (isa.present()) names.push_back(isa.name);
  }
  return names;
}

void use_isa(std::string_view name) {
  std::string known;
  for (const Isa& isa : kIsas) {
    if (!isa.present()) continue;
    if (isa.name == name) {
      current() = &isa;
      return;
    }
    known += known.empty() ? isa.name : std::string(", ") + isa.name;
  }
  throw std::invalid_argument("instruction set '" + std::string(name) +
                              "' is unknown, or this processor lacks it; " + "it has: " + known);
}

}  // namespace plait
