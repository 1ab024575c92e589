// What quant_linear.cu dispatches to, by weight format.
#ifndef ENGINEBAY_CUDA_QUANT_LINEAR_CUH
#define ENGINEBAY_CUDA_QUANT_LINEAR_CUH

#include "device.cuh"
#include "enginebay/quant_linear.h"

namespace enginebay::cuda {

// INT4 (int4_linear.cu). `x` [rows, K] and `y` [rows, N] have desc.io_dtype.
size_t int4_workspace_bytes(const eb_quant_linear_desc& desc, int64_t rows, int multiprocessors);
eb_status int4_run(const eb_context* context, const Device& device, const eb_quant_linear_desc& desc,
                   int64_t rows, const void* x, const void* packed, const float* bias, void* y,
                   void* workspace);
eb_status int4_embedding(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows,
                         const int32_t* ids, const void* packed, void* y);

// FP8 weights with a scale a row, times x quantised a row at a time; and 16-bit weights (lt_linear.cu).
const char* lt_missing();  // what of cuBLASLt was not found; NULL: nothing
size_t lt_workspace_bytes(const eb_quant_linear_desc& desc, int64_t rows);
eb_status lt_run(const eb_context* context, const Device& device, const eb_quant_linear_desc& desc,
                 int64_t rows, const void* x, const void* packed, const float* bias, void* y,
                 void* workspace);
eb_status lt_embedding(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows,
                       const int32_t* ids, const void* packed, void* y);

}  // namespace enginebay::cuda

#endif
