// Rows of x into a tile of the integer formats, for any ISA (quant_linear_layout.h has the tile's layout).
//
// Each block of x becomes int8 codes. One step for 32 or more values is coarse where a few of them are far
// larger than the rest, as some channels of a transformer always are, and such blocks make most of the error.
// So a block whose largest value exceeds kOutlier times the root mean square of its row is visited twice:
// what the first codes left over becomes codes too, with a step 254 times smaller. Other rows of the tile see
// zeros on such a visit, which add nothing to them: a row's result is still its own affair.
#ifndef ENGINEBAY_QUANT_LINEAR_PREPARE_H
#define ENGINEBAY_QUANT_LINEAR_PREPARE_H

#include <cmath>
#include <cstring>
#include <limits>

#include "quant_linear_kernels.h"

namespace enginebay {

// On SmolLM2 an eighth of the blocks; KL(fp32 || int8 rows) falls from 4e-3 to 5e-4.
constexpr float kOutlier = 5.0f;

// Vector gives, for an ISA:
//   float sum_squares(const float* x, int64_t count)   with 16 chains, fused: the same bits for AVX2 and
//   AVX-512 float largest(const float* x, int count)      magnitude; NaN or infinity if there is one int
//   quantise(const float* x, int count, float inverse, float scale, uint8_t* out, size_t stride, float* rest)
//       q = round-to-even(x*inverse) four at a time to out, out+stride, …; rest = x - scale*q; returns sum(q)
template <class Vector>
struct IntegerRows {
  const QuantLinearLayout& layout;
  const int rows;
  uint8_t* const tile;
  const bool by_row = false;  // a row's codes of a block lie together

  void prepare(const float* x) const {
    float limit[kMostTileRows];
    for (int r = 0; r < rows; ++r) {
      const float* row = x + r * layout.in_features;
      const float mean =
          Vector::sum_squares(row, layout.in_features) / static_cast<float>(layout.in_features);
      // Where squares overflow or vanish in fp32, no block counts as an outlier.
      limit[r] = mean < kSmallest ? std::numeric_limits<float>::infinity() : kOutlier * std::sqrt(mean);
    }
    Visit* visits = reinterpret_cast<Visit*>(tile) + 1;
    uint8_t* out = tile + visits_bytes(layout);
    int32_t count = 0;
    for (int64_t b = 0; b < layout.blocks; ++b) {
      const float* from = x + b * layout.block;
      float largest[kMostTileRows];
      uint32_t again = 0;
      for (int r = 0; r < rows; ++r) {
        largest[r] = Vector::largest(from + r * layout.in_features, layout.block);
        if (largest[r] > limit[r]) again |= 1u << r;
      }
      visits[count++] = {static_cast<int32_t>(b), (1u << rows) - 1};
      if (again != 0) visits[count++] = {static_cast<int32_t>(b), again};
      for (int r = 0; r < rows; ++r) {
        float rest[kLargestBlock], unused[kLargestBlock];
        put(from + r * layout.in_features, largest[r], r, out, rest);
        if (again == 0) continue;
        const bool mine = (again >> r & 1) != 0;
        put(rest, mine ? Vector::largest(rest, layout.block) : 0.0f, r, out + visit_bytes(layout, rows),
            unused);
      }
      out += (again != 0 ? 2 : 1) * visit_bytes(layout, rows);
    }
    reinterpret_cast<Visit*>(tile)->block = count;
  }

 private:
  // Codes, scale and term of one row's block into a visit.
  void put(const float* from, float largest, int r, uint8_t* visit, float* rest) const {
    const bool finite = std::isfinite(largest), zero = !finite || largest < kSmallest;
    const float scale = zero ? 0.0f : largest / 127.0f;
    const size_t stride = by_row ? 4 : static_cast<size_t>(4 * rows);
    uint8_t* const codes = visit + (by_row ? r * layout.block : 4 * r);
    int total = 0;
    if (zero) {
      for (int i = 0; i < layout.block; i += 4)
        std::memset(codes + static_cast<size_t>(i / 4) * stride, 0, 4);
      std::memset(rest, 0, static_cast<size_t>(layout.block) * sizeof(float));
    } else {
      total = Vector::quantise(from, layout.block, 127.0f / largest, scale, codes, stride, rest);
    }
    float* scales = reinterpret_cast<float*>(visit + static_cast<size_t>(rows * layout.block));
    scales[r] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    if (layout.minimum) {
      scales[rows + r] = scales[r] * static_cast<float>(total);
    } else {
      reinterpret_cast<int32_t*>(scales)[rows + r] = -weight_offset(layout) * total;
    }
  }
};

}  // namespace enginebay
#endif
