// The instruction sets this build knows, and which one is in use.
#pragma once

#include <string_view>
#include <vector>

namespace plait {

// The instruction set in use: at first the best tested one that this processor has.
const char* isa_name();

// Uses another one; all give the same bits. Throws std::invalid_argument if it is unknown or the processor
// lacks it. Not to be called while a kernel runs.
void use_isa(std::string_view name);

// Those that this processor has, from the slowest to the fastest.
std::vector<const char*> isa_names();

}  // namespace plait
