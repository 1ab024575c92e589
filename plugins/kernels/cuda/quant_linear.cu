// QuantLinear's ABI: validation, packing on the host, dispatch by weight format.
#include <cmath>
#include <cstring>

#include "int4.cuh"
#include "quant_linear.cuh"

namespace {

using namespace enginebay;
using namespace enginebay::cuda;

bool sixteen_bit(eb_dtype dtype) { return dtype == EB_F16 || dtype == EB_BF16; }

eb_status check(const eb_context* context, const eb_quant_linear_desc* desc) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: desc is NULL");
  const int k = desc->in_features, n = desc->out_features;
  if (k <= 0 || n <= 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinear: in_features %d and out_features %d must be positive", k, n);
  if (desc->symmetric != 0 && desc->symmetric != 1)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: symmetric is %d, not 0 or 1", desc->symmetric);
  if (!sixteen_bit(desc->io_dtype))
    return fail(context, EB_UNSUPPORTED, "QuantLinear on CUDA: io_dtype %s; it has float16 and bfloat16",
                dtype_name(desc->io_dtype));
  if (desc->format == EB_I4) {
    if (desc->block_size != 64 && desc->block_size != 128)
      return fail(context, EB_UNSUPPORTED, "QuantLinear on CUDA: int4 block_size %d; it has 64 and 128",
                  desc->block_size);
    if (k % desc->block_size != 0)
      return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: in_features %d is no multiple of block_size %d",
                  k, desc->block_size);
    return EB_OK;
  }
  if (desc->format == EB_F8E4M3 || desc->format == desc->io_dtype) {
    const bool whole_row = desc->format == EB_F8E4M3 && desc->block_size == k;
    if ((desc->block_size != 0 && !whole_row) || desc->symmetric != 1)
      return fail(context, EB_INVALID_ARGUMENT,
                  "QuantLinear: %s takes block_size 0 and symmetric 1, not %d and %d",
                  dtype_name(desc->format), desc->block_size, desc->symmetric);
    if (k % 16 != 0 || n % 16 != 0)
      return fail(
          context, EB_UNSUPPORTED,
          "QuantLinear on CUDA: %s needs in_features and out_features to be multiples of 16, not %d and %d",
          dtype_name(desc->format), k, n);
    return EB_OK;
  }
  return fail(
      context, EB_UNSUPPORTED,
      "QuantLinear on CUDA: format %s with io_dtype %s; it has int4, float8e4m3 and the io_dtype itself",
      dtype_name(desc->format), dtype_name(desc->io_dtype));
}

size_t packed_bytes(const eb_quant_linear_desc& desc) {
  const int64_t k = desc.in_features, n = desc.out_features;
  if (desc.format == EB_I4)
    return static_cast<size_t>(
        Int4Layout(desc.in_features, desc.out_features, desc.block_size, desc.symmetric).bytes);
  if (desc.format == EB_F8E4M3) return static_cast<size_t>(ceil_div<int64_t>(k * n, 256) * 256 + 4 * n);
  return static_cast<size_t>(2 * k * n);
}

eb_status check_packed(const eb_context* context, const eb_quant_linear_desc& desc, const void* packed,
                       size_t bytes) {
  if (packed == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: packed weights are NULL");
  if (reinterpret_cast<uintptr_t>(packed) % 16 != 0)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: packed weights at %p are not aligned to 16 bytes",
                packed);
  if (bytes != packed_bytes(desc))
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: %zu packed bytes where layout %s takes %zu",
                bytes, eb_quant_linear_layout(&desc), packed_bytes(desc));
  return EB_OK;
}

uint16_t encode(eb_dtype dtype, float v) {
  uint16_t code;
  if (dtype == EB_F16) {
    const half h = __float2half_rn(v);
    memcpy(&code, &h, 2);
  } else {
    const __nv_bfloat16 h = __float2bfloat16_rn(v);
    memcpy(&code, &h, 2);
  }
  return code;
}

float decode(eb_dtype dtype, uint16_t code) {
  if (dtype == EB_F16) {
    half h;
    memcpy(&h, &code, 2);
    return __half2float(h);
  }
  __nv_bfloat16 h;
  memcpy(&h, &code, 2);
  return __bfloat162float(h);
}

