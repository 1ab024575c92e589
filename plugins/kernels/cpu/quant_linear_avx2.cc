// AVX2 with FMA and F16C. A panel is two ymm; rows are taken up to four at a time.
#include <immintrin.h>

#include "quant_linear_prepare.h"

namespace enginebay {
namespace {

constexpr int kRows = 4;  // at a time: accumulators for more do not fit 16 registers

enum class Weights { kF32, kF16, kBf16, kF8, kI8, kI4, kI4Minimum };

// Bytes of a weight of a float format.
template <Weights W>
constexpr size_t kBytes = W == Weights::kF32  ? 4
                          : W == Weights::kF8 ? 1
                                              : 2;

// Lanes below `columns` of 8.
inline __m256i column_mask(int64_t columns) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(columns > 8 ? 8 : static_cast<int>(columns)), lanes);
}

inline __m256 load_halves(const uint8_t* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

template <Weights W>
inline __m256 load_floats(const uint8_t* values) {
  if constexpr (W == Weights::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(values));
  if constexpr (W == Weights::kF16) return load_halves(values);
  if constexpr (W == Weights::kF8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);  // two copies of the sign on top
    return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// What the partial sums of 8 columns are multiplied by, where the format has scales.
inline __m256 scale_of(const TileTask& task, int64_t column) {
  if (task.scales == nullptr) return _mm256_setzero_ps();
  const uint8_t* panel = task.scales + static_cast<size_t>(column / kPanel) * task.scale_stride;
  const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(panel) + column % kPanel);
  return _mm256_mul_ps(scale, _mm256_set1_ps(kF8Unshift));
}

// Rows `row` to `row + R - 1` of the tile times one panel, along the task's chunk of K.
template <int R, Weights W>
inline void float_rows(const TileTask& task, int row, const uint8_t* panel, int64_t column) {
  const uint8_t* values = panel;
  const float* x = reinterpret_cast<const float*>(task.x) + row;
  __m256 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < task.depth; ++k) {
    const __m256 left = load_floats<W>(values), right = load_floats<W>(values + 8 * kBytes<W>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r]);
      acc[r][0] = _mm256_fmadd_ps(value, left, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(value, right, acc[r][1]);
    }
    values += kPanel * kBytes<W>;
    x += task.rows;
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + 8 * half;
    const __m256i mask = column_mask(task.columns - first);
    const __m256 scale = scale_of(task, first);
    for (int r = 0; r < R; ++r) {
      float* out = task.y + (row + r) * task.y_stride + first;
      __m256 y = task.first ? _mm256_setzero_ps() : _mm256_maskload_ps(out, mask);
      y = task.scales == nullptr ? _mm256_add_ps(y, acc[r][half]) : _mm256_fmadd_ps(scale, acc[r][half], y);
      if (task.last && task.bias != nullptr)
        y = _mm256_add_ps(y, _mm256_maskload_ps(task.bias + first, mask));
      _mm256_maskstore_ps(out, mask, y);
    }
  }
}

inline __m256i broadcast_four(const uint8_t* x) {
  return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
}

// Keeps a sum in its register: GCC would add up all the products of a loop in a tree, and spill them.
inline void keep(__m256i& sum) { __asm__("" : "+x"(sum)); }

// Lines far ahead of where a panel is read; quant_linear_avx512vnni.cc says why.
constexpr int kAhead = 12 << 10;

inline void prefetch(const uint8_t* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
}

// Dots of R rows with 8 columns along 32 values of k, added to dot[]. No sum of 16 bits saturates: i4 adds
// eight times two products of at most 15*127, i8 two of at most 128*127, the weights' signs moved to x.
template <int R, Weights W>
inline void dot_32(__m256i (&dot)[R], const uint8_t* values, const uint8_t* x, int rows) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (W == Weights::kI8) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    for (int g = 0; g < 8; ++g) {
      const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 64 * g));
      const __m256i w = _mm256_xor_si256(stored, top), magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i q = _mm256_sign_epi8(broadcast_four(x + 4 * (rows * g + r)), w);
        dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, q), ones));
        keep(dot[r]);
      }
    }
  } else {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_si256();
    for (int g = 0; g < 4; ++g) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 64 * g));
      const __m256i low = _mm256_and_si256(w, nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const uint8_t* q = x + 4 * (rows * 2 * g + r);
        sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(low, broadcast_four(q)));
        sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(high, broadcast_four(q + 4 * rows)));
        keep(sum[r]);
      }
    }
    for (int r = 0; r < R; ++r) {
      dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(sum[r], ones));
    }
  }
}

