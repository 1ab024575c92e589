// AddRMSNorm and GatedActivation: one row in, one row out, fp32 inside.
#include "activation.cuh"
#include "device.cuh"
#include "enginebay/elementwise.h"

namespace enginebay::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
constexpr int kPer = 16 / static_cast<int>(sizeof(T));

template <typename T>
__device__ __forceinline__ void load16(const T* p, float (&v)[kPer<T>]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  T t[kPer<T>];
  memcpy(t, &raw, 16);
#pragma unroll
  for (int i = 0; i < kPer<T>; ++i) v[i] = to_float(t[i]);
}

template <typename T>
__device__ __forceinline__ void store16(T* p, const float (&v)[kPer<T>]) {
  T t[kPer<T>];
#pragma unroll
  for (int i = 0; i < kPer<T>; ++i) t[i] = from_float<T>(v[i]);
  uint4 raw;
  memcpy(&raw, t, 16);
  *reinterpret_cast<uint4*>(p) = raw;
}

// A row a block. The sum is rounded to T before it is normalised, so that y is the norm of the sum that is
// stored.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_rms_norm(const T* x, const T* residual, const float* weight, T* y, T* sum, int width, float epsilon) {
  extern __shared__ float row[];
  let_next_start();
  wait_for_previous();
  const int64_t at = int64_t{blockIdx.x} * width;
  float square = 0.f;
  for (int i = threadIdx.x * kPer<T>; i < width; i += kThreads * kPer<T>) {
    float v[kPer<T>], r[kPer<T>];
    load16(x + at + i, v);
    if (residual != nullptr) {
      load16(residual + at + i, r);
#pragma unroll
      for (int j = 0; j < kPer<T>; ++j) v[j] = to_float(from_float<T>(v[j] + r[j]));
    }
    if (sum != nullptr) store16(sum + at + i, v);
#pragma unroll
    for (int j = 0; j < kPer<T>; ++j) {
      row[i + j] = v[j];
      square = fmaf(v[j], v[j], square);
    }
  }
  __shared__ float warps[kThreads / 32];
  for (int o = 16; o > 0; o /= 2) square += __shfl_xor_sync(~0u, square, o);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = square;
  __syncthreads();
  square = 0.f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) square += warps[w];
  const float factor = rsqrtf(square / width + epsilon);
  for (int i = threadIdx.x * kPer<T>; i < width; i += kThreads * kPer<T>) {
    float v[kPer<T>];
#pragma unroll
    for (int j = 0; j < kPer<T>; ++j) v[j] = row[i + j] * factor * weight[i + j];
    store16(y + at + i, v);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gated_activation(const T* gate_up, T* y, int64_t rows, int width, eb_activation activation) {
  let_next_start();
  wait_for_previous();
  const int64_t pieces = int64_t{width} / kPer<T>;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * pieces;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / pieces, column = i % pieces * kPer<T>;
    float gate[kPer<T>], up[kPer<T>];
    load16(gate_up + row * 2 * width + column, gate);
    load16(gate_up + row * 2 * width + width + column, up);
#pragma unroll
    for (int j = 0; j < kPer<T>; ++j) gate[j] = activate(activation, gate[j]) * up[j];
    store16(y + row * width + column, gate);
  }
}

eb_status check(const eb_context* context, const char* op, int width, eb_dtype dtype, int64_t rows) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (dtype != EB_F32 && dtype != EB_F16 && dtype != EB_BF16)
    return fail(context, EB_UNSUPPORTED, "%s: io_dtype %s; it has float32, float16 and bfloat16", op,
                dtype_name(dtype));
  const int per = dtype == EB_F32 ? 4 : 8;
  if (width <= 0 || width % per != 0)
    return fail(context, width <= 0 ? EB_INVALID_ARGUMENT : EB_UNSUPPORTED,
                "%s on CUDA: width %d; a positive multiple of %d for %s", op, width, per, dtype_name(dtype));
  if (rows < 0 || rows > INT32_MAX)
    return fail(context, EB_INVALID_ARGUMENT, "%s: rows %lld; at least 0, below 2^31", op,
                static_cast<long long>(rows));
  return EB_OK;
}

eb_status check_pointer(const eb_context* context, const char* op, const char* name, const void* p,
                        bool optional) {
  if (p == nullptr && !optional) return fail(context, EB_INVALID_ARGUMENT, "%s: %s is NULL", op, name);
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0)
    return fail(context, EB_INVALID_ARGUMENT, "%s: %s at %p is not aligned to 16 bytes", op, name, p);
  return EB_OK;
}

