// Float formats, and rows of x to int8, on AVX-512 F, BW, DQ, VL.
#include "quant_linear_avx512.h"

#include "quant_linear_prepare.h"

namespace enginebay {
namespace {

enum class Weights { kF32, kF16, kBf16, kF8 };

template <Weights W>
constexpr size_t kRowBytes = W == Weights::kF32  ? 64
                             : W == Weights::kF8 ? 16
                                                 : 32;  // 16 weights of one k

template <Weights W>
inline __m512 load_weights(const uint8_t* values) {
  if constexpr (W == Weights::kF32) return _mm512_loadu_ps(values);
  if constexpr (W == Weights::kF8) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // two copies of the sign on top
    return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  if constexpr (W == Weights::kF16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// What a panel's partial sums are multiplied by, where the format has scales.
inline __m512 scale_of(const TileTask& task, int64_t panel) {
  if (task.scales == nullptr) return _mm512_setzero_ps();
  const __m512 scale = _mm512_loadu_ps(task.scales + static_cast<size_t>(panel) * task.scale_stride);
  return _mm512_mul_ps(scale, _mm512_set1_ps(kF8Unshift));
}

// R rows times the P panels from `panel` on, along the task's chunk of K.
template <int R, int P, Weights W>
inline void float_panels(const TileTask& task, const uint8_t* panel, int64_t column) {
  const size_t stride = task.panel_stride;
  const uint8_t* values = panel;
  const float* x = reinterpret_cast<const float*>(task.x);
  __m512 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_ps();
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < task.depth; ++k) {
    __m512 w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) w[p] = load_weights<W>(values + p * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 row = _mm512_set1_ps(x[r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = _mm512_fmadd_ps(row, w[p], acc[r][p]);
    }
    values += kRowBytes<W>;
    x += R;
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const int64_t first = column + p * kPanel;
    const __mmask16 mask = column_mask(task.columns - first);
    const __m512 scale = scale_of(task, first / kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* out = task.y + r * task.y_stride + first;
      __m512 y = task.first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, out);
      y = task.scales == nullptr ? _mm512_add_ps(y, acc[r][p]) : _mm512_fmadd_ps(scale, acc[r][p], y);
      if (task.last && task.bias != nullptr)
        y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, task.bias + first));
      _mm512_mask_storeu_ps(out, mask, y);
    }
  }
}

template <int R, Weights W>
void float_tile(const TileTask& task) {
  constexpr int kPanels = R == 1 ? 4 : R <= 6 ? 3 : 2;  // at least four chains, at most 18 accumulators
  const size_t stride = task.panel_stride;
  int64_t p = 0;
  for (; p + kPanels <= task.panel_count; p += kPanels) {
    float_panels<R, kPanels, W>(task, task.panels + static_cast<size_t>(p) * stride, p * kPanel);
  }
  for (; p < task.panel_count; ++p) {
    float_panels<R, 1, W>(task, task.panels + static_cast<size_t>(p) * stride, p * kPanel);
  }
}

template <Weights W>
void float_tile_of(const TileTask& task) {
  static constexpr TileKernel kByRows[] = {float_tile<1, W>, float_tile<2, W>, float_tile<3, W>,
                                           float_tile<4, W>, float_tile<5, W>, float_tile<6, W>,
                                           float_tile<7, W>, float_tile<8, W>};
  static_assert(sizeof kByRows / sizeof kByRows[0] == kTileRows);
  kByRows[task.rows - 1](task);
}

template <Weights W>
void widen(const uint8_t* weights, int64_t count, float* out) {
  for (size_t i = 0; i < static_cast<size_t>(count); i += 16) {
    _mm512_storeu_ps(out + i, load_weights<W>(weights + i / 16 * kRowBytes<W>));
  }
}

struct Zmm {
  static float sum_squares(const float* x, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {  // K is a multiple of 32
      const __m512 value = _mm512_loadu_ps(x + i);
      sum = _mm512_fmadd_ps(value, value, sum);
    }
    return _mm512_reduce_add_ps(sum);
  }

  static float largest(const float* x, int count) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();  // as integers, NaN comes after infinity and that after the rest
    for (int i = 0; i < count; i += 16) {
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    }
    const int bits = static_cast<int>(_mm512_reduce_max_epu32(most));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  }

  static int quantise(const float* x, int count, float inverse, float scale, uint8_t* out, size_t stride,
                      float* rest) {
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < count; i += 16) {
      const __m512 value = _mm512_loadu_ps(x + i);
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(inverse)));
      _mm512_storeu_ps(rest + i, _mm512_fnmadd_ps(_mm512_set1_ps(scale), _mm512_cvtepi32_ps(q), value));
      sum = _mm512_add_epi32(sum, q);
      const __m128i bytes = _mm512_cvtepi32_epi8(q);
      uint8_t* to = out + static_cast<size_t>(i / 4) * stride;
      *reinterpret_cast<int*>(to) = _mm_extract_epi32(bytes, 0);
      *reinterpret_cast<int*>(to + stride) = _mm_extract_epi32(bytes, 1);
      *reinterpret_cast<int*>(to + 2 * stride) = _mm_extract_epi32(bytes, 2);
      *reinterpret_cast<int*>(to + 3 * stride) = _mm_extract_epi32(bytes, 3);
    }
    return _mm512_reduce_add_epi32(sum);
  }
};

}  // namespace

void prepare_integer_avx512(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  IntegerRows<Zmm>{layout, rows, tile}.prepare(x);
}

void prepare_by_row_avx512(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  IntegerRows<Zmm>{layout, rows, tile, true}.prepare(x);
}

const QuantLinearKernels kQuantLinearAvx512 = {
    prepare_float_avx2,           float_tile_of<Weights::kF32>,
    float_tile_of<Weights::kF16>, float_tile_of<Weights::kBf16>,
    float_tile_of<Weights::kF8>,  widen<Weights::kF16>,
    widen<Weights::kBf16>,        widen<Weights::kF8>,
};

}  // namespace enginebay
