// How a weight matrix [N outputs, K inputs] lies in memory: panels of 16 outputs, one after another.
//
// The outputs of a panel stand side by side: one vector holds the weights of 16 outputs for one input.
//
//   f32, bf16, f16   [K][16]
//   int8             [K/2][16][2] int8 | float scale[16]
//   q8_0             [K/2][16][2] int8 | f16 scale[K/32][16]
//   q4_0             [K/8][16][4] two nibbles a byte | f16 scale[K/32][16]
//   q4_1             [K/32] blocks of [4][16][4] two nibbles a byte | f16 scale[16] | f16 minimum[16]
//
// A byte of nibbles holds input j of its eight in the low half and input j + 4 in the high half (j from 0 to
// 3). K is rounded up to whole pairs or blocks, N to whole panels; what is added is zero, or meets inputs
// that are (activations.hpp). Parts of a panel, and panels, start at multiples of 64 bytes.
//
// What a stored weight stands for:
//
//   int8             q * scale                    one scale an output
//   q8_0             q * scale                    GGUF's Q8_0, blocks of 32, nothing lost
//   q4_0             (q - 8) * scale              GGUF's Q4_0, likewise
//   q4_1             q * scale + minimum          GGUF's Q4_1, likewise, and what pack rounds to 4 bits
#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

enum class WeightFormat : int { f32, bf16, f16, int8, q8_0, q4_0, q4_1 };
inline constexpr int kFormats = 7;

// Inputs that share a scale; 0 where none do, or where all do (int8).
constexpr int block_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::q8_0:
    case WeightFormat::q4_0:
    case WeightFormat::q4_1: return 32;
    default: return 0;
  }
}

constexpr bool has_nibbles(WeightFormat format) {
  return format == WeightFormat::q4_0 || format == WeightFormat::q4_1;
}

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// K as stored.
constexpr std::int64_t stored_inputs(WeightFormat format, std::int64_t inputs) {
  if (const int block = block_of(format)) return round_up(inputs, block);
  return format == WeightFormat::int8 ? round_up(inputs, 2) : inputs;
}

// Bytes of a panel's weights, from its start; scales follow. Not for q4_1.
constexpr std::int64_t weights_bytes(WeightFormat format, std::int64_t inputs) {
  const std::int64_t count = 16 * stored_inputs(format, inputs);
  std::int64_t bytes = count;
  if (format == WeightFormat::f32) bytes = 4 * count;
  if (format == WeightFormat::bf16 || format == WeightFormat::f16) bytes = 2 * count;
  if (has_nibbles(format)) bytes = count / 2;
  return round_up(bytes, 64);
}

// Bytes of the scales behind a panel's weights. Not for q4_1.
constexpr std::int64_t scales_bytes(WeightFormat format, std::int64_t inputs) {
  if (format == WeightFormat::int8) return 16 * static_cast<std::int64_t>(sizeof(float));
  const int block = block_of(format);
  return block ? round_up(stored_inputs(format, inputs) / block * 16 * 2, 64) : 0;
}

// Bytes of a block of q4_1: five lines of the cache, so that a panel is one stream.
inline constexpr std::int64_t kBlockBytes = 4 * 64 + 2 * 32;

constexpr std::int64_t panel_bytes(WeightFormat format, std::int64_t inputs) {
  if (format == WeightFormat::q4_1) return stored_inputs(format, inputs) / 32 * kBlockBytes;
  return weights_bytes(format, inputs) + scales_bytes(format, inputs);
}

// Where in a panel of nibbles inputs 8 * `eight` to 8 * `eight` + 7 lie.
constexpr std::int64_t eight_at(WeightFormat format, std::int64_t eight) {
  return format == WeightFormat::q4_1 ? eight / 4 * kBlockBytes + eight % 4 * 64 : eight * 64;
}

// Where in a panel the scales of a block lie; the minimums of q4_1 are 32 bytes behind them.
constexpr std::int64_t scales_at(WeightFormat format, std::int64_t inputs, std::int64_t block) {
  if (format == WeightFormat::q4_1) return block * kBlockBytes + 256;
  return weights_bytes(format, inputs) + 32 * block;
}

constexpr std::int64_t panels_of(std::int64_t outputs) { return (outputs + 15) / 16; }

// A packed matrix and the bias of its layer (float32 [outputs], or null). `panels` is aligned to 64 bytes.
struct Matrix {
  WeightFormat format;
  std::int64_t outputs, inputs;
  const std::byte* panels;
  const float* bias;
};

}  // namespace plait
