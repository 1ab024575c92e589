// Vectors of 4 floats in plain SSE2, and the meaning of the functions that every vector type has.
#ifndef ENGINEBAY_SIMD_BASELINE_H
#define ENGINEBAY_SIMD_BASELINE_H

#include <emmintrin.h>

#include "simd_common.h"

namespace enginebay {
namespace {

struct Baseline {
  using F = __m128;
  static constexpr int kWidth = 4;
  static constexpr int kColumns = 2;  // vectors of a row of outputs that fit in registers beside three others
  static constexpr int kSums = 12;    // sums that fit in registers beside what they add

  static F zero() { return _mm_setzero_ps(); }
  static F set1(float value) { return _mm_set1_ps(value); }
  static F load(const float* from) { return _mm_loadu_ps(from); }
  template <class T>
  static F load(const T* from) {
    return _mm_setr_ps(to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3]));
  }
  // The 32 values of a group of an INT4 row.
  static void expand_int4(const uint8_t* codes, const uint8_t* factors, float* to) {
    uint16_t both[2];
    std::memcpy(both, factors, sizeof both);
    const float scale = fp16_to_float(both[0]), minimum = fp16_to_float(both[1]);
    for (int i = 0; i < 16; ++i) {
      to[i] = scale * static_cast<float>(codes[i] & 15) + minimum;
      to[i + 16] = scale * static_cast<float>(codes[i] >> 4) + minimum;
    }
  }
  static void store(float* to, F value) { _mm_storeu_ps(to, value); }

  static F add(F a, F b) { return _mm_add_ps(a, b); }
  static F sub(F a, F b) { return _mm_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm_mul_ps(a, b); }
  static F div(F a, F b) { return _mm_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
  // b where either is NaN: pass what may be NaN second.
  static F max(F a, F b) { return _mm_max_ps(a, b); }
  static F min(F a, F b) { return _mm_min_ps(a, b); }
  // To the nearest whole number, of |a| < 2^31.
  static F round(F a) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(a)); }
  // a * 2^power for a near 1 and whole powers from -126 to 127.
  static F scale(F a, F power) {
    const __m128i exponent = _mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(power), _mm_set1_epi32(127)), 23);
    return _mm_mul_ps(a, _mm_castsi128_ps(exponent));
  }
  // 0 where x < limit, else value.
  static F zero_below(F value, F x, F limit) { return _mm_and_ps(_mm_cmpnlt_ps(x, limit), value); }
  // value in lanes first..last-1, `other` in the rest; both may lie outside the vector.
  static F keep_lanes(F value, int first, int last, float other) {
    const __m128i lane = _mm_setr_epi32(0, 1, 2, 3);
    const __m128i inside = _mm_andnot_si128(_mm_cmplt_epi32(lane, _mm_set1_epi32(first)),
                                            _mm_cmplt_epi32(lane, _mm_set1_epi32(last)));
    const __m128 mask = _mm_castsi128_ps(inside);
    return _mm_or_ps(_mm_and_ps(mask, value), _mm_andnot_ps(mask, _mm_set1_ps(other)));
  }

  // Over the lanes, halving: lane i + lane i + width/2, and so on.
  static float sum(F a) {
    const F x = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float largest(F a) {
    const F x = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static void transpose(F (&rows)[4]) { _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]); }
  // Lane i of the result: the sum over the lanes of rows[i], in the order of sum().
  static F sum_each(const F (&rows)[4]) {
    F columns[4] = {rows[0], rows[1], rows[2], rows[3]};
    transpose(columns);
    return _mm_add_ps(_mm_add_ps(columns[0], columns[2]), _mm_add_ps(columns[1], columns[3]));
  }
};

}  // namespace
}  // namespace enginebay
#endif
