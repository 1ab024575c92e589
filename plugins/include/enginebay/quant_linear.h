/* QuantLinear: y = x.W^T + bias over packed weights (plugins/ops.py).
 *
 * Packing is a property of the device: eb_quant_linear_pack turns plain weights into this library's layout,
 * documented beside the kernel, and eb_quant_linear_layout names it with a version for the manifest.
 *
 * A row of y depends on its row of x and the weights alone, bit for bit: not on the other rows, their number
 * or the threads. NaN or infinity in a row of x stays in that row of y: all of it is NaN for integer formats,
 * what IEEE arithmetic makes of it for the others.
 *
 * The CPU library multiplies integer formats by rows of x quantised to int8 in the weights' blocks (at most
 * 128 wide), keeps scales as fp16 times a power of two per output feature (fp16 scales are reproduced
 * exactly), takes block sizes that are multiples of 32 and divide K, and computes in fp32 (io_dtype EB_F32).
 * Its kernels are one file per ISA (baseline, AVX2, AVX-512, VNNI, AMX) over one layout. CPUID says which can
 * run; among those of integer formats a measurement decides. Packed weights and the workspace start at a
 * multiple of 16 bytes; 64 is faster. */
#ifndef ENGINEBAY_QUANT_LINEAR_H
#define ENGINEBAY_QUANT_LINEAR_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct eb_quant_linear_desc {
  int32_t in_features, out_features; /* K, N */
  eb_dtype format;                   /* of the weights: EB_F32, EB_F16, EB_BF16, EB_I8, EB_I4, EB_F8E4M3 */
  int32_t block_size;                /* along K; 0 for f32, f16, bf16 */
  int32_t symmetric;                 /* 0: a minimum beside each scale */
  eb_dtype io_dtype;                 /* of x and y */
} eb_quant_linear_desc;

/* Quantised weights before packing. Float formats use `values` alone, in their own dtype.
 *   values    [N, K]: f32, f16, bf16: that dtype; EB_F8E4M3: its bits; EB_I8: int8; EB_I4: 0..15, one a byte
 *   scales    [N, K/block] fp32: w = scale*(q - 8) for symmetric I4, scale*q for I8 and F8E4M3
 *   minimums  [N, K/block] fp32: w = scale*q + minimum where symmetric is 0 */
typedef struct eb_quant_linear_weights {
  const void* values;
  const float* scales;
  const float* minimums;
} eb_quant_linear_weights;

/* Name and version of the packed layout, static storage; NULL where the descriptor is not valid. */
EB_API const char* eb_quant_linear_layout(const eb_quant_linear_desc* desc);
EB_API eb_status eb_quant_linear_packed_bytes(const eb_context* context, const eb_quant_linear_desc* desc,
                                              size_t* bytes);
EB_API eb_status eb_quant_linear_pack(const eb_context* context, const eb_quant_linear_desc* desc,
                                      const eb_quant_linear_weights* weights, void* packed, size_t bytes);
/* fp32 [N, K] out of packed weights: what the kernel multiplies by, for tests and reports. */
EB_API eb_status eb_quant_linear_unpack(const eb_context* context, const eb_quant_linear_desc* desc,
                                        const void* packed, size_t bytes, float* weights);
EB_API eb_status eb_quant_linear_workspace_size(const eb_context* context, const eb_quant_linear_desc* desc,
                                                int64_t rows, size_t* workspace_bytes);
EB_API eb_status eb_quant_linear_run(const eb_context* context, const eb_quant_linear_desc* desc,
                                     int64_t rows, const void* x, const void* packed, size_t packed_bytes,
                                     const float* bias, void* y, void* workspace, size_t workspace_bytes);
/* Which kernels products of this integer format run on here, in words, static storage: "amx for 16 rows,
 * ...". EB_UNSUPPORTED for other formats. The CPU library chooses at the first product of a format. */
EB_API eb_status eb_quant_linear_kernels(const eb_context* context, const eb_quant_linear_desc* desc,
                                         const char** text);
/* y[i] = W[ids[i]], [rows, K], what eb_quant_linear_unpack gives; an id outside [0, N) is an invalid
 * argument. */
EB_API eb_status eb_embedding_run(const eb_context* context, const eb_quant_linear_desc* desc, int64_t rows,
                                  const int32_t* ids, const void* packed, size_t packed_bytes, void* y);

#ifdef __cplusplus
}
#endif
#endif
