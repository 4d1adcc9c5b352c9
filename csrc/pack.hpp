// Makes packed panels (see panels.hpp) from rows of weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "panels.hpp"

namespace plait {

// Packs `weights` [outputs][inputs] of type `type` (f32, bf16 or f16) into `panels`, panels_of(outputs) times
// panel_bytes(format, inputs) bytes. Formats of floats convert (f32 to 16 bits rounds to nearest, ties to
// even); the others quantise:
//
//   int8   scale = A / 127, A the largest |w| of an output;  q = nearest(w / scale)
//   q4_1   per block of 32: q = nearest((w - minimum) / scale), cut to 0 .. 15; of the scales and minimums,
//          rounded to f16, that quantise_4 (quantise.hpp) tries, those of least squared error
//
// Throws std::invalid_argument where a quantised weight is not finite (q4_1: or too large for f16), and for
// q8_0 and q4_0.
void pack(WeightFormat format, std::int64_t outputs, std::int64_t inputs, WeightFormat type,
          const void* weights, std::byte* panels);

// Sorts GGUF blocks [outputs][inputs / 32] of format q8_0, q4_0 or q4_1 into panels; nothing is rounded.
void repack(WeightFormat format, std::int64_t outputs, std::int64_t inputs, const std::uint8_t* blocks,
            std::byte* panels);

}  // namespace plait
