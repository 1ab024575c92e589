// Integer formats on a unit that multiplies tiles of int8, as AMX does: up to 16 rows of x at a time.
//
// A Unit keeps a tile C of int32 [rows][16] and gives
//   Unit(int rows, int depth)         depth: 32 or 64 values of k that one product takes
//   void release()                    after use; no destructor, whose unwinding would be shared code
//   void clear()                      C = 0
//   void multiply(const uint8_t* a, size_t a_stride, const uint8_t* b)
//                                     C += A.B, A int8 [rows][depth], B uint8 [depth/4][16][4], rows of 64
//                                     bytes
//   void store(int32_t* c)            C, rows of 64 bytes
//   static void halves(const uint8_t* from, float* to)   16 fp16 to fp32
// quant_linear_amx.cc has the real one, quant_linear_emulated.cc one for any processor, for tests. The order
// of floating-point operations is that of the other integer kernels, so answers are the same bits.
#ifndef ENGINEBAY_QUANT_LINEAR_TILE_UNIT_H
#define ENGINEBAY_QUANT_LINEAR_TILE_UNIT_H

#include <cmath>
#include <cstring>

#include "quant_linear_kernels.h"

namespace enginebay {
namespace {

enum class Weights { kI8, kI4, kI4Minimum };

constexpr int kLongestDepth = 64;

template <class Unit, Weights W>
class TileUnitPanel {
 public:
  TileUnitPanel(const TileTask& task, Unit& unit, int depth) : task_(task), unit_(unit), depth_(depth) {}

  void operator()(const uint8_t* panel, int64_t column) {
    const QuantLinearLayout& layout = *task_.layout;
    const int rows = task_.rows;
    const Visit* visits = visits_of(task_.x);
    const uint8_t* x = task_.x + visits_bytes(layout);
    std::memset(acc_, 0, sizeof acc_);
    int64_t unpacked = -1;
    const uint8_t* weights = nullptr;
    for (int64_t v = 0; v < visit_count(task_.x); ++v, x += visit_bytes(layout, rows)) {
      const int64_t block = visits[v].block;
      if (block != unpacked) weights = unpack(panel, block);
      unpacked = block;
      unit_.clear();
      for (int k = 0; k < layout.block; k += depth_) {
        unit_.multiply(x + k, static_cast<size_t>(layout.block), weights + k * kPanel);
      }
      unit_.store(dot_[0]);
      add(visits[v].rows, x + rows * layout.block);
    }
    finish(panel, column);
  }

 private:
  // The block's weights as rows of B; its scales and minimums beside them.
  const uint8_t* unpack(const uint8_t* panel, int64_t block) {
    const QuantLinearLayout& layout = *task_.layout;
    const size_t b = static_cast<size_t>(block);
    const uint8_t* scales = panel + kAlignment + b * block_scales_bytes(layout);
    const uint8_t* values = panel + layout.values_offset + b * block_values_bytes(layout);
    Unit::halves(scales, scale_);
    if (W == Weights::kI4Minimum) Unit::halves(scales + 2 * kPanel, minimum_);
    if (W == Weights::kI8) return values;
    constexpr int kRow = 4 * kPanel;
    for (int row = 0; row < layout.block / 4; row += 2, values += kRow) {
      for (int i = 0; i < kRow; ++i) {
        weights_[row * kRow + i] = values[i] & 15;
        weights_[(row + 1) * kRow + i] = static_cast<uint8_t>(values[i] >> 4);
      }
    }
    return weights_;
  }

  // The visit's dots into the sums of the rows it is for.
  void add(uint32_t some, const uint8_t* x_scales) {
    const int rows = task_.rows;
    for (int r = 0; r < rows; ++r) {
      if ((some >> r & 1) == 0) continue;
      float x_scale, term;
      int32_t correction = 0;
      std::memcpy(&x_scale, x_scales + 4 * r, 4);
      std::memcpy(&term, x_scales + 4 * (rows + r), 4);
      if (W != Weights::kI4Minimum) std::memcpy(&correction, x_scales + 4 * (rows + r), 4);
      for (int c = 0; c < kPanel; ++c) {
        const float dot = static_cast<float>(dot_[r][c] + correction);
        float sum = std::fma(scale_[c] * x_scale, dot, acc_[r][c]);
        if (W == Weights::kI4Minimum) sum = std::fma(minimum_[c], term, sum);
        acc_[r][c] = sum;
      }
    }
  }

  void finish(const uint8_t* panel, int64_t column) const {
    float multiplier[kPanel];
    std::memcpy(multiplier, panel, sizeof multiplier);
    const int64_t left = task_.columns - column;
    const int columns = left < kPanel ? static_cast<int>(left) : kPanel;
    for (int r = 0; r < task_.rows; ++r) {
      float* y = task_.y + r * task_.y_stride + column;
      for (int c = 0; c < columns; ++c) {
        const float value = acc_[r][c] * multiplier[c];
        y[c] = task_.bias != nullptr ? value + task_.bias[column + c] : value;
      }
    }
  }

  const TileTask& task_;
  Unit& unit_;
  const int depth_;
  alignas(kAlignment) float acc_[kMostTileRows][kPanel];
  alignas(kAlignment) int32_t dot_[kMostTileRows][kPanel];
  alignas(kAlignment) float scale_[kPanel], minimum_[kPanel];
  alignas(kAlignment) uint8_t weights_[kLargestBlock * kPanel];
};

template <class Unit, Weights W>
void tile_unit_kernel(const TileTask& task) {
  const int depth = task.layout->block < kLongestDepth ? task.layout->block : kLongestDepth;
  Unit unit(task.rows, depth);
  TileUnitPanel<Unit, W> multiply(task, unit, depth);
  for (int64_t p = 0; p < task.panel_count; ++p) {
    multiply(task.panels + static_cast<size_t>(p) * task.panel_stride, p * kPanel);
  }
  unit.release();
}

}  // namespace
}  // namespace enginebay
#endif
