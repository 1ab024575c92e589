/* AddRMSNorm and GatedActivation (plugins/ops.py): one row in, one row out. */
#ifndef ENGINEBAY_ELEMENTWISE_H
#define ENGINEBAY_ELEMENTWISE_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct eb_rms_norm_desc {
  int32_t width; /* H */
  float epsilon; /* added to the mean of squares */
  eb_dtype io_dtype;
} eb_rms_norm_desc;

/* sum = x + residual; y = sum / sqrt(mean(sum^2) + epsilon) * weight, rows of [rows, width].
 * Without a residual (NULL), x is normalised and sum, where given, is a copy of it.
 * y or sum may be x or residual themselves, but not each other. */
EB_API eb_status eb_add_rms_norm_run(const eb_context* context, const eb_rms_norm_desc* desc, int64_t rows,
                                     const void* x, const void* residual, const float* weight, void* y,
                                     void* sum);

typedef enum eb_activation {
  EB_SILU = 0,
  EB_GELU = 1, /* exact: 0.5*x*(1 + erf(x/sqrt(2))) */
  EB_GELU_TANH = 2,
  EB_RELU = 3,
  EB_RELU2 = 4
} eb_activation;

typedef struct eb_gated_activation_desc {
  int32_t width; /* I; a row of gate_up has twice as many elements */
  eb_activation activation;
  eb_dtype io_dtype;
} eb_gated_activation_desc;

/* y = activation(gate) * up, gate_up [rows, 2*width], y [rows, width]. */
EB_API eb_status eb_gated_activation_run(const eb_context* context, const eb_gated_activation_desc* desc,
                                         int64_t rows, const void* gate_up, void* y);

#ifdef __cplusplus
}
#endif
#endif