template <typename T>
eb_status run_norm(const eb_context* context, const Device& device, const eb_rms_norm_desc& d, int64_t rows,
                   const void* x, const void* residual, const float* weight, void* y, void* sum) {
  const size_t shared = size_t{4} * static_cast<size_t>(d.width);
  if (shared > static_cast<size_t>(device.shared_bytes))
    return fail(context, EB_UNSUPPORTED, "AddRMSNorm on CUDA: width %d is above %d", d.width,
                device.shared_bytes / 4);
  EB_RETURN_IF_CUDA(context,
                    cudaFuncSetAttribute(add_rms_norm<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)));
  EB_RETURN_IF_CUDA(
      context, launch(device, stream_of(context), dim3(static_cast<unsigned>(rows)), dim3(kThreads), shared,
                      1, add_rms_norm<T>, static_cast<const T*>(x), static_cast<const T*>(residual), weight,
                      static_cast<T*>(y), static_cast<T*>(sum), d.width, d.epsilon));
  return EB_OK;
}

template <typename T>
eb_status run_gate(const eb_context* context, const Device& device, const eb_gated_activation_desc& d,
                   int64_t rows, const void* gate_up, void* y) {
  const int64_t pieces = rows * (d.width / kPer<T>);
  const auto blocks =
      static_cast<unsigned>(min(ceil_div<int64_t>(pieces, kThreads), int64_t{device.multiprocessors} * 16));
  EB_RETURN_IF_CUDA(
      context, launch(device, stream_of(context), dim3(blocks), dim3(kThreads), 0, 1, gated_activation<T>,
                      static_cast<const T*>(gate_up), static_cast<T*>(y), rows, d.width, d.activation));
  return EB_OK;
}

}  // namespace
}  // namespace enginebay::cuda

extern "C" {

using namespace enginebay;
using namespace enginebay::cuda;

eb_status eb_add_rms_norm_run(const eb_context* context, const eb_rms_norm_desc* desc, int64_t rows,
                              const void* x, const void* residual, const float* weight, void* y, void* sum) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "AddRMSNorm: desc is NULL");
  EB_RETURN_IF_ERROR(check(context, "AddRMSNorm", desc->width, desc->io_dtype, rows));
  if (rows == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "AddRMSNorm", "x", x, false));
  EB_RETURN_IF_ERROR(check_pointer(context, "AddRMSNorm", "residual", residual, true));
  EB_RETURN_IF_ERROR(check_pointer(context, "AddRMSNorm", "weight", weight, false));
  EB_RETURN_IF_ERROR(check_pointer(context, "AddRMSNorm", "y", y, false));
  EB_RETURN_IF_ERROR(check_pointer(context, "AddRMSNorm", "sum", sum, true));
  if (y == sum) return fail(context, EB_INVALID_ARGUMENT, "AddRMSNorm: y and sum are the same buffer %p", y);
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  switch (desc->io_dtype) {
    case EB_F32:
      return run_norm<float>(context, device, *desc, rows, x, residual, weight, y, sum);
    case EB_F16:
      return run_norm<half>(context, device, *desc, rows, x, residual, weight, y, sum);
    default:
      return run_norm<__nv_bfloat16>(context, device, *desc, rows, x, residual, weight, y, sum);
  }
}

eb_status eb_gated_activation_run(const eb_context* context, const eb_gated_activation_desc* desc,
                                  int64_t rows, const void* gate_up, void* y) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "GatedActivation: desc is NULL");
  EB_RETURN_IF_ERROR(check(context, "GatedActivation", desc->width, desc->io_dtype, rows));
  if (desc->activation < EB_SILU || desc->activation > EB_RELU2)
    return fail(context, EB_INVALID_ARGUMENT, "GatedActivation: unknown activation %d",
                static_cast<int>(desc->activation));
  if (rows == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "GatedActivation", "gate_up", gate_up, false));
  EB_RETURN_IF_ERROR(check_pointer(context, "GatedActivation", "y", y, false));
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  switch (desc->io_dtype) {
    case EB_F32:
      return run_gate<float>(context, device, *desc, rows, gate_up, y);
    case EB_F16:
      return run_gate<half>(context, device, *desc, rows, gate_up, y);
    default:
      return run_gate<__nv_bfloat16>(context, device, *desc, rows, gate_up, y);
  }
}

}  // extern "C"
