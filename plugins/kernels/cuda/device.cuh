// What every CUDA kernel file shares: error returns, 16-bit types, PTX that has no intrinsic.
#ifndef ENGINEBAY_CUDA_DEVICE_CUH
#define ENGINEBAY_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "enginebay/abi.h"
#include "status.h"

#define EB_RETURN_IF_CUDA(context, expression)                                \
  do {                                                                        \
    const cudaError_t eb_cuda_error = (expression);                           \
    if (eb_cuda_error != cudaSuccess)                                         \
      return enginebay::fail(context, EB_DEVICE_ERROR, "%s: %s", #expression, \
                             cudaGetErrorString(eb_cuda_error));              \
  } while (0)

namespace enginebay::cuda {

struct Device {
  int ordinal, multiprocessors, capability;  // capability: 90 is 9.0
  int shared_bytes;                          // a block may ask for
};

// The current device's properties; EB_UNSUPPORTED, naming both, where the library holds no code for it.
eb_status current_device(const eb_context* context, Device* device);

inline cudaStream_t stream_of(const eb_context* context) {
  return static_cast<cudaStream_t>(context->stream);
}

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Float conversions and the pair type of half and __nv_bfloat16.
template <typename T>
struct Half16;
template <>
struct Half16<half> {
  using Pair = half2;
  static __device__ Pair pair(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ float2 floats(Pair p) { return __half22float2(p); }
  static __host__ __device__ half from(float v) { return __float2half_rn(v); }
};
template <>
struct Half16<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static __device__ Pair pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ float2 floats(Pair p) { return __bfloat1622float2(p); }
  static __host__ __device__ __nv_bfloat16 from(float v) { return __float2bfloat16_rn(v); }
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same_v<T, float>)
    return v;
  else
    return Half16<T>::from(v);
}

template <typename T>
__device__ __forceinline__ uint32_t bits(const T& v) {
  static_assert(sizeof(T) == 4);
  uint32_t b;
  memcpy(&b, &v, 4);
  return b;
}

// 2^v to two units in the last place; -inf gives 0, results below 2^-126 too.
__device__ __forceinline__ float fast_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory without a register; `bytes` 0 fills with zeros.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same for a stream through memory: the second-level cache fetches 256 bytes at a time.
__device__ __forceinline__ void copy_async16_stream(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Read once, by one warp: past the first-level cache.
__device__ __forceinline__ uint4 load_stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Programmatic dependent launch: the next kernel of the stream may start; this one waits for the one before.
// What that one wrote is never read by __ldg or any other ld.nc: the compiler may move those above the wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void load_matrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrix4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// d[16x8] += a[16x16] . b[16x8], fp32 sums.
template <typename T>
__device__ __forceinline__ void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Launches with programmatic stream serialisation, so that a kernel's prologue overlaps its predecessor's
// tail, and as clusters where `cluster` is above 1. Devices before 9.0 get a plain launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const Device& device, cudaStream_t stream, dim3 grid, dim3 block, size_t shared,
                   int cluster, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (device.capability >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    if (cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
      attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
      ++count;
    }
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace enginebay::cuda

#endif
