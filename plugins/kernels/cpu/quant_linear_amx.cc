// Integer formats on AMX: the tile unit of Intel's server processors. Entered only where CPUID, XCR0 and the
// system's permission allow it (cpu_features.cc), and after its answers were compared
// (quant_linear_choice.cc).
#include "quant_linear_avx512.h"
#include "quant_linear_tile_unit.h"

namespace enginebay {
namespace {

// GCC's tile intrinsics do not say that they read memory: what is behind `pointer` is written before the
// next.
inline void written(const void* pointer) { __asm__ volatile("" : : "r"(pointer) : "memory"); }

// Tile registers: 0 is C, 1 is A, 2 is B.
class Amx {
 public:
  Amx(int rows, int depth) {
    // Palette 1 of the architecture: rows of at most 64 bytes, 16 of them (Intel SDM vol. 1, 18.3).
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    config.rows[0] = config.rows[1] = static_cast<uint8_t>(rows);
    config.rows[2] = static_cast<uint8_t>(depth / 4);
    config.row_bytes[0] = config.row_bytes[2] = 4 * kPanel;
    config.row_bytes[1] = static_cast<uint16_t>(depth);
    written(&config);
    _tile_loadconfig(&config);
  }

  void release() { _tile_release(); }

  void clear() { _tile_zero(0); }

  void multiply(const uint8_t* a, size_t a_stride, const uint8_t* b) {
    written(a);
    written(b);
    _tile_loadd(1, a, a_stride);
    _tile_loadd(2, b, 4 * kPanel);
    _tile_dpbsud(0, 1, 2);
  }

  void store(int32_t* c) { _tile_stored(0, c, 4 * kPanel); }

  static void halves(const uint8_t* from, float* to) {
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
};

}  // namespace

const IntegerKernels kIntegerAmx = {
    "amx",
    kMostTileRows,
    prepare_by_row_avx512,
    tile_unit_kernel<Amx, Weights::kI8>,
    tile_unit_kernel<Amx, Weights::kI4>,
    tile_unit_kernel<Amx, Weights::kI4Minimum>,
};

}  // namespace enginebay
