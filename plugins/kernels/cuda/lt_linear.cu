// QuantLinear through cuBLASLt: FP8 weights with a scale a row against activations quantised a row at a time,
// and 16-bit weights. The library is found when first used, so that this one loads where there is none.
#include <cublasLt.h>
#include <cuda_fp8.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>

#include "quant_linear.cuh"

namespace enginebay::cuda {
namespace {

constexpr size_t kLtWorkspace = size_t{32} << 20;

// Up to here cuBLASLt's FP8 products with a scale a row are far slower than plain ones, and scaling their
// fp32 answer costs little (benchmarks/RESULTS.md).
constexpr int64_t kScaleAfterRows = 192;
bool scales_after(const eb_quant_linear_desc& d, int64_t rows) {
  return d.format == EB_F8E4M3 && rows <= kScaleAfterRows;
}

struct Lt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  const char* missing;  // NULL: all there
};

const Lt& lt() {
  static const Lt loaded = [] {
    Lt table{};
    void* handle = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      table.missing = "libcublasLt.so.13";
      return table;
    }
    const auto find = [&](auto& entry, const char* name) {
      entry = reinterpret_cast<std::decay_t<decltype(entry)>>(dlsym(handle, name));
      if (entry == nullptr) table.missing = name;
    };
    find(table.create, "cublasLtCreate");
    find(table.matmul, "cublasLtMatmul");
    find(table.desc_create, "cublasLtMatmulDescCreate");
    find(table.desc_destroy, "cublasLtMatmulDescDestroy");
    find(table.desc_set, "cublasLtMatmulDescSetAttribute");
    find(table.layout_create, "cublasLtMatrixLayoutCreate");
    find(table.layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(table.preference_create, "cublasLtMatmulPreferenceCreate");
    find(table.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(table.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(table.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    return table;
  }();
  return loaded;
}

#define EB_RETURN_IF_LT(context, expression)                                       \
  do {                                                                             \
    const cublasStatus_t eb_lt_status = (expression);                              \
    if (eb_lt_status != CUBLAS_STATUS_SUCCESS)                                     \
      return fail(context, EB_DEVICE_ERROR, "%s: cuBLASLt status %d", #expression, \
                  static_cast<int>(eb_lt_status));                                 \
  } while (0)

// A product with the algorithm cuBLASLt proposes for its shape. Built once and kept for the life of the
// process.
struct Product {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  Product() = default;
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() {
    if (desc != nullptr) lt().desc_destroy(desc);
    for (const auto layout : {w, x, y})
      if (layout != nullptr) lt().layout_destroy(layout);
  }
};

eb_status prepare(const eb_context* context, const eb_quant_linear_desc& d, int64_t rows,
                  cublasLtHandle_t handle, Product* product) {
  const bool f8 = d.format == EB_F8E4M3;
  const cudaDataType_t io = d.io_dtype == EB_F16 ? CUDA_R_16F : CUDA_R_16BF, in = f8 ? CUDA_R_8F_E4M3 : io;
  const auto k = static_cast<uint64_t>(d.in_features), n = static_cast<uint64_t>(d.out_features);
  const auto m = static_cast<uint64_t>(rows);
  product->handle = handle;
  // Column-major: y^T[n, m] = (w^T[k, n])^T . x^T[k, m].
  EB_RETURN_IF_LT(context, lt().desc_create(&product->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  EB_RETURN_IF_LT(context,
                  lt().desc_set(product->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  const bool outer_scales = f8 && !scales_after(d, rows);
  if (outer_scales) {
    const cublasLtMatmulMatrixScale_t outer = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const void* placeholder =
        reinterpret_cast<const void*>(uintptr_t{256});  // the heuristic asks for alignment only
    EB_RETURN_IF_LT(context,
                    lt().desc_set(product->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &outer, sizeof outer));
    EB_RETURN_IF_LT(context,
                    lt().desc_set(product->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &outer, sizeof outer));
    EB_RETURN_IF_LT(context, lt().desc_set(product->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &placeholder,
                                           sizeof placeholder));
    EB_RETURN_IF_LT(context, lt().desc_set(product->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &placeholder,
                                           sizeof placeholder));
  }
  EB_RETURN_IF_LT(context, lt().layout_create(&product->w, in, k, n, d.in_features));
  EB_RETURN_IF_LT(context, lt().layout_create(&product->x, in, k, m, d.in_features));
  EB_RETURN_IF_LT(
      context, lt().layout_create(&product->y, f8 && !outer_scales ? CUDA_R_32F : io, n, m, d.out_features));
  cublasLtMatmulPreference_t preference = nullptr;
  EB_RETURN_IF_LT(context, lt().preference_create(&preference));
  const size_t limit = kLtWorkspace;
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  cublasStatus_t status =
      lt().preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = lt().heuristic(handle, product->desc, product->w, product->x, product->y, product->y, preference,
                            1, &result, &found);
  lt().preference_destroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    return fail(context, EB_UNSUPPORTED,
                "QuantLinear: cuBLASLt has no %s product of %lld x %d x %d on this device (status %d)",
                dtype_name(d.format), static_cast<long long>(rows), d.out_features, d.in_features,
                static_cast<int>(status));
  product->algorithm = result.algo;
  return EB_OK;
}

// One thread at a time uses a Product, because its descriptor carries the scale pointers of the call.
struct Products {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;
  std::map<std::tuple<int, int, int, int, int, int64_t>, Product> products;
};

Products& products() {
  static Products* const all =
      new Products;  // never destroyed: the CUDA runtime may be gone before it would be
  return *all;
}

// x [rows, k] to E4M3 with a scale a row: amax/448, and 1 for a row of zeros. A NaN in a row stays a NaN.
template <typename T>
__global__ void quantise_rows(const T* x, int k, __nv_fp8_e4m3* q, float* scales) {
  let_next_start();
  wait_for_previous();
  const T* const row = x + int64_t{blockIdx.x} * k;
  float amax = 0.f;
  bool bad = false;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 raw = *reinterpret_cast<const uint4*>(row + i);
    T v[8];
    memcpy(v, &raw, 16);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float f = to_float(v[j]);
      bad |= isnan(f);
      amax = fmaxf(amax, fabsf(f));
    }
  }
  __shared__ float warp_amax[32];
  bad = __syncthreads_or(bad);
  for (int o = 16; o > 0; o /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, o));
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = 0.f;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) amax = fmaxf(amax, warp_amax[w]);
  const float scale = amax > 0.f ? amax / 448.f : 1.f;
  if (threadIdx.x == 0) scales[blockIdx.x] = bad ? __int_as_float(0x7fc00000) : scale;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 raw = *reinterpret_cast<const uint4*>(row + i);
    T v[8];
    memcpy(v, &raw, 16);
    __nv_fp8_e4m3 out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = __nv_fp8_e4m3(to_float(v[j]) / scale);  // saturates at 448
    memcpy(q + int64_t{blockIdx.x} * k + i, out, 8);
  }
}

// y = sums * (row's scale) * (column's scale) + bias, four columns a thread.
template <typename T>
__global__ void __launch_bounds__(256)
    scale_sums(const float* sums, const float* row_scales, const float* column_scales, const float* bias,
               int n, T* y) {
  let_next_start();
  wait_for_previous();
  const int column = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (column >= n) return;  // n is a multiple of 16
  const int64_t at = int64_t{blockIdx.y} * n + column;
  const float4 sum = *reinterpret_cast<const float4*>(sums + at);
  const float4 scale = *reinterpret_cast<const float4*>(column_scales + column);
  const float row = row_scales[blockIdx.y];
  float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
  if (bias != nullptr) b = make_float4(bias[column], bias[column + 1], bias[column + 2], bias[column + 3]);
  typename Half16<T>::Pair out[2] = {
      Half16<T>::pair(fmaf(sum.x * row, scale.x, b.x), fmaf(sum.y * row, scale.y, b.y)),
      Half16<T>::pair(fmaf(sum.z * row, scale.z, b.z), fmaf(sum.w * row, scale.w, b.w))};
  *reinterpret_cast<uint2*>(y + at) = make_uint2(bits(out[0]), bits(out[1]));
}

template <typename T>
__global__ void add_bias(T* y, int64_t count, int n, const float* bias) {
  let_next_start();
  wait_for_previous();
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    y[i] = from_float<T>(to_float(y[i]) + bias[i % n]);
}

template <typename T>
__global__ void embed(const uint8_t* packed, bool f8, int n, int k, const float* scales, const int32_t* ids,
                      T* y) {
  let_next_start();
  wait_for_previous();
  const int id = ids[blockIdx.x];
  const bool known = id >= 0 && id < n;
  for (int c = threadIdx.x; c < k; c += blockDim.x) {
    float w = __int_as_float(0x7fc00000);
    if (known && f8)
      w = float(reinterpret_cast<const __nv_fp8_e4m3*>(packed)[int64_t{id} * k + c]) * scales[id];
    if (known && !f8) w = to_float(reinterpret_cast<const T*>(packed)[int64_t{id} * k + c]);
    y[int64_t{blockIdx.x} * k + c] = from_float<T>(w);
  }
}

const float* f8_scales(const eb_quant_linear_desc& d, const void* packed) {
  const int64_t values = ceil_div<int64_t>(int64_t{d.in_features} * d.out_features, 256) * 256;
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(packed) + values);
}

struct Scratch {
  size_t values, scales, sums, total;  // quantised x, its scales, unscaled y, and cuBLASLt's own
};

Scratch scratch(const eb_quant_linear_desc& d, int64_t rows) {
  const bool f8 = d.format == EB_F8E4M3;
  const size_t values = f8 ? ceil_div<size_t>(size_t(rows) * d.in_features, 256) * 256 : 0;
  const size_t scales = f8 ? ceil_div<size_t>(size_t(rows) * 4, 256) * 256 : 0;
  const size_t sums =
      scales_after(d, rows) ? ceil_div<size_t>(size_t(rows) * size_t(d.out_features) * 4, 256) * 256 : 0;
  return {values, scales, sums, values + scales + sums + kLtWorkspace};
}

template <typename T>
eb_status run(const eb_context* context, const Device& device, const eb_quant_linear_desc& d, int64_t rows,
              const void* x, const void* packed, const float* bias, void* y, uint8_t* workspace) {
  const bool f8 = d.format == EB_F8E4M3;
  const cudaStream_t stream = stream_of(context);
  const Scratch s = scratch(d, rows);
  float* const x_scales = reinterpret_cast<float*>(workspace + s.values);
  const bool after = scales_after(d, rows);
  float* const sums = reinterpret_cast<float*>(workspace + s.values + s.scales);
  void* const product_out = after ? static_cast<void*>(sums) : y;
  if (f8) {
    // A row in one round of the block where it fits.
    const auto threads = static_cast<unsigned>(min(1024, max(128, ceil_div(d.in_features, 256) * 32)));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(static_cast<unsigned>(rows)), dim3(threads), 0, 1,
                                      quantise_rows<T>, static_cast<const T*>(x), d.in_features,
                                      reinterpret_cast<__nv_fp8_e4m3*>(workspace), x_scales));
    x = workspace;
  }
  {
    Products& all = products();
    const std::lock_guard<std::mutex> lock(all.mutex);
    cublasLtHandle_t& handle = all.handles[device.ordinal];
    if (handle == nullptr) EB_RETURN_IF_LT(context, lt().create(&handle));
    const std::tuple key{device.ordinal, int(d.format), int(d.io_dtype), d.in_features, d.out_features, rows};
    Product& product = all.products[key];
    if (product.handle == nullptr) {
      const eb_status status = prepare(context, d, rows, handle, &product);
      if (status != EB_OK) {
        all.products.erase(key);
        return status;
      }
    }
    if (f8 && !after) {
      const void *w_scale = f8_scales(d, packed), *x_scale = x_scales;
      EB_RETURN_IF_LT(context, lt().desc_set(product.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w_scale,
                                             sizeof w_scale));
      EB_RETURN_IF_LT(context, lt().desc_set(product.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x_scale,
                                             sizeof x_scale));
    }
    const float one = 1.f, zero = 0.f;
    EB_RETURN_IF_LT(context, lt().matmul(handle, product.desc, &one, packed, product.w, x, product.x, &zero,
                                         product_out, product.y, product_out, product.y, &product.algorithm,
                                         workspace + s.values + s.scales + s.sums, kLtWorkspace, stream));
  }
  if (after) {
    const auto pieces = static_cast<unsigned>(ceil_div(d.out_features, 4 * 256));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(pieces, static_cast<unsigned>(rows)), dim3(256), 0,
                                      1, scale_sums<T>, sums, x_scales, f8_scales(d, packed), bias,
                                      d.out_features, static_cast<T*>(y)));
    return EB_OK;
  }
  if (bias != nullptr) {
    const int64_t count = rows * d.out_features;
    const auto blocks =
        static_cast<unsigned>(min(ceil_div<int64_t>(count, 256), int64_t{device.multiprocessors} * 8));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(blocks), dim3(256), 0, 1, add_bias<T>,
                                      static_cast<T*>(y), count, d.out_features, bias));
  }
  return EB_OK;
}

}  // namespace

