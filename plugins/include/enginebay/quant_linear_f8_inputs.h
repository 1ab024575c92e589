/* QuantLinearF8Inputs: QuantLinear over rows of x rounded to FP8 E4M3 (plugins/ops.py).
 *
 * x becomes scale*q, q the nearest E4M3 number (ties to even) to x/scale, at most 448 in magnitude: what lies
 * beyond saturates. `input_scale` 0 takes scale = amax/448 of each row, so that nothing saturates and a row
 * of y depends on its row of x alone; a positive `input_scale` is one scale for all rows. A row whose amax is
 * below 2^-100 counts as zero where its scale is its own. A row of x that holds NaN or infinity gives a row
 * of NaN. Weights keep their packed layout; the CPU library multiplies them as fp32 numbers, in fp32.
 *
 * `repeated` [repeats] names inputs, each below in_features - repeats, that are multiplied twice: row t of x
 * [rows, in_features - repeats] is followed by what rounding left of x[t, repeated[r]], rounded itself with a
 * sixteenth of the scale. A GEMM of FP8 units takes that factor from the scales of the weights, which hold a
 * column for each repeated input behind the others. NULL and 0: none. */
#ifndef ENGINEBAY_QUANT_LINEAR_F8_INPUTS_H
#define ENGINEBAY_QUANT_LINEAR_F8_INPUTS_H

#include "quant_linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* EB_INVALID_ARGUMENT unless the scale is 0, or at least 2^-100 and finite. */
EB_API eb_status eb_quant_linear_f8_inputs_check(const eb_context* context, float input_scale);
/* For calls with as many threads as this context has. */
EB_API eb_status eb_quant_linear_f8_inputs_workspace_size(const eb_context* context,
                                                          const eb_quant_linear_desc* desc, int64_t rows,
                                                          size_t* workspace_bytes);
/* `desc->in_features` counts what is repeated. EB_INVALID_ARGUMENT for an index outside x. */
EB_API eb_status eb_quant_linear_f8_inputs_run(const eb_context* context, const eb_quant_linear_desc* desc,
                                               int64_t rows, const void* x, float input_scale,
                                               const int32_t* repeated, int64_t repeats, const void* packed,
                                               size_t packed_bytes, const float* bias, void* y,
                                               void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
