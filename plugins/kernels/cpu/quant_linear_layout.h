// How packed weights and prepared rows lie in memory. Every ISA reads the same bytes.
//
// Weights are cut into panels of 16 output features (the last one padded with zeros), each a forward stream:
//
//   f32, f16, bf16  values [K][16] in the format's own dtype
//   f8              scales [K/A][16] fp32, then values [K][16] E4M3
//   i8, i4          multipliers [16] fp32, then scales, then values
//                   scales  [K/A][16] fp16 (symmetric) or [K/A][2][16] fp16 (scale, minimum)
//                   values  i8: [K/4][16][4] bytes q + 128
//                           i4: [K/8][16][4] bytes, the low nibble of group 2g, the high nibble of 2g+1,
//                               where group g of a feature is its q at k = 4g..4g+3
//
// A is the largest of 128, 64, 32 (f8: also 512, 256) that divides the weight block; integer formats quantise
// x in the same blocks. What an integer kernel multiplies by is multiplier*(scale*q + minimum); the
// multiplier is the power of two that puts the feature's largest scale or minimum into [2^14, 2^15), so
// scales that were fp16 stay exact and others are rounded to fp16's 11 bits. Regions and panels start on 64
// bytes.
//
// Rows of x are cut into tiles of R rows, 8 at most or what the kernel takes:
//
//   float formats   x [K][R] fp32
//   i8, i4          visits: their count, then a Visit for each; from the next 64 bytes on, for each visit
//                   { q [A/4][R][4] int8 (for tile units: [R][A]), scale [R] fp32, term [R] }, x = scale*q,
//                   summed over a block's visits (one or two, quant_linear_prepare.h), where term is the fp32
//                   scale*sum(q) for the minimum, or the int32 -8*sum(q) (i4) or -128*sum(q) (i8) that turns
//                   the stored unsigned weights into signed ones
#ifndef ENGINEBAY_QUANT_LINEAR_LAYOUT_H
#define ENGINEBAY_QUANT_LINEAR_LAYOUT_H

#include <cstddef>
#include <cstdint>

#include "enginebay/quant_linear.h"

namespace enginebay {

constexpr int kPanel = 16;                // output features of a panel
constexpr int kTileRows = 8;              // rows of x a kernel works on at a time
constexpr int kMostTileRows = 16;         // those of a tile unit
constexpr int kLargestBlock = 128;        // A of integer formats
constexpr size_t kAlignment = 64;         // of panels and tiles within their buffers
constexpr size_t kPointerAlignment = 16;  // of the buffers themselves; 64 is faster

struct QuantLinearLayout {
  int64_t in_features, out_features, panels;
  eb_dtype format;
  bool integer;          // i8 or i4
  bool minimum;          // a minimum beside each scale
  int block;             // A; 0 for f32, f16, bf16
  int blocks_per_scale;  // A-blocks of one weight block
  int64_t blocks;        // K/A
  size_t values_offset;  // bytes from a panel's start
  size_t panel_bytes;
};

// Functions in headers are static: a file compiled for one ISA must not lend its copy to a baseline file.
static inline size_t packed_bytes(const QuantLinearLayout& layout) {
  return layout.panel_bytes * static_cast<size_t>(layout.panels);
}

// Bytes of a weight of a float format.
static inline size_t weight_bytes(const QuantLinearLayout& layout) {
  return layout.format == EB_F32 ? 4 : layout.format == EB_F8E4M3 ? 1 : 2;
}

static inline size_t align_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// One pass over a block for the rows in the mask `rows`; the others have zeros there.
struct Visit {
  int32_t block;
  uint32_t rows;
};

// Bytes of the list of visits, two to each block at most.
static inline size_t visits_bytes(const QuantLinearLayout& layout) {
  return align_up((1 + 2 * static_cast<size_t>(layout.blocks)) * sizeof(Visit));
}

static inline int64_t visit_count(const uint8_t* tile) { return reinterpret_cast<const Visit*>(tile)->block; }
static inline const Visit* visits_of(const uint8_t* tile) { return reinterpret_cast<const Visit*>(tile) + 1; }

// Bytes of one visit's codes, scales and terms.
static inline size_t visit_bytes(const QuantLinearLayout& layout, int rows) {
  return static_cast<size_t>(rows) * static_cast<size_t>(layout.block + 8);
}

// Bytes of a prepared tile.
static inline size_t tile_bytes(const QuantLinearLayout& layout, int rows) {
  if (!layout.integer)
    return align_up(4 * static_cast<size_t>(layout.in_features) * static_cast<size_t>(rows));
  return visits_bytes(layout) + align_up(2 * static_cast<size_t>(layout.blocks) * visit_bytes(layout, rows));
}

// Validates the context and the descriptor.
eb_status make_layout(const eb_context* context, const eb_quant_linear_desc* desc, QuantLinearLayout* layout);

// EB_INVALID_ARGUMENT unless `rows` is not negative and x, y and the prepared rows fit the address space.
eb_status check_rows(const eb_context* context, const QuantLinearLayout& layout, int64_t rows);

// EB_INVALID_ARGUMENT unless `pointer` is a multiple of `alignment` and not NULL.
eb_status check_pointer(const eb_context* context, const char* name, const void* pointer, size_t alignment);

// The same, and `packed` as long as the layout says.
eb_status check_packed(const eb_context* context, const QuantLinearLayout& layout, const void* packed,
                       size_t bytes);

}  // namespace enginebay
#endif
