// The kernel for tile units over a unit in plain C++: slow, and there so that tests on any machine run what
// AMX will run (ENGINEBAY_ISA=amx-emulated).
#include "float16.h"
#include "quant_linear_tile_unit.h"

namespace enginebay {
namespace {

class EmulatedUnit {
 public:
  EmulatedUnit(int rows, int depth) : rows_(rows), depth_(depth) {}

  void release() {}

  void clear() { std::memset(c_, 0, sizeof c_); }

  void multiply(const uint8_t* a, size_t a_stride, const uint8_t* b) {
    for (int r = 0; r < rows_; ++r) {
      const int8_t* row = reinterpret_cast<const int8_t*>(a) + static_cast<size_t>(r) * a_stride;
      for (int k = 0; k < depth_; ++k) {
        for (int c = 0; c < kPanel; ++c) c_[r][c] += row[k] * b[(k / 4 * kPanel + c) * 4 + k % 4];
      }
    }
  }

  void store(int32_t* c) const { std::memcpy(c, c_, static_cast<size_t>(rows_) * sizeof c_[0]); }

  static void halves(const uint8_t* from, float* to) {
    for (int c = 0; c < kPanel; ++c) {
      uint16_t half;
      std::memcpy(&half, from + 2 * c, sizeof half);
      to[c] = fp16_to_float(half);
    }
  }

 private:
  const int rows_, depth_;
  int32_t c_[kMostTileRows][kPanel];
};

}  // namespace

const IntegerKernels kIntegerEmulated = {
    "amx-emulated",
    kMostTileRows,
    prepare_by_row_avx2,
    tile_unit_kernel<EmulatedUnit, Weights::kI8>,
    tile_unit_kernel<EmulatedUnit, Weights::kI4>,
    tile_unit_kernel<EmulatedUnit, Weights::kI4Minimum>,
};

}  // namespace enginebay
