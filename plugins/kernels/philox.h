// Random numbers that depend on nothing but their name: Philox4x32-10 (Salmon et al., 2011), for host and
// device.
#ifndef ENGINEBAY_PHILOX_H
#define ENGINEBAY_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define EB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EB_HOST_DEVICE inline
#endif

namespace enginebay {

struct Random4 {
  uint32_t value[4];
};

EB_HOST_DEVICE Random4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Four neighbouring tokens' numbers, of row `row` of a sequence at `position`.
EB_HOST_DEVICE Random4 token_random(uint64_t seed, int64_t position, int row, int token) {
  return philox(seed, static_cast<uint32_t>(token) / 4, static_cast<uint32_t>(row),
                static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32));
}

// The number that decides whether the draft of `row` is accepted, in [0, 1).
EB_HOST_DEVICE float accept_random(uint64_t seed, int64_t position, int row) {
  const Random4 r = philox(seed, 0xFFFFFFFFu, static_cast<uint32_t>(row), static_cast<uint32_t>(position),
                           static_cast<uint32_t>(position >> 32));
  return static_cast<float>(r.value[0] >> 8) * 0x1p-24f;
}

// In (0, 1), finest near 0: the exponential variable -log(1 - u) is smallest there, and the smallest wins.
EB_HOST_DEVICE float open_unit(uint32_t bits) {
  const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

}  // namespace enginebay

#endif
