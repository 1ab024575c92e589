// Integer formats on AVX-512 with VNNI. One zmm is a panel; a kernel of R rows and P panels keeps its R*P
// integer and R*P float accumulators in registers and unpacks each weight once for its R rows.
#include "quant_linear_avx512.h"

namespace enginebay {
namespace {

enum class Weights { kI8, kI4, kI4Minimum };

// acc + the dot of four unsigned weights per column with the row's four signed values, read from memory.
inline __m512i dot4(__m512i acc, __m512i weights, const uint8_t* x) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(acc)
          : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(x)));
  return acc;
}

// One load for both nibbles: without the barrier GCC folds a load into each, and loads are what M = 1 waits
// for.
inline __m512i load_weights(const uint8_t* values) {
  __m512i weights = _mm512_loadu_si512(values);
  __asm__("" : "+v"(weights));
  return weights;
}

inline __m512 load_halves(const uint8_t* halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

inline __m512 broadcast_float(const uint8_t* value) {
  return _mm512_set1_ps(*reinterpret_cast<const float*>(value));
}

// Panels follow one another in memory but are read as two streams each, scales and values, too short for the
// hardware to run ahead of. So lines are asked for in the order of memory, this far ahead of where a thread
// reads: the time a few blocks take is then longer than memory's latency, and L2 has room for it.
constexpr int kAhead = 12 << 10;

inline void prefetch(const uint8_t* line) { _mm_prefetch(line, _MM_HINT_T1); }

// The weights of 32 k of a panel, group of four k after group.
template <Weights W>
inline void unpack_32(const uint8_t* values, __m512i (&w)[8]) {
  if constexpr (W == Weights::kI8) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) w[g] = load_weights(values + 64 * g);
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m512i both = load_weights(values + 64 * g);
      w[2 * g] = _mm512_and_si512(both, nibble);
      w[2 * g + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
  }
}

