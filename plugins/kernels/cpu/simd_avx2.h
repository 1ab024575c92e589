// Vectors of 8 floats. See simd_baseline.h for what each function means.
#ifndef ENGINEBAY_SIMD_AVX2_H
#define ENGINEBAY_SIMD_AVX2_H

#include <immintrin.h>

#include "simd_common.h"

namespace enginebay {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kColumns = 2;
  static constexpr int kSums = 12;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float value) { return _mm256_set1_ps(value); }
  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static F load(const Fp16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static F load(const Bf16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load(const Int8* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static F load(const F8E4M3* from) {
    // Sign, then exponent and mantissa one bit lower: fp16 of 2^-8 of the value.
    const __m128i high =
        _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 8);
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(int16_t(0xbfff)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_slli_epi16(half, 1), _mm_set1_epi16(0x7f00));
    const __m128i marked = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(marked), _mm256_set1_ps(256.0f));
  }
  static void expand_int4(const uint8_t* codes, const uint8_t* factors, float* to) {
    uint32_t both;
    std::memcpy(&both, factors, sizeof both);
    const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(both)));
    const F scale = _mm256_broadcastss_ps(pair), minimum = _mm256_broadcastss_ps(_mm_movehdup_ps(pair));
    for (int i = 0; i < 16; i += 8) {
      const __m256i bytes =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(bytes, 4);
      store(to + i, _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(low), minimum));
      store(to + i + 16, _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(high), minimum));
    }
  }
  static void store(float* to, F value) { _mm256_storeu_ps(to, value); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale(F a, F power) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
  }
  static F zero_below(F value, F x, F limit) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
  }
  static F keep_lanes(F value, int first, int last, float other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(other), value, _mm256_castsi256_ps(inside));
  }

  static float sum(F a) {
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  static float largest(F a) {
    const __m128 y = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }

  static void transpose(F (&rows)[8]) {
    F quads[8];  // quads[4*g + k]: column 4*lane + k of rows 4g..4g+3, in 128-bit lane order
    for (int i = 0; i < 8; i += 4) {
      const F low0 = _mm256_unpacklo_ps(rows[i], rows[i + 1]),
              high0 = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
      const F low1 = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
      const F high1 = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
      quads[i] = _mm256_shuffle_ps(low0, low1, 0x44);
      quads[i + 1] = _mm256_shuffle_ps(low0, low1, 0xee);
      quads[i + 2] = _mm256_shuffle_ps(high0, high1, 0x44);
      quads[i + 3] = _mm256_shuffle_ps(high0, high1, 0xee);
    }
    for (int k = 0; k < 4; ++k) {
      rows[k] = _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x20);
      rows[4 + k] = _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x31);
    }
  }
  static F sum_each(const F (&rows)[8]) {
    F a[4];
    for (int i = 0; i < 4; ++i) {  // 128-bit lanes: rows i, i+4
      a[i] = _mm256_add_ps(_mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20),
                           _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
    }
    F b[2];
    for (int i = 0; i < 2; ++i) {
      b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[i], a[i + 2], 0x44), _mm256_shuffle_ps(a[i], a[i + 2], 0xee));
    }
    const F even = _mm256_shuffle_ps(b[0], b[1], _MM_SHUFFLE(2, 0, 2, 0));
    const F odd = _mm256_shuffle_ps(b[0], b[1], _MM_SHUFFLE(3, 1, 3, 1));
    // 128-bit lanes hold rows [0 2 1 3] and 4 more: put them in order.
    return _mm256_permute_ps(_mm256_add_ps(even, odd), _MM_SHUFFLE(3, 1, 2, 0));
  }
};

}  // namespace
}  // namespace enginebay
#endif
