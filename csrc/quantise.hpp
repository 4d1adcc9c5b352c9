// Rounds a group of weights to 4 bits each, with a scale and a minimum.
#pragma once

#include <cstdint>

namespace plait {

inline constexpr int kGroup4 = 32;

// codes[i] * scale + minimum stands for weight i; codes from 0 to 15, scale and minimum in f16.
struct Group4 {
  std::uint16_t scale, minimum;
  std::uint8_t codes[kGroup4];
};

// Rounds `count` finite weights, 1 to kGroup4; codes behind them are 0. From a few starts it takes turns: codes
// nearest to the weights, then the scale and minimum of least squared error for these codes, in which large
// weights count more. The best choice seen is taken. Throws std::invalid_argument where f16 is too small for a
// weight.
Group4 quantise_4(const float* weights, std::int64_t count);

}  // namespace plait
