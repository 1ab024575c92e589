// fp16, bf16 and E4M3 to fp32 and back, one value at a time; NaN stays NaN, rounding is to nearest even.
// Without branches, so that loops over them become vectors.
// Functions are static: a file compiled for one ISA must not lend its copy to a baseline file.
#ifndef ENGINEBAY_FLOAT16_H
#define ENGINEBAY_FLOAT16_H

#include <cstdint>
#include <cstring>

namespace enginebay {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bf16_to_float(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

static inline float fp16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: magnitude * 2^-24, exact in fp32.
  return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

static inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  // Adding 0.5 puts the last kept bit of a subnormal at fp32's last bit, so the addition rounds it.
  const uint32_t shifted = float_to_bits(bits_to_float(magnitude) + 0.5f);
  uint32_t half = magnitude >= 0x38800000u ? (rounded - (112u << 23)) >> 13 : shifted - 0x3f000000u;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 65536 or more
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x1ffu) : half;
  return static_cast<uint16_t>(sign | half);
}

// E4M3 (OCP 8-bit floating point, 2023): 4 exponent bits of bias 7, NaN is 0x7f, no infinity.
static inline float f8e4m3_to_float(uint8_t code) {
  if ((code & 0x7fu) == 0x7fu) return bits_to_float(static_cast<uint32_t>(code) << 24 | 0x7fc00000u);
  // The same bits as fp16 are 2^-8 of the value.
  const uint32_t half = (code & 0x80u) << 8 | (code & 0x7fu) << 7;
  return fp16_to_float(static_cast<uint16_t>(half)) * 256.0f;
}

// What is beyond 448, infinity included, becomes 448.
static inline uint8_t float_to_f8e4m3(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  // Adding 2^14 puts the last kept bit of a subnormal, 2^-9, at fp32's last bit, so the addition rounds it.
  const uint32_t shifted = float_to_bits(bits_to_float(magnitude) + 16384.0f);
  constexpr uint32_t kLeastNormal = 0x3c800000u, kLargest = 0x43e00000u;  // 2^-6, 448
  uint32_t code = magnitude >= kLeastNormal ? (rounded - (120u << 23)) >> 20 : shifted - 0x46800000u;
  code = magnitude >= kLargest ? 0x7eu : code;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(sign | code);
}

}  // namespace enginebay
#endif
