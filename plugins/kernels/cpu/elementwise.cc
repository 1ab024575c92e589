// AddRMSNorm and GatedActivation on the caller's threads.
#include <algorithm>

#include "cpu_features.h"
#include "elementwise_kernels.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr int64_t kWorthSharing = 8'192;  // elements; below, waking other threads takes longer than the work

eb_status kernels(const eb_context* context, const ElementwiseKernels** table) {
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  *table = features.isa >= Isa::kAvx512 ? &elementwise_kernels_avx512()
           : features.isa >= Isa::kAvx2 ? &elementwise_kernels_avx2()
                                        : &elementwise_kernels_baseline();
  return EB_OK;
}

eb_status check(const eb_context* context, const char* op, int32_t width, eb_dtype dtype, int64_t rows,
                bool missing) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (width < 1 || rows < 0) {
    return fail(context, EB_INVALID_ARGUMENT, "%s: %lld rows of %d elements", op,
                static_cast<long long>(rows), width);
  }
  if (missing && rows > 0) return fail(context, EB_INVALID_ARGUMENT, "%s: an input or output is null", op);
  if (dtype != EB_F32) {
    return fail(context, EB_UNSUPPORTED, "%s: rows are %s; the CPU library computes in float32", op,
                dtype_name(dtype));
  }
  return EB_OK;
}

template <class Body>
void for_rows(const eb_context* context, int64_t rows, int64_t width, const Body& body) {
  const int64_t each = std::max<int64_t>(1, kWorthSharing / width);
  parallel_for(context, static_cast<size_t>((rows + each - 1) / each), [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * each, last = std::min(first + each, rows);
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry points below

extern "C" eb_status eb_add_rms_norm_run(const eb_context* context, const eb_rms_norm_desc* desc,
                                         int64_t rows, const void* x, const void* residual,
                                         const float* weight, void* y, void* sum) {
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "AddRMSNorm: the descriptor is null");
  EB_RETURN_IF_ERROR(check(context, "AddRMSNorm", desc->width, desc->io_dtype, rows,
                           x == nullptr || weight == nullptr || y == nullptr));
  const ElementwiseKernels* table;
  EB_RETURN_IF_ERROR(kernels(context, &table));
  const auto at = [desc](const void* base, int64_t row) {
    return base == nullptr ? nullptr : static_cast<const float*>(base) + row * desc->width;
  };
  for_rows(context, rows, desc->width, [&](int64_t row) {
    table->add_rms_norm(desc->width, desc->epsilon, at(x, row), at(residual, row), weight,
                        const_cast<float*>(at(y, row)), const_cast<float*>(at(sum, row)));
  });
  return EB_OK;
}

extern "C" eb_status eb_gated_activation_run(const eb_context* context, const eb_gated_activation_desc* desc,
                                             int64_t rows, const void* gate_up, void* y) {
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "GatedActivation: the descriptor is null");
  EB_RETURN_IF_ERROR(check(context, "GatedActivation", desc->width, desc->io_dtype, rows,
                           gate_up == nullptr || y == nullptr));
  if (desc->activation < EB_SILU || desc->activation > EB_RELU2) {
    return fail(context, EB_UNSUPPORTED, "GatedActivation: activation %d; this library knows 0 to %d",
                static_cast<int>(desc->activation), static_cast<int>(EB_RELU2));
  }
  const ElementwiseKernels* table;
  EB_RETURN_IF_ERROR(kernels(context, &table));
  const int64_t width = desc->width;
  for_rows(context, rows, 2 * width, [&](int64_t row) {
    const float* gate = static_cast<const float*>(gate_up) + row * 2 * width;
    table->gated_activation(desc->activation, desc->width, gate, gate + width,
                            static_cast<float*>(y) + row * width);
  });
  return EB_OK;
}