float decode_f8(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float sign = code & 0x80 ? -1.f : 1.f;
  if (exponent == 15 && mantissa == 7) return NAN;
  return exponent == 0 ? sign * std::ldexp(static_cast<float>(mantissa), -9)
                       : sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

// Where row r's scale of a block lies in the scales of its tile, in elements.
int scale_place(int r, bool symmetric) { return r % 8 * (symmetric ? 2 : 4) + r / 8; }

eb_status pack_int4(const eb_context* context, const eb_quant_linear_desc& desc,
                    const eb_quant_linear_weights& weights, uint8_t* packed) {
  const Int4Layout layout(desc.in_features, desc.out_features, desc.block_size, desc.symmetric);
  const bool symmetric = desc.symmetric != 0;
  memset(packed, 0, static_cast<size_t>(layout.bytes));
  const auto* values = static_cast<const uint8_t*>(weights.values);
  for (int n = 0; n < desc.out_features; ++n) {
    const int64_t tile_row = int64_t{n / 16} * layout.k_tiles;
    for (int k = 0; k < desc.in_features; ++k) {
      const uint32_t q = values[int64_t{n} * desc.in_features + k];
      if (q > 15)
        return fail(context, EB_INVALID_ARGUMENT,
                    "QuantLinear: int4 value %u at row %d, column %d is above 15", q, n, k);
      int word, shift;
      int4_place(n % 16, k % 64, &word, &shift);
      reinterpret_cast<uint32_t*>(packed)[(tile_row + k / 64) * 128 + word] |= q << shift;
    }
    for (int b = 0; b < layout.blocks; ++b) {
      auto* at = reinterpret_cast<uint16_t*>(packed + layout.value_bytes +
                                             (int64_t{n / 16} * layout.blocks + b) * layout.scale_bytes) +
                 scale_place(n % 16, symmetric);
      const float scale = weights.scales[int64_t{n} * layout.blocks + b];
      at[0] = encode(desc.io_dtype, scale);
      float centre = 0.f;
      if (!symmetric) {
        centre = weights.minimums[int64_t{n} * layout.blocks + b] + 8.f * scale;
        at[2] = encode(desc.io_dtype, centre);
      }
      if (!std::isfinite(decode(desc.io_dtype, at[0])) ||
          (!symmetric && !std::isfinite(decode(desc.io_dtype, at[2]))))
        return fail(context, EB_INVALID_ARGUMENT,
                    "QuantLinear: scale %g, centre %g of row %d, block %d are not finite in %s", scale,
                    centre, n, b, dtype_name(desc.io_dtype));
    }
  }
  return EB_OK;
}

eb_status check_run(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows, const void* x,
                    const void* y) {
  if (rows < 0 || rows > INT32_MAX)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: rows %lld; at least 0, below 2^31",
                static_cast<long long>(rows));
  if (rows > 0 && (x == nullptr || y == nullptr))
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: x %p, y %p; neither may be NULL", x, y);
  if (reinterpret_cast<uintptr_t>(x) % 16 != 0 || reinterpret_cast<uintptr_t>(y) % 16 != 0)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: x %p, y %p; both must be aligned to 16 bytes", x,
                y);
  (void)desc;
  return EB_OK;
}

size_t workspace_bytes(const eb_quant_linear_desc& desc, int64_t rows, int multiprocessors) {
  return desc.format == EB_I4 ? int4_workspace_bytes(desc, rows, multiprocessors)
                              : lt_workspace_bytes(desc, rows);
}

}  // namespace

