#include "pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "narrow.hpp"
#include "pool.hpp"
#include "quantise.hpp"

namespace plait {
namespace {

// One row as float32.
void read_row(WeightFormat type, const void* weights, std::int64_t row, std::int64_t inputs, float* out) {
  if (type == WeightFormat::f32) {
    std::memcpy(out, static_cast<const float*>(weights) + row * inputs, inputs * sizeof(float));
    return;
  }
  const auto* from = static_cast<const std::uint16_t*>(weights) + row * inputs;
  if (type == WeightFormat::bf16) {
    for (std::int64_t k = 0; k < inputs; ++k) out[k] = widen_bf16(from[k]);
  } else {
    for (std::int64_t k = 0; k < inputs; ++k) out[k] = widen_f16(from[k]);
  }
}

void check_finite(float largest) {
  if (!std::isfinite(largest))
    throw std::invalid_argument("a weight is infinite or not a number: it has no int format");
}

// The value of largest magnitude; NaN if there is one.
float extreme(const float* values, std::int64_t count) {
  float most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) return values[i];
    if (std::abs(values[i]) > std::abs(most)) most = values[i];
  }
  return most;
}

// Places of weight k of an output, counted from the panel's start.
std::int64_t pair_place(std::int64_t k, int lane) { return k / 2 * 32 + lane * 2 + k % 2; }

void put_nibble(WeightFormat format, std::byte* panel, std::int64_t k, int lane, int q) {
  panel[eight_at(format, k / 8) + lane * 4 + k % 4] |= static_cast<std::byte>(k % 8 < 4 ? q : q << 4);
}

void put_16(std::byte* at, std::int64_t index, std::uint16_t value) {
  std::memcpy(at + 2 * index, &value, 2);
}

void pack_float(WeightFormat format, const float* row, std::int64_t inputs, int lane, std::byte* panel) {
  for (std::int64_t k = 0; k < inputs; ++k) {
    const std::int64_t index = 16 * k + lane;
    if (format == WeightFormat::f32) std::memcpy(panel + 4 * index, &row[k], 4);
    if (format == WeightFormat::bf16) put_16(panel, index, narrow_bf16(row[k]));
    if (format == WeightFormat::f16) put_16(panel, index, narrow_f16(row[k]));
  }
}

void pack_int8(const float* row, std::int64_t inputs, int lane, std::byte* panel) {
  const float largest = std::abs(extreme(row, inputs));
  check_finite(largest);
  const float scale = largest / 127.0f;
  std::memcpy(panel + weights_bytes(WeightFormat::int8, inputs) + 4 * lane, &scale, 4);
  if (scale == 0) return;
  for (std::int64_t k = 0; k < inputs; ++k) {
    const float q = std::clamp(std::nearbyint(row[k] / scale), -127.0f, 127.0f);
    panel[pair_place(k, lane)] = static_cast<std::byte>(static_cast<std::int8_t>(q));
  }
}

void pack_4(const float* row, std::int64_t inputs, int lane, std::byte* panel) {
  constexpr WeightFormat kFormat = WeightFormat::q4_1;
  for (std::int64_t from = 0; from < inputs; from += kGroup4) {
    const std::int64_t count = std::min<std::int64_t>(inputs - from, kGroup4);
    check_finite(extreme(row + from, count));
    const Group4 group = quantise_4(row + from, count);
    std::byte* scales = panel + scales_at(kFormat, inputs, from / kGroup4);
    put_16(scales, lane, group.scale);
    put_16(scales, 16 + lane, group.minimum);
    for (std::int64_t i = 0; i < count; ++i) put_nibble(kFormat, panel, from + i, lane, group.codes[i]);
  }
}

void repack_row(WeightFormat format, const std::uint8_t* blocks, std::int64_t inputs, int lane,
                std::byte* panel) {
  for (std::int64_t b = 0; b < inputs / 32; ++b) {
    // GGUF: f16 scale, Q4_1: f16 minimum, then 32 bytes, or 16 that hold input i low and i + 16 high.
    std::byte* scales = panel + scales_at(format, inputs, b);
    std::memcpy(scales + 2 * lane, blocks, 2);
    blocks += 2;
    if (format == WeightFormat::q4_1) {
      std::memcpy(scales + 32 + 2 * lane, blocks, 2);
      blocks += 2;
    }
    for (int i = 0; i < 32; ++i) {
      const std::int64_t k = 32 * b + i;
      if (format == WeightFormat::q8_0) {
        panel[pair_place(k, lane)] = static_cast<std::byte>(blocks[i]);
      } else {
        put_nibble(format, panel, k, lane, i < 16 ? blocks[i] & 15 : blocks[i - 16] >> 4);
      }
    }
    blocks += format == WeightFormat::q8_0 ? 32 : 16;
  }
}

// Calls fill(row, lane, panel) for every output, panels cleared before.
template <class Fill>
void each_output(WeightFormat format, std::int64_t outputs, std::int64_t inputs, std::byte* panels,
                 Fill fill) {
  const std::int64_t stride = panel_bytes(format, inputs);
  parallel_for(panels_of(outputs), 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t p = begin; p < end; ++p) {
      std::byte* panel = panels + p * stride;
      std::memset(panel, 0, static_cast<std::size_t>(stride));
      const int lanes = static_cast<int>(std::min<std::int64_t>(16, outputs - 16 * p));
      for (int lane = 0; lane < lanes; ++lane) fill(16 * p + lane, lane, panel);
    }
  });
}

std::invalid_argument no_way(WeightFormat format) {
  return std::invalid_argument("format " + std::to_string(static_cast<int>(format)) +
                               " cannot be made from this");
}

}  // namespace

void pack(WeightFormat format, std::int64_t outputs, std::int64_t inputs, WeightFormat type,
          const void* weights, std::byte* panels) {
  if (type != WeightFormat::f32 && type != WeightFormat::bf16 && type != WeightFormat::f16)
    throw no_way(type);
  if (format == WeightFormat::q8_0 || format == WeightFormat::q4_0) throw no_way(format);
  each_output(format, outputs, inputs, panels, [&](std::int64_t row, int lane, std::byte* panel) {
    thread_local std::vector<float> values;
    values.resize(static_cast<std::size_t>(inputs));
    read_row(type, weights, row, inputs, values.data());
    if (format == WeightFormat::int8) {
      pack_int8(values.data(), inputs, lane, panel);
    } else if (format == WeightFormat::q4_1) {
      pack_4(values.data(), inputs, lane, panel);
    } else {
      pack_float(format, values.data(), inputs, lane, panel);
    }
  });
}

void repack(WeightFormat format, std::int64_t outputs, std::int64_t inputs, const std::uint8_t* blocks,
            std::byte* panels) {
  if (block_of(format) != 32) throw no_way(format);
  if (inputs % 32) throw std::invalid_argument("inputs must be a multiple of 32");
  const std::int64_t bytes = inputs / 32 *
                             (format == WeightFormat::q8_0   ? 34
                              : format == WeightFormat::q4_0 ? 18
                                                             : 20);
  each_output(format, outputs, inputs, panels, [&](std::int64_t row, int lane, std::byte* panel) {
    repack_row(format, blocks + row * bytes, inputs, lane, panel);
  });
}

}  // namespace plait
