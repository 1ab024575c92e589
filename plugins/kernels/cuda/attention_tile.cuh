// What one warp does with 16 rows of queries and some keys in shared memory: scores, running softmax,
// weighted sum.
//
// Rows of shared memory are padded by 16 bytes: every head size has an even number of 16-byte pieces, so
// eight rows' pieces land in different banks. 8-bit keys and values are read as pairs of 16-bit units by
// ldmatrix, which permutes the head's elements inside groups of 16: queries are stored under the same
// permutation (query_place), and the sums of 8-bit values come out permuted (value_place).
#ifndef ENGINEBAY_CUDA_ATTENTION_TILE_CUH
#define ENGINEBAY_CUDA_ATTENTION_TILE_CUH

#include "attention.cuh"

namespace enginebay::cuda::attention {

constexpr float kNone = -INFINITY;

template <typename Io, typename Cache, int D>
struct Tile {
  using Mma = MmaType<Io, Cache>;
  static constexpr bool kWide = sizeof(Cache) == 2;
  static constexpr int kQueryPitch = D * 2 + 16;                              // bytes of a row
  static constexpr int kKeyPitch = D * static_cast<int>(sizeof(Cache)) + 16;  // of keys and of values
  static constexpr int kPieces = D * static_cast<int>(sizeof(Cache)) / 16;    // 16-byte pieces of a key

  // Where element e of a query goes in its row.
  static __device__ __forceinline__ int query_place(int e) {
    if constexpr (kWide) return e;
    const int in = e % 16, t = in / 4,
              j = in % 4;  // actual 4t + j is the fragment's 2t + j%2, + 8 for j >= 2
    return e - in + 2 * t + j % 2 + (j >= 2 ? 8 : 0);
  }
  // The head's element that column c (0..7) of the 8-wide sum tile n holds.
  static __device__ __forceinline__ int value_place(int n, int c) {
    if constexpr (kWide) return n * 8 + c;
    return n / 2 * 16 + 2 * c + n % 2;
  }

  // Two 8-bit values to a pair of halfs, exactly.
  static __device__ __forceinline__ uint32_t widen(uint32_t two) {
    if constexpr (std::is_same_v<Cache, __nv_fp8_e4m3>) {
      // One instruction from sm_89 on.
      const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
      return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
    } else {
      // 0x6400 | (v + 128) is 1024 + 128 + v.
      const uint32_t biased = __byte_perm(two ^ 0x8080u, 0x64646464u, 0x4140);
      half2 pair;
      memcpy(&pair, &biased, 4);
      pair = __hsub2(pair, __half2half2(__ushort_as_half(0x6480)));
      return bits(pair);
    }
  }

  float sums[D / 8][4];  // rows lane/4 (first two) and lane/4 + 8
  float top[2], total[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.f;
    top[0] = top[1] = kNone;
    total[0] = total[1] = 0.f;
  }