const char* lt_missing() { return lt().missing; }

size_t lt_workspace_bytes(const eb_quant_linear_desc& desc, int64_t rows) {
  return scratch(desc, rows).total;
}

eb_status lt_run(const eb_context* context, const Device& device, const eb_quant_linear_desc& desc,
                 int64_t rows, const void* x, const void* packed, const float* bias, void* y,
                 void* workspace) {
  if (lt().missing != nullptr)
    return fail(context, EB_UNSUPPORTED, "QuantLinear: %s weights need cuBLASLt 13 and %s was not found",
                dtype_name(desc.format), lt().missing);
  if (desc.format == EB_F8E4M3 && device.capability < 89)
    return fail(context, EB_UNSUPPORTED, "QuantLinear: float8e4m3 needs sm_89 or newer; this device is sm_%d",
                device.capability);
  auto* const scratch_bytes = static_cast<uint8_t*>(workspace);
  return desc.io_dtype == EB_F16
             ? run<half>(context, device, desc, rows, x, packed, bias, y, scratch_bytes)
             : run<__nv_bfloat16>(context, device, desc, rows, x, packed, bias, y, scratch_bytes);
}

eb_status lt_embedding(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows,
                       const int32_t* ids, const void* packed, void* y) {
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  const bool f8 = desc.format == EB_F8E4M3;
  const auto* bytes = static_cast<const uint8_t*>(packed);
  const float* scales = f8 ? f8_scales(desc, packed) : nullptr;
  const dim3 grid(static_cast<unsigned>(rows));
  EB_RETURN_IF_CUDA(
      context,
      desc.io_dtype == EB_F16
          ? launch(device, stream_of(context), grid, dim3(256), 0, 1, embed<half>, bytes, f8,
                   desc.out_features, desc.in_features, scales, ids, static_cast<half*>(y))
          : launch(device, stream_of(context), grid, dim3(256), 0, 1, embed<__nv_bfloat16>, bytes, f8,
                   desc.out_features, desc.in_features, scales, ids, static_cast<__nv_bfloat16*>(y)));
  return EB_OK;
}

}  // namespace enginebay::cuda
