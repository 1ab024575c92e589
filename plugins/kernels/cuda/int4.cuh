// INT4 weights as the CUDA kernels read them: layout "cuda-i4-m16k64-v1".
//
//   values   one tile for each 16 rows of W and 64 columns, row tiles outermost: 512 bytes, 16 for each lane
//   of
//            a warp. Word s of lane l holds the lane's A fragment of mma.m16n8k16 for columns 16s .. 16s+15:
//            nibbles 0,4: row l/4, columns 2(l%4)+{0,1};  1,5: row l/4+8;  2,6 and 3,7: the same, columns
//            + 8.
//   scales   for each row tile and block of K: 8 groups of (scale[r], scale[r+8]) and, where there are
//            minimums, (centre[r], centre[r+8]), in the activations' dtype; w = scale*(q-8) + centre.
//
// The last row tile is filled with scale 0. Values are rounded up to 256 bytes, then the scales follow.
#ifndef ENGINEBAY_CUDA_INT4_CUH
#define ENGINEBAY_CUDA_INT4_CUH

#include "device.cuh"

namespace enginebay::cuda {

struct Int4Layout {
  int row_tiles, k_tiles, blocks;  // of 16 rows, of 64 columns, of block_size columns
  int scale_bytes;                 // of one row tile and block: 32, or 64 with centres
  int64_t value_bytes, bytes;

  __host__ __device__ Int4Layout(int k, int n, int block_size, bool symmetric)
      : row_tiles(ceil_div(n, 16)),
        k_tiles(k / 64),
        blocks(k / block_size),
        scale_bytes(symmetric ? 32 : 64) {
    value_bytes = ceil_div<int64_t>(int64_t{512} * row_tiles * k_tiles, 256) * 256;
    bytes = value_bytes + int64_t{row_tiles} * blocks * scale_bytes;
  }
};

struct Int4Problem {
  const uint8_t* packed;
  const void* x;      // [m, k]
  const float* bias;  // [n], of every group where there are groups, or null
  void* y;            // [m, n]
  int m, n, k, block_size;
};

// Grouped products: rows of x sorted by whose weights they meet. A tile is {group, first row, end of the
// group's rows}.
struct Int4Groups {
  const int4* tiles;
  const int* count;
  int64_t stride;  // bytes from one group's weights to the next's
};

// Where nibble (row r of 16, column c of 64) of a tile lies: word index in the tile and shift.
__host__ __device__ inline void int4_place(int r, int c, int* word, int* shift) {
  const int lane = (r % 8) * 4 + (c % 8) / 2, step = c / 16;
  const int pair = r / 8 + 2 * ((c % 16) / 8);
  *word = lane * 4 + step;
  *shift = 4 * (pair + 4 * (c % 2));
}

// (word & mask) | magic in one instruction: two constants need it spelled out.
template <uint32_t Mask>
__device__ __forceinline__ uint32_t pick(uint32_t word, uint32_t magic) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(out) : "r"(word), "n"(Mask), "r"(magic));
  return out;
}

// Eight nibbles to q-8, exactly, as the A fragment they are.
template <typename T>
__device__ __forceinline__ void int4_fragment(uint32_t word, typename Half16<T>::Pair (&a)[4]) {
  using Pair = typename Half16<T>::Pair;
  const auto view = [](uint32_t v) {
    Pair p;
    memcpy(&p, &v, 4);
    return p;
  };
  if constexpr (std::is_same_v<T, half>) {
    // 0x6400 | q is 1024 + q; 0x6400 | q<<4 is 1024 + 16q.
    const uint32_t high = word >> 8;
    const Pair offset = view(0x64086408), sixteenth = view(0x2c002c00), offset16 = view(0xd480d480);
    a[0] = __hsub2(view(pick<0x000f000f>(word, 0x64006400)), offset);
    a[1] = __hfma2(view(pick<0x00f000f0>(word, 0x64006400)), sixteenth, offset16);
    a[2] = __hsub2(view(pick<0x000f000f>(high, 0x64006400)), offset);
    a[3] = __hfma2(view(pick<0x00f000f0>(high, 0x64006400)), sixteenth, offset16);
  } else {
    // 0x4300 | q is 128 + q.
    const Pair one = view(0x3f803f80), offset = view(0xc308c308);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = __hfma2(view(pick<0x000f000f>(word >> (4 * i), 0x43004300)), one, offset);
  }
}

// The same fragment as offset + q, exact and cheaper: rows lane/4 are `low` above q - 8, rows lane/4 + 8
// `high`.
template <typename T>
struct Int4Biased;
template <>
struct Int4Biased<half> {
  static constexpr float low = 256 + 8, high = 16 + 8;
  static __device__ __forceinline__ void fragment(uint32_t word, uint32_t (&a)[4]) {
    // 0x5c00 | q<<2 is 256 + q, 0x4c00 | q<<6 is 16 + q.
    const uint32_t first = __funnelshift_l(word, word, 2), second = __funnelshift_r(word, word, 6);
    a[0] = pick<0x003c003c>(first, 0x5c005c00);
    a[1] = pick<0x03c003c0>(first, 0x4c004c00);
    a[2] = pick<0x003c003c>(second, 0x5c005c00);
    a[3] = pick<0x03c003c0>(second, 0x4c004c00);
  }
};
template <>
struct Int4Biased<__nv_bfloat16> {
  static constexpr float low = 128 + 8, high = 128 + 8;
  static __device__ __forceinline__ void fragment(uint32_t word, uint32_t (&a)[4]) {
    // 0x4300 | q is 128 + q.
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pick<0x000f000f>(word >> (4 * i), 0x43004300);
  }
};

// Scales of one row tile and block, for rows lane/4 and lane/4 + 8.
template <typename T, bool Symmetric>
struct Int4Scales {
  using Pair = typename Half16<T>::Pair;
  uint32_t scale, centre;
  __device__ __forceinline__ void load(const uint8_t* block) {
    const int g = (threadIdx.x & 31) >> 2;
    if constexpr (Symmetric) {
      scale = __ldg(reinterpret_cast<const uint32_t*>(block) + g);
      centre = 0;
    } else {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(block) + g);
      scale = both.x;
      centre = both.y;
    }
  }
  static __device__ __forceinline__ Pair view(uint32_t v) {
    Pair p;
    memcpy(&p, &v, 4);
    return p;
  }
  __device__ __forceinline__ float2 scales() const { return Half16<T>::floats(view(scale)); }
  __device__ __forceinline__ float2 centres() const { return Half16<T>::floats(view(centre)); }
};

}  // namespace enginebay::cuda

#endif