  // scores[key group of 8][...] of Keys keys: raw dot products.
  template <int Keys>
  static __device__ __forceinline__ void scores(uint32_t queries, uint32_t keys, float (&s)[Keys / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.f;
    const uint32_t q_at = queries + lane % 16 * kQueryPitch + lane / 16 * 16;
    if constexpr (kWide) {
      const uint32_t k_at = keys + (lane % 8 + lane / 16 * 8) * kKeyPitch + lane / 8 % 2 * 16;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        load_matrix4(a, q_at + k * 32);
#pragma unroll
        for (int n = 0; n < Keys / 16; ++n) {
          uint32_t b[4];
          load_matrix4(b, k_at + n * 16 * kKeyPitch + k * 32);
          mma16816<Mma>(s[2 * n], a, b[0], b[1]);
          mma16816<Mma>(s[2 * n + 1], a, b[2], b[3]);
        }
      }
    } else {
      // One ldmatrix x4: 16 keys by 32 elements.
      const uint32_t k_at = keys + (lane % 8 + lane / 16 * 8) * kKeyPitch + lane / 8 % 2 * 16;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        uint32_t a[2][4];
        load_matrix4(a[0], q_at + k * 64);
        load_matrix4(a[1], q_at + k * 64 + 32);
#pragma unroll
        for (int n = 0; n < Keys / 16; ++n) {
          uint32_t b[4];
          load_matrix4(b, k_at + n * 16 * kKeyPitch + k * 32);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            mma16816<Mma>(s[2 * n], a[half], widen(b[half] & 0xffff), widen(b[half] >> 16));
            mma16816<Mma>(s[2 * n + 1], a[half], widen(b[2 + half] & 0xffff), widen(b[2 + half] >> 16));
          }
        }
      }
    }
  }

  // Takes exponents of 2 (kNone: unseen), leaves probabilities relative to `top`, and rescales the sums.
  template <int Keys>
  __device__ __forceinline__ void softmax(float (&s)[Keys / 8][4]) {
    float best[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
      best[0] = fmaxf(best[0], fmaxf(s[n][0], s[n][1]));
      best[1] = fmaxf(best[1], fmaxf(s[n][2], s[n][3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
    }
    const float base[2] = {best[0] == kNone ? 0.f : best[0], best[1] == kNone ? 0.f : best[1]};
    if (__any_sync(~0u, best[0] != top[0] || best[1] != top[1])) {
      const float f0 = fast_exp2(top[0] - base[0]), f1 = fast_exp2(top[1] - base[1]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        sums[n][0] *= f0;
        sums[n][1] *= f0;
        sums[n][2] *= f1;
        sums[n][3] *= f1;
      }
      total[0] *= f0;
      total[1] *= f1;
      top[0] = best[0];
      top[1] = best[1];
    }
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
      s[n][0] = fast_exp2(s[n][0] - base[0]);
      s[n][1] = fast_exp2(s[n][1] - base[0]);
      s[n][2] = fast_exp2(s[n][2] - base[1]);
      s[n][3] = fast_exp2(s[n][3] - base[1]);
      total[0] += s[n][0] + s[n][1];  // this lane's share: added up over the four lanes at the end
      total[1] += s[n][2] + s[n][3];
    }
  }

  template <int Keys>
  __device__ __forceinline__ void add_values(uint32_t values, const float (&s)[Keys / 8][4]) {
    const int lane = threadIdx.x % 32;
    using H = Half16<Mma>;
#pragma unroll
    for (int k = 0; k < Keys / 16; ++k) {
      const uint32_t a[4] = {bits(H::pair(s[2 * k][0], s[2 * k][1])), bits(H::pair(s[2 * k][2], s[2 * k][3])),
                             bits(H::pair(s[2 * k + 1][0], s[2 * k + 1][1])),
                             bits(H::pair(s[2 * k + 1][2], s[2 * k + 1][3]))};
      const uint32_t v_at = values + (k * 16 + lane % 16) * kKeyPitch + lane / 16 * 16;
      if constexpr (kWide) {
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
          uint32_t b[4];
          load_matrix4_trans(b, v_at + n * 32);
          mma16816<Mma>(sums[2 * n], a, b[0], b[1]);
          mma16816<Mma>(sums[2 * n + 1], a, b[2], b[3]);
        }
      } else {
        // A register holds elements 2c and 2c+1 of two neighbouring keys: even elements make one tile, odd
        // the next.
#pragma unroll
        for (int n = 0; n < D / 32; ++n) {
          uint32_t b[4];
          load_matrix4_trans(b, v_at + n * 32);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t low = __byte_perm(b[2 * half], 0, 0x3120),
                           high = __byte_perm(b[2 * half + 1], 0, 0x3120);
            mma16816<Mma>(sums[4 * n + 2 * half], a, widen(low & 0xffff), widen(high & 0xffff));
            mma16816<Mma>(sums[4 * n + 2 * half + 1], a, widen(low >> 16), widen(high >> 16));
          }
        }
      }
    }
  }

  // Adds up what the four lanes of a row hold of `total`.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
    }
  }
};

// Reads one query row into shared memory under the tile's permutation; 16-bit floats that a half could not
// hold are scaled by a power of two, which is returned. One warp a row. Rows past the end are zeros.
template <typename T, typename Io, int D>
__device__ __forceinline__ float stage_query(uint8_t* row, const Io* from) {
  const int lane = threadIdx.x % 32;
  using Mma = typename T::Mma;
  float factor = 1.f;
  if constexpr (!std::is_same_v<Mma, Io>) {
    float amax = 0.f;
    if (from != nullptr)
      for (int e = lane; e < D; e += 32) amax = fmaxf(amax, fabsf(to_float(from[e])));
    for (int o = 16; o > 0; o /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, o));
    // The exponent that brings the largest element near 2^8.
    if (amax > 0.f && amax < INFINITY) factor = exp2f(static_cast<float>(ilogbf(amax) - 8));
  }
  for (int e = lane; e < D; e += 32) {
    const float v = from == nullptr ? 0.f : to_float(from[e]) / factor;
    reinterpret_cast<Mma*>(row)[T::query_place(e)] = from_float<Mma>(v);
  }
  return factor;
}

}  // namespace enginebay::cuda::attention

#endif