extern "C" {

const char* eb_quant_linear_layout(const eb_quant_linear_desc* desc) {
  if (desc == nullptr) return "unknown";
  const bool f16 = desc->io_dtype == EB_F16;
  switch (desc->format) {
    case EB_I4:
      return f16 ? "cuda-i4-m16k64-f16-v1" : "cuda-i4-m16k64-bf16-v1";
    case EB_F8E4M3:
      return "cuda-f8e4m3-rowscale-v1";
    case EB_F16:
      return "cuda-f16-v1";
    case EB_BF16:
      return "cuda-bf16-v1";
    default:
      return "unknown";
  }
}

eb_status eb_quant_linear_packed_bytes(const eb_context* context, const eb_quant_linear_desc* desc,
                                       size_t* bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (bytes == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: bytes is NULL");
  *bytes = packed_bytes(*desc);
  return EB_OK;
}

eb_status eb_quant_linear_pack(const eb_context* context, const eb_quant_linear_desc* desc,
                               const eb_quant_linear_weights* weights, void* packed, size_t bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  EB_RETURN_IF_ERROR(check_packed(context, *desc, packed, bytes));
  if (weights == nullptr || weights->values == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: weights or their values are NULL");
  const bool scaled = desc->format == EB_I4 || desc->format == EB_F8E4M3;
  if (scaled && weights->scales == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: %s weights need scales",
                dtype_name(desc->format));
  if (desc->symmetric == 0 && weights->minimums == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: symmetric is 0 and minimums is NULL");
  auto* out = static_cast<uint8_t*>(packed);
  if (desc->format == EB_I4) return pack_int4(context, *desc, *weights, out);
  const size_t count = static_cast<size_t>(desc->in_features) * static_cast<size_t>(desc->out_features);
  if (desc->format != EB_F8E4M3) {
    memcpy(out, weights->values, 2 * count);
    return EB_OK;
  }
  const auto* codes = static_cast<const uint8_t*>(weights->values);
  for (size_t i = 0; i < count; ++i)
    if ((codes[i] & 0x7f) == 0x7f)
      return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: float8e4m3 value %zu is NaN", i);
  for (int n = 0; n < desc->out_features; ++n)
    if (!std::isfinite(weights->scales[n]) || weights->scales[n] <= 0.f)
      return fail(context, EB_INVALID_ARGUMENT,
                  "QuantLinear: scale %g of row %d; it must be positive and finite", weights->scales[n], n);
  memset(out, 0, bytes);
  memcpy(out, codes, count);
  memcpy(out + bytes - 4 * static_cast<size_t>(desc->out_features), weights->scales,
         4 * static_cast<size_t>(desc->out_features));
  return EB_OK;
}

eb_status eb_quant_linear_unpack(const eb_context* context, const eb_quant_linear_desc* desc,
                                 const void* packed, size_t bytes, float* weights) {
  EB_RETURN_IF_ERROR(check(context, desc));
  EB_RETURN_IF_ERROR(check_packed(context, *desc, packed, bytes));
  if (weights == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: weights is NULL");
  const auto* in = static_cast<const uint8_t*>(packed);
  const int64_t k_total = desc->in_features;
  const Int4Layout layout(desc->in_features, desc->out_features, max(desc->block_size, 1), desc->symmetric);
  for (int n = 0; n < desc->out_features; ++n)
    for (int k = 0; k < desc->in_features; ++k) {
      const int64_t i = n * k_total + k;
      if (desc->format == EB_I4) {
        int word, shift;
        int4_place(n % 16, k % 64, &word, &shift);
        const uint32_t v =
            reinterpret_cast<const uint32_t*>(in)[(int64_t{n / 16} * layout.k_tiles + k / 64) * 128 + word];
        const auto* s = reinterpret_cast<const uint16_t*>(
                            in + layout.value_bytes +
                            (int64_t{n / 16} * layout.blocks + k / desc->block_size) * layout.scale_bytes) +
                        scale_place(n % 16, desc->symmetric != 0);
        weights[i] = decode(desc->io_dtype, s[0]) * static_cast<float>(static_cast<int>(v >> shift & 15) - 8);
        if (desc->symmetric == 0) weights[i] += decode(desc->io_dtype, s[2]);
      } else if (desc->format == EB_F8E4M3) {
        float scale;
        memcpy(&scale, in + bytes - 4 * static_cast<size_t>(desc->out_features - n), 4);
        weights[i] = decode_f8(in[i]) * scale;
      } else {
        weights[i] = decode(desc->format, reinterpret_cast<const uint16_t*>(in)[i]);
      }
    }
  return EB_OK;
}

eb_status eb_quant_linear_workspace_size(const eb_context* context, const eb_quant_linear_desc* desc,
                                         int64_t rows, size_t* bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (bytes == nullptr || rows < 0)
    return fail(context, EB_INVALID_ARGUMENT, "QuantLinear: workspace_bytes %p, rows %lld",
                static_cast<void*>(bytes), static_cast<long long>(rows));
  // Without a device to ask, as many multiprocessors as any has.
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    (void)cudaGetLastError();
    multiprocessors = 256;
  }
  *bytes = workspace_bytes(*desc, rows, multiprocessors);
  return EB_OK;
}

eb_status eb_quant_linear_run(const eb_context* context, const eb_quant_linear_desc* desc, int64_t rows,
                              const void* x, const void* packed, size_t bytes, const float* bias, void* y,
                              void* workspace, size_t given) {
  EB_RETURN_IF_ERROR(check(context, desc));
  EB_RETURN_IF_ERROR(check_packed(context, *desc, packed, bytes));
  EB_RETURN_IF_ERROR(check_run(context, *desc, rows, x, y));
  if (rows == 0) return EB_OK;
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  const size_t needed = workspace_bytes(*desc, rows, device.multiprocessors);
  if (given < needed ||
      (needed > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)))
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantLinear: workspace %p of %zu bytes; it takes %zu, aligned to 256 bytes", workspace,
                given, needed);
  return desc->format == EB_I4 ? int4_run(context, device, *desc, rows, x, packed, bias, y, workspace)
                               : lt_run(context, device, *desc, rows, x, packed, bias, y, workspace);
}

eb_status eb_embedding_run(const eb_context* context, const eb_quant_linear_desc* desc, int64_t rows,
                           const int32_t* ids, const void* packed, size_t bytes, void* y) {
  EB_RETURN_IF_ERROR(check(context, desc));
  EB_RETURN_IF_ERROR(check_packed(context, *desc, packed, bytes));
  EB_RETURN_IF_ERROR(check_run(context, *desc, rows, ids, y));
  if (rows == 0) return EB_OK;
  return desc->format == EB_I4 ? int4_embedding(context, *desc, rows, ids, packed, y)
                               : lt_embedding(context, *desc, rows, ids, packed, y);
}

}  // extern "C"
