// wgmma (sm_90a): d[64xN] += a[64x16] . b[16xN], with a in registers or in shared memory and b in shared
// memory.
#ifndef ENGINEBAY_CUDA_WGMMA_CUH
#define ENGINEBAY_CUDA_WGMMA_CUH

#include "device.cuh"

namespace enginebay::cuda {

// Descriptors of tiles whose rows are 128 bytes, swizzled in atoms of 8 rows; tiles start at multiples of
// 1024. K-major: rows are of M or N; sixteen 16-bit columns further along a row is the descriptor plus 2.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  return uint64_t{(address & 0x3ffff) >> 4} | (uint64_t{1} << 16) | (uint64_t{64} << 32) |
         (uint64_t{1} << 62);
}
// MN-major: rows are of K and hold 64 of N; the next 64 of N lie `block_bytes` further. Sixteen rows are the
// descriptor plus 128.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn(uint32_t address, uint32_t block_bytes) {
  return uint64_t{(address & 0x3ffff) >> 4} | (uint64_t{block_bytes >> 4} << 16) | (uint64_t{64} << 32) |
         (uint64_t{1} << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}
// Ordinary writes to shared memory become visible to wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// Keeps the compiler from moving an accumulator across an asynchronous wgmma.
template <int Count>
__device__ __forceinline__ void wgmma_touch(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define EB_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// a in registers; TransposedB: b is MN-major.
template <typename T, int N, bool TransposedB = false>
struct WgmmaRegisterA;
// a and b in shared memory, both K-major; d starts from zero where `keep` is 0.
template <typename T, int N>
struct WgmmaSharedA;

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 8, false> { \
    static __device__ __forceinline__ void run(float (&d)[4], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." NAME "." NAME " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n" \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 16, false> { \
    static __device__ __forceinline__ void run(float (&d)[8], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;\n" \
                   : EB_F8(d, 0) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 32, false> { \
    static __device__ __forceinline__ void run(float (&d)[16], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 64, false> { \
    static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 64, true> { \
    static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 128, false> { \
    static __device__ __forceinline__ void run(float (&d)[64], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24), EB_F8(d, 32), EB_F8(d, 40), EB_F8(d, 48), EB_F8(d, 56) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 128, true> { \
    static __device__ __forceinline__ void run(float (&d)[64], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24), EB_F8(d, 32), EB_F8(d, 40), EB_F8(d, 48), EB_F8(d, 56) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaRegisterA<TYPE, 256, false> { \
    static __device__ __forceinline__ void run(float (&d)[128], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24), EB_F8(d, 32), EB_F8(d, 40), EB_F8(d, 48), EB_F8(d, 56), EB_F8(d, 64), EB_F8(d, 72), EB_F8(d, 80), EB_F8(d, 88), EB_F8(d, 96), EB_F8(d, 104), EB_F8(d, 112), EB_F8(d, 120) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#define EB_WGMMA(TYPE, NAME) \
  template <> \
  struct WgmmaSharedA<TYPE, 128> { \
    static __device__ __forceinline__ void run(float (&d)[64], uint64_t a, uint64_t b, int keep) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}\n" \
                   : EB_F8(d, 0), EB_F8(d, 8), EB_F8(d, 16), EB_F8(d, 24), EB_F8(d, 32), EB_F8(d, 40), EB_F8(d, 48), EB_F8(d, 56) \
                   : "l"(a), "l"(b), "r"(keep)); \
    } \
  };
EB_WGMMA(half, "f16")
EB_WGMMA(__nv_bfloat16, "bf16")
#undef EB_WGMMA

#undef EB_F8
// clang-format on

}  // namespace enginebay::cuda

#endif
