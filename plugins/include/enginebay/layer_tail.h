/* LayerTail (plugins/ops.py): what a decoder layer does after attention, and the next layer's first product.
 *
 *   a = residual + x.Wout^T        h = norm(a, mlp_norm)      m = act(gate).up of h.Wgate_up^T
 *   sum = a + m.Wdown^T            y = norm(sum, next_norm).Wnext^T
 *
 * The same arithmetic as QuantLinear, AddRMSNorm and GatedActivation one after another, bit for bit, in one
 * call: a runtime spends some microseconds on a node, which is more than most of these take for one row. */
#ifndef ENGINEBAY_LAYER_TAIL_H
#define ENGINEBAY_LAYER_TAIL_H

#include "elementwise.h"
#include "quant_linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum eb_layer_tail_product {
  EB_TAIL_OUT,
  EB_TAIL_GATE_UP,
  EB_TAIL_DOWN,
  EB_TAIL_NEXT
} eb_layer_tail_product;
#define EB_TAIL_PRODUCTS 4

typedef struct eb_layer_tail_desc {
  eb_quant_linear_desc products[EB_TAIL_PRODUCTS]; /* [A, H], [H, 2*I], [I, H], [H, N] (in, out), fp32 rows */
  eb_activation activation;
  float mlp_epsilon, next_epsilon;
} eb_layer_tail_desc;

typedef struct eb_layer_tail_args {
  int64_t rows;
  const void *x, *residual;              /* [rows, A], [rows, H] */
  const void* weights[EB_TAIL_PRODUCTS]; /* packed; biases NULL where there are none */
  size_t weight_bytes[EB_TAIL_PRODUCTS];
  const float* biases[EB_TAIL_PRODUCTS];
  const float *mlp_norm, *next_norm; /* [H] */
  void *y, *sum;                     /* [rows, N], [rows, H]; neither x nor residual */
} eb_layer_tail_args;

/* Many rows are taken some hundred at a time, so the workspace stops growing. */
EB_API eb_status eb_layer_tail_workspace_size(const eb_context* context, const eb_layer_tail_desc* desc,
                                              int64_t rows, size_t* workspace_bytes);
EB_API eb_status eb_layer_tail_run(const eb_context* context, const eb_layer_tail_desc* desc,
                                   const eb_layer_tail_args* args, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
