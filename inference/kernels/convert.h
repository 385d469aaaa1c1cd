// Scalar conversions between float32 and the 16-bit floats, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bfloat16_to_float(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

inline float float16_to_float(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float value = float(fraction) * 0x1p-24f;  // subnormal
  return sign ? -value : value;
}
