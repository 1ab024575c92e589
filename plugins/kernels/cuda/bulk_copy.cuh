// Barriers in shared memory, and the bulk copy engine that fills tiles (sm_90 and newer).
#ifndef ENGINEBAY_CUDA_BULK_COPY_CUH
#define ENGINEBAY_CUDA_BULK_COPY_CUH

#include <cuda.h>

#include "device.cuh"

namespace enginebay::cuda {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(barrier)
               : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}
// Arrives once every cp.async of this thread so far has landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
      "wait;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Fetches a map ahead of its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// `bytes` in a row, a multiple of 16 as both addresses are.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The tile of `map` that starts at (column, row), into shared memory; its bytes count towards the barrier.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int column, int row,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// A map of a 16-bit cache pool [blocks, 2, block_size, heads, head_dim] in tiles of one head of one block, 64
// elements wide; coordinates are (element, head, offset in the block, 2*block + (0: keys, 1: values)).
eb_status map_cache(const eb_context* context, CUtensorMapDataType type, const void* cache, int blocks,
                    int block_size, int heads, int head_dim, CUtensorMap* map);

// A map of a 16-bit row-major matrix [rows, columns] in tiles of `tile_rows` by 64, swizzled in 128 bytes;
// what lies outside reads as zeros.
eb_status map_rows(const eb_context* context, CUtensorMapDataType type, const void* matrix, int64_t rows,
                   int64_t columns, int tile_rows, CUtensorMap* map);

}  // namespace enginebay::cuda

#endif
