// The inner loops of QuantLinear, one table per ISA (quant_linear_<isa>.cc). Every kernel of a table computes
// an output element by the same operations in the same order, whatever the number of rows.
//
// Integer formats, visit after visit to a block, each dot being exact:
//   acc = fma(scale_w * scale_x, float(dot), acc); acc = fma(minimum, term, acc)
// and then y = acc * multiplier (+ bias).
//
// Float formats, chunk of K after chunk (f8: a chunk is a block):
//   partial = fma(x, w, partial) along the chunk; y = y + partial, or fma(scale, partial, y) for f8
// and then y = y (+ bias). The baseline table multiplies and adds where the others fuse.
#ifndef ENGINEBAY_QUANT_LINEAR_KERNELS_H
#define ENGINEBAY_QUANT_LINEAR_KERNELS_H

#include "quant_linear_layout.h"

namespace enginebay {

constexpr int64_t kChunk = 512;  // of K, float formats; f8: at most

// One tile of rows times consecutive panels.
struct TileTask {
  const QuantLinearLayout* layout;
  int rows;               // R, 1 to kTileRows
  const uint8_t* x;       // the prepared tile; float formats: from the chunk's first k
  const uint8_t* panels;  // the first panel; float formats: from the chunk's first k
  size_t panel_stride;    // bytes
  const uint8_t* scales;  // f8: the chunk's [16] fp32 of the first panel; NULL for other float formats
  size_t scale_stride;    // bytes from one panel's to the next one's
  int64_t panel_count;
  int64_t columns;  // of y, from the first panel's first column to the end of the matrix
  float* y;         // row 0, the first panel's first column
  int64_t y_stride;
  const float* bias;  // from the first panel's first column, or NULL
  // Float formats: how much of K this chunk has, and whether it is the first and the last.
  int64_t depth;
  bool first, last;
};

// Rows [rows, K] of x into a tile.
using PrepareRows = void (*)(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
using TileKernel = void (*)(const TileTask& task);
// `count` narrow weights to fp32; f8's come out as kF8Shift of their value.
using WidenWeights = void (*)(const uint8_t* weights, int64_t count, float* out);

struct QuantLinearKernels {
  PrepareRows prepare_float;
  TileKernel f32, f16, bf16, f8;
  WidenWeights widen_f16, widen_bf16, widen_f8;  // the same values as those kernels multiply by
};

// Integer formats have tables of their own, since several may run on one processor (quant_linear_choice.h).
// They give the same bits: but for the baseline one, which does not fuse, and as long as rows were prepared
// for the same ISA.
struct IntegerKernels {
  const char* name;
  int tile_rows;  // R at most
  PrepareRows prepare;
  TileKernel i8, i4, i4_minimum;
};

static inline TileKernel tile_kernel(const IntegerKernels& kernels, const QuantLinearLayout& layout) {
  return layout.format == EB_I8 ? kernels.i8 : layout.minimum ? kernels.i4_minimum : kernels.i4;
}

// The bits of an E4M3 number, moved to where fp16 has its fields, are 2^-8 of it as fp16: kernels multiply by
// that and scales make up for it.
constexpr float kF8Shift = 0x1p-8f, kF8Unshift = 0x1p8f;

// A block of x becomes int8 by x = scale*q with scale = amax/127 and q = round-to-even(x * (127/amax)). A
// block below kSmallest counts as zero; NaN or infinity makes the scale and the term NaN, so that the row's
// outputs are NaN.
constexpr float kSmallest = 0x1p-100f;

// Turns the stored unsigned weights into signed ones: the term of a block is -offset*sum(q).
static inline int32_t weight_offset(const QuantLinearLayout& layout) {
  return layout.format == EB_I8 ? 128 : 8;
}

// Bytes of a panel's values and scales of one block.
static inline size_t block_values_bytes(const QuantLinearLayout& layout) {
  return static_cast<size_t>(layout.block * kPanel) / (layout.format == EB_I4 ? 2 : 1);
}
static inline size_t block_scales_bytes(const QuantLinearLayout& layout) { return layout.minimum ? 64 : 32; }

extern const QuantLinearKernels kQuantLinearBaseline, kQuantLinearAvx2, kQuantLinearAvx512;
extern const IntegerKernels kIntegerBaseline, kIntegerAvx2, kIntegerAvx512Vnni, kIntegerAmx;
extern const IntegerKernels kIntegerEmulated;  // the logic of kIntegerAmx for any processor with AVX2, slowly

// Rows to int8, by groups of four codes, or row by row for tile units.
void prepare_integer_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
void prepare_by_row_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
void prepare_by_row_avx512(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
void prepare_integer_avx512(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
void prepare_float_avx2(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);
void prepare_float_baseline(const QuantLinearLayout& layout, const float* x, int rows, uint8_t* tile);

}  // namespace enginebay
#endif
