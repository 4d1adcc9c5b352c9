// Runs every kernel on fixed inputs and records the outputs, without Python: for comparisons between
// processors (under an emulator, say), and for sanitizers. tests/test_instruction_sets.py has the
// comparisons.
//
//     kernel_cases                            the instruction sets of this processor; the first is the one in
//     use kernel_cases <set> <threads> <file>     records (see record.hpp); prints how many entries, and
//     their hash
#include <cstdio>
#include <exception>
#include <string>

#include "../../csrc/isa.hpp"
#include "../../csrc/pool.hpp"
#include "record.hpp"

namespace {

void list() {
  std::printf("%s\n", plait::isa_name());
  for (const char* name : plait::isa_names()) {
    if (std::string(name) != plait::isa_name()) std::printf("%s\n", name);
  }
}

void run(const char* isa, int threads, const char* path) {
  plait::use_isa(isa);
  plait::set_threads(threads);
  plait::cases::Record record(path);
  plait::cases::linear_cases(record);
  plait::cases::attention_cases(record);
  plait::cases::recurrence_cases(record);
  plait::cases::row_cases(record);
  plait::cases::sampling_cases(record);
  record.close();
  std::printf("%lld %016llx\n", static_cast<long long>(record.cases()),
              static_cast<unsigned long long>(record.hash()));
}

}  // namespace

int main(int count, char** words) try {
  if (count == 1) {
    list();
  } else if (count == 4) {
    run(words[1], std::stoi(words[2]), words[3]);
  } else {
    std::fprintf(stderr, "usage: %s [<instruction set> <threads> <file>]\n", words[0]);
    return 2;
  }
  return 0;
} catch (const std::exception& fault) {
  std::fprintf(stderr, "%s\n", fault.what());
  return 1;
}