// Rows `row` to `row + R - 1` of the tile times half a panel, 8 columns.
template <int R, Weights W>
inline void integer_rows(const TileTask& task, int row, const uint8_t* panel, int half, int64_t column) {
  constexpr int kStep = W == Weights::kI8 ? 512 : 256;  // bytes of a panel's 32 values of k
  const QuantLinearLayout& layout = *task.layout;
  const int rows = task.rows;
  const Visit* visits = visits_of(task.x);
  const uint8_t* x = task.x + visits_bytes(layout) + 4 * row;
  const bool first = row == 0 && half == 0;  // of the passes over this panel
  const uint8_t* ahead = panel + kAhead;
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t v = 0; v < visit_count(task.x); ++v) {
    const size_t b = static_cast<size_t>(visits[v].block);
    const uint8_t* scales = panel + kAlignment + b * block_scales_bytes(layout) + 16 * half;
    const uint8_t* values = panel + layout.values_offset + b * block_values_bytes(layout) + 32 * half;
    const uint8_t* x_scales = x + rows * layout.block;
    const uint8_t* x_terms = x_scales + 4 * rows;
    __m256i dot[R];
    for (int r = 0; r < R; ++r) {
      // Signed i8 weights need no term either.
      dot[r] = W == Weights::kI4 ? broadcast_four(x_terms + 4 * r) : _mm256_setzero_si256();
    }
    if (first) prefetch(ahead, 64);  // the scales' share
    ahead += 64;
    for (int done = 0; done < layout.block; done += 32) {
      if (first) prefetch(ahead, kStep);
      ahead += kStep;
      dot_32<R, W>(dot, values, x, rows);
      values += kStep;
      x += 32 * rows;
    }
    const __m256 scale = load_halves(scales);
    for (int r = 0; r < R; ++r) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(reinterpret_cast<const float*>(x_scales)[r]));
      acc[r] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot[r]), acc[r]);
    }
    if constexpr (W == Weights::kI4Minimum) {
      const __m256 minimum = load_halves(scales + 32);
      for (int r = 0; r < R; ++r) {
        const __m256 term = _mm256_set1_ps(reinterpret_cast<const float*>(x_terms)[r]);
        acc[r] = _mm256_fmadd_ps(minimum, term, acc[r]);
      }
    }
    x = x_terms + 4 * rows;
  }
  const __m256i mask = column_mask(task.columns - column);
  const __m256 multiplier = _mm256_loadu_ps(reinterpret_cast<const float*>(panel) + 8 * half);
  for (int r = 0; r < R; ++r) {
    __m256 y = _mm256_mul_ps(acc[r], multiplier);
    if (task.bias != nullptr) y = _mm256_add_ps(y, _mm256_maskload_ps(task.bias + column, mask));
    _mm256_maskstore_ps(task.y + (row + r) * task.y_stride + column, mask, y);
  }
}

template <int R, Weights W>
void some_rows(const TileTask& task, int row) {
  for (int64_t p = 0; p < task.panel_count; ++p) {
    const uint8_t* panel = task.panels + static_cast<size_t>(p) * task.panel_stride;
    if constexpr (W < Weights::kI8) {
      float_rows<R, W>(task, row, panel, p * kPanel);
    } else {
      for (int half = 0; half < 2; ++half) integer_rows<R, W>(task, row, panel, half, p * kPanel + 8 * half);
    }
  }
}