// R rows times the P panels from `panel` on.
template <int R, int P, Weights W>
inline void integer_panels(const TileTask& task, const uint8_t* panel, int64_t column) {
  const QuantLinearLayout& layout = *task.layout;
  // Few rows leave registers to hold 16 times the high nibbles' dot apart: no shift, and a shorter chain.
  constexpr bool kApart = W != Weights::kI8 && R * P <= 4;
  const size_t stride = task.panel_stride;
  const size_t values_bytes = block_values_bytes(layout);
  const Visit* visits = visits_of(task.x);
  const int64_t count = visit_count(task.x);
  const uint8_t* x = task.x + visits_bytes(layout);
  const uint8_t* ahead = panel + kAhead;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_ps();
  }
  for (int64_t v = 0; v < count; ++v) {
    const size_t b = static_cast<size_t>(visits[v].block);
    const uint8_t* scales = panel + kAlignment + b * (W == Weights::kI4Minimum ? 64 : 32);
    const uint8_t* values = panel + layout.values_offset + b * values_bytes;
    const uint8_t* x_scales = x + R * layout.block;
    const uint8_t* x_terms = x_scales + 4 * R;
    if constexpr (R > 1) {
      if (const uint32_t some = visits[v].rows; some != (1u << R) - 1) {
        // A second visit is for few rows: each weight is unpacked once and the other rows are passed over.
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          __m512i sum[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            sum[r] = W == Weights::kI4Minimum
                         ? _mm512_setzero_si512()
                         : _mm512_set1_epi32(reinterpret_cast<const int32_t*>(x_terms)[r]);
          }
          for (int quarter = 0; quarter < layout.block / 32; ++quarter) {
            const uint8_t* codes = x + 32 * R * quarter;
            __m512i w[8];
            unpack_32<W>(values + p * stride + quarter * (W == Weights::kI8 ? 512 : 256), w);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              if ((some >> r & 1) == 0) continue;
#pragma GCC unroll 8
              for (int g = 0; g < 8; ++g) sum[r] = dot4(sum[r], w[g], codes + 4 * (R * g + r));
            }
          }
          const __m512 scale = load_halves(scales + p * stride);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            if ((some >> r & 1) == 0) continue;
            const __m512 both = _mm512_mul_ps(scale, broadcast_float(x_scales + 4 * r));
            acc[r][p] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(sum[r]), acc[r][p]);
            if constexpr (W == Weights::kI4Minimum) {
              const __m512 minimum = load_halves(scales + p * stride + 32);
              acc[r][p] = _mm512_fmadd_ps(minimum, broadcast_float(x_terms + 4 * r), acc[r][p]);
            }
          }
        }
        x = x_terms + 4 * R;
        continue;
      }
    }
    __m512i dot[R][P], high_dot[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        dot[r][p] = W == Weights::kI4Minimum
                        ? _mm512_setzero_si512()
                        : _mm512_set1_epi32(reinterpret_cast<const int32_t*>(x_terms)[r]);
        if constexpr (kApart) high_dot[r][p] = _mm512_setzero_si512();
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p, ahead += 64) prefetch(ahead);  // the scales' share
    int quarters = layout.block / 32;                          // of 32 values of k
    do {
      if constexpr (W == Weights::kI8) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
            prefetch(ahead + 64 * (P * g + p));
            const __m512i w = load_weights(values + p * stride + 64 * g);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) dot[r][p] = dot4(dot[r][p], w, x + 4 * (R * g + r));
          }
        }
        values += 512;
        ahead += 512 * P;
      } else {
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
            prefetch(ahead + 64 * (P * g + p));
            const __m512i w = load_weights(values + p * stride + 64 * g);
            const __m512i low = _mm512_and_si512(w, nibble);
            const __m512i high =
                kApart ? _mm512_andnot_si512(nibble, w) : _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) dot[r][p] = dot4(dot[r][p], low, x + 4 * (R * 2 * g + r));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              __m512i& sum = kApart ? high_dot[r][p] : dot[r][p];
              sum = dot4(sum, high, x + 4 * (R * (2 * g + 1) + r));
            }
          }
        }
        values += 256;
        ahead += 256 * P;
      }
      x += 32 * R;
    } while (--quarters > 0);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const __m512 scale = load_halves(scales + p * stride);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if constexpr (kApart) {
          dot[r][p] = _mm512_add_epi32(dot[r][p], _mm512_srai_epi32(high_dot[r][p], 4));
        }
        const __m512 both = _mm512_mul_ps(scale, broadcast_float(x_scales + 4 * r));
        acc[r][p] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dot[r][p]), acc[r][p]);
      }
      if constexpr (W == Weights::kI4Minimum) {
        const __m512 minimum = load_halves(scales + p * stride + 32);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          acc[r][p] = _mm512_fmadd_ps(minimum, broadcast_float(x_terms + 4 * r), acc[r][p]);
        }
      }
    }
    x = x_terms + 4 * R;
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const int64_t first = column + p * kPanel;
    const __mmask16 mask = column_mask(task.columns - first);
    const __m512 multiplier = _mm512_loadu_ps(panel + p * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m512 y = _mm512_mul_ps(acc[r][p], multiplier);
      if (task.bias != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, task.bias + first));
      _mm512_mask_storeu_ps(task.y + r * task.y_stride + first, mask, y);
    }
  }
}

template <int R, Weights W>
void integer_tile(const TileTask& task) {
  // With few rows memory is what a kernel waits for, and it is read best as one stream.
  constexpr int kPanels = R <= 3 || R > 6 ? 1 : 2;
  int64_t p = 0;
  for (; p + kPanels <= task.panel_count; p += kPanels) {
    integer_panels<R, kPanels, W>(task, task.panels + static_cast<size_t>(p) * task.panel_stride, p * kPanel);
  }
  for (; p < task.panel_count; ++p) {
    integer_panels<R, 1, W>(task, task.panels + static_cast<size_t>(p) * task.panel_stride, p * kPanel);
  }
}

template <Weights W>
void integer_tile_of(const TileTask& task) {
  static constexpr TileKernel kByRows[] = {integer_tile<1, W>, integer_tile<2, W>, integer_tile<3, W>,
                                           integer_tile<4, W>, integer_tile<5, W>, integer_tile<6, W>,
                                           integer_tile<7, W>, integer_tile<8, W>};
  static_assert(sizeof kByRows / sizeof kByRows[0] == kTileRows);
  kByRows[task.rows - 1](task);
}

}  // namespace

const IntegerKernels kIntegerAvx512Vnni = {
    "avx512vnni",
    kTileRows,
    prepare_integer_avx512,
    integer_tile_of<Weights::kI8>,
    integer_tile_of<Weights::kI4>,
    integer_tile_of<Weights::kI4Minimum>,
};

}  // namespace enginebay
