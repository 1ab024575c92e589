// Vectors of 16 floats. See simd_baseline.h for what each function means.
#ifndef ENGINEBAY_SIMD_AVX512_H
#define ENGINEBAY_SIMD_AVX512_H

#include <immintrin.h>

#include "simd_common.h"

namespace enginebay {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kColumns = 4;
  static constexpr int kSums = 24;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float value) { return _mm512_set1_ps(value); }
  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static F load(const Fp16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static F load(const Bf16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F load(const Int8* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static F load(const F8E4M3* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __mmask16 numbers =
        _mm_cmpneq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
    // Sign, then exponent and mantissa one bit lower: fp16 of 2^-8 of the value.
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                          _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const F nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mul_ps(nan, numbers, _mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
  static void expand_int4(const uint8_t* codes, const uint8_t* factors, float* to) {
    uint32_t both;
    std::memcpy(&both, factors, sizeof both);
    const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(both)));
    const F iota = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // What each code stands for; a permutation looks at 4 bits of an index.
    const F table =
        _mm512_fmadd_ps(_mm512_broadcastss_ps(pair), iota, _mm512_broadcastss_ps(_mm_movehdup_ps(pair)));
    const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    store(to, _mm512_permutexvar_ps(index, table));
    store(to + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table));
  }
  static void store(float* to, F value) { _mm512_storeu_ps(to, value); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale(F a, F power) { return _mm512_scalef_ps(a, power); }
  static F zero_below(F value, F x, F limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }
  static F keep_lanes(F value, int first, int last, float other) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), lane_mask(last) & ~lane_mask(first), value);
  }

  static float sum(F a) {
    const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  static float largest(F a) {
    const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }

  static void transpose(F (&rows)[16]) {
    F pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16;
         i += 4) {  // quads[i + k]: column 4*lane + k of rows i..i+3, in 128-bit lane order
      quads[i] = pair(pairs[i], pairs[i + 2], false);
      quads[i + 1] = pair(pairs[i], pairs[i + 2], true);
      quads[i + 2] = pair(pairs[i + 1], pairs[i + 3], false);
      quads[i + 3] = pair(pairs[i + 1], pairs[i + 3], true);
    }
    for (int k = 0; k < 4; ++k) {
      const F even_low = _mm512_shuffle_f32x4(quads[k], quads[4 + k], 0x88);
      const F odd_low = _mm512_shuffle_f32x4(quads[k], quads[4 + k], 0xdd);
      const F even_high = _mm512_shuffle_f32x4(quads[8 + k], quads[12 + k], 0x88);
      const F odd_high = _mm512_shuffle_f32x4(quads[8 + k], quads[12 + k], 0xdd);
      rows[k] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
      rows[8 + k] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
      rows[4 + k] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
      rows[12 + k] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
  }

  // Lane i of the result: the sum over the lanes of rows[i], in the order of sum().
  __attribute__((always_inline)) static F sum_each(const F (&rows)[16]) {
    // Each step adds halves of two rows: one half of each by a blend, the other halves crosswise by a
    // shuffle.
    F a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {  // 256-bit lanes: rows i, i+8
      const F here = _mm512_mask_blend_ps(0xff00, rows[i], rows[i + 8]);
      a[i] = _mm512_add_ps(here, _mm512_shuffle_f32x4(rows[i], rows[i + 8], 0x4e));
    }
    for (int i = 0; i < 4; ++i) {  // 128-bit lanes: rows i, i+4, i+8, i+12
      const F here = _mm512_mask_blend_ps(0xf0f0, a[i], a[i + 4]);
      const F there = _mm512_mask_blend_ps(0xf0f0, a[i + 4], a[i]);
      b[i] = _mm512_add_ps(here, _mm512_shuffle_f32x4(there, there, 0xb1));
    }
    for (int i = 0; i < 2; ++i) {  // 64-bit lanes: rows i, i+2, i+4, ...
      const F here = _mm512_mask_blend_ps(0xcccc, b[i], b[i + 2]);
      c[i] = _mm512_add_ps(here, _mm512_shuffle_ps(b[i], b[i + 2], 0x4e));
    }
    const F here = _mm512_mask_blend_ps(0xaaaa, c[0], c[1]);
    const F there = _mm512_mask_blend_ps(0xaaaa, c[1], c[0]);
    return _mm512_add_ps(here, _mm512_permute_ps(there, 0xb1));
  }

 private:
  static __mmask16 lane_mask(int count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << (count < 0 ? 0 : count)) - 1u);
  }
  // The low (or high) 64 bits of every 128-bit lane of a, then of b.
  static F pair(F a, F b, bool high) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  }
};

}  // namespace
}  // namespace enginebay
#endif