template <Weights W>
void tile(const TileTask& task) {
  static constexpr void (*kByRows[])(const TileTask&, int) = {some_rows<1, W>, some_rows<2, W>,
                                                              some_rows<3, W>, some_rows<4, W>};
  for (int row = 0; row < task.rows; row += kRows) {
    const int rows = task.rows - row < kRows ? task.rows - row : kRows;
    kByRows[rows - 1](task, row);
  }
}

template <Weights W>
void widen(const uint8_t* weights, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 8)
    _mm256_storeu_ps(out + i, load_floats<W>(weights + static_cast<size_t>(i) * kBytes<W>));
}

struct Ymm {
  static float sum_squares(const float* x, int64_t count) {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {  // K is a multiple of 32
      const __m256 left = _mm256_loadu_ps(x + i), right = _mm256_loadu_ps(x + i + 8);
      low = _mm256_fmadd_ps(left, left, low);
      high = _mm256_fmadd_ps(right, right, high);
    }
    const __m256 sum = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }

  static float largest(const float* x, int count) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();  // as integers, NaN comes after infinity and that after the rest
    for (int i = 0; i < count; i += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      most = _mm256_max_epu32(most, _mm256_and_si256(bits, magnitude));
    }
    __m128i top = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1))));
  }

  static int quantise(const float* x, int count, float inverse, float scale, uint8_t* out, size_t stride,
                      float* rest) {
    const __m256i first_bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 8) {
      const __m256 value = _mm256_loadu_ps(x + i);
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(value, _mm256_set1_ps(inverse)));
      _mm256_storeu_ps(rest + i, _mm256_fnmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(q), value));
      sum = _mm256_add_epi32(sum, q);
      const __m256i bytes = _mm256_shuffle_epi8(q, first_bytes);
      uint8_t* to = out + static_cast<size_t>(i / 4) * stride;
      *reinterpret_cast<int*>(to) = _mm256_extract_epi32(bytes, 0);
      *reinterpret_cast<int*>(to + stride) = _mm256_extract_epi32(bytes, 4);
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
};

// out[k][r] = rows[r][k] for eight rows and eight k.
inline void transpose_8x8(const float* x, int64_t features, float* out) {
  __m256 a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = _mm256_loadu_ps(x + r * features);
  for (int r = 0; r < 8; r += 2) {  // pairs of rows interleaved
    b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 8; r += 4) {  // columns of four rows: k = 0 and 4, 1 and 5, 2 and 6, 3 and 7
    a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44);
    a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xee);
    a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44);
    a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    _mm256_storeu_ps(out + 8 * k, _mm256_permute2f128_ps(a[k], a[k + 4], 0x20));
    _mm256_storeu_ps(out + 8 * (k + 4), _mm256_permute2f128_ps(a[k], a[k + 4], 0x31));
  }
}

}  // namespace

void prepare_integer_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  IntegerRows<Ymm>{layout, rows, tile}.prepare(x);
}

void prepare_by_row_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  IntegerRows<Ymm>{layout, rows, tile, true}.prepare(x);
}

void prepare_float_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile) {
  const int64_t features = layout.in_features;
  if (rows != 8) return prepare_float_baseline(layout, x, rows, tile);
  float* out = reinterpret_cast<float*>(tile);
  int64_t k = 0;
  for (; k + 8 <= features; k += 8) transpose_8x8(x + k, features, out + 8 * k);
  for (; k < features; ++k) {
    for (int r = 0; r < 8; ++r) out[8 * k + r] = x[r * features + k];
  }
}

const QuantLinearKernels kQuantLinearAvx2 = {
    prepare_float_avx2, tile<Weights::kF32>,  tile<Weights::kF16>,   tile<Weights::kBf16>,
    tile<Weights::kF8>, widen<Weights::kF16>, widen<Weights::kBf16>, widen<Weights::kF8>,
};

const IntegerKernels kIntegerAvx2 = {
    "avx2",
    kTileRows,
    prepare_integer_avx2,
    tile<Weights::kI8>,
    tile<Weights::kI4>,
    tile<Weights::kI4Minimum>,
};

}  // namespace enginebay
