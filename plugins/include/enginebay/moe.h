/* MoE: routing, permutation, grouped gated MLP and combine (plugins/ops.py).
 *
 *   scores   = scoring(router_logits)                                        fp32
 *   chosen   = top_k of scores + correction_bias, inside the best top_groups of num_groups groups
 *   weight_e = scores_e, divided by their sum over the chosen where renormalize is 1, times routed_scale
 *   y        = sum over chosen e of weight_e * (activation(gate) * up) . down_e^T + down_bias_e
 *   [gate, up] = x . gate_up_e^T + gate_up_bias_e       (gate is the first half of the rows)
 *
 * The correction bias chooses experts and never enters their weights. Equal scores: the lower expert first. A
 * group's rank is the sum of its two best biased scores where there is a bias, its best score otherwise. A
 * router row with a NaN makes that token's output NaN and no other's. An expert may get no token or all of
 * them.
 *
 * Experts' weights are packed by eb_quant_linear_pack, one expert after another, each at a multiple of
 * eb_moe_expert_stride bytes: gate_up with K = hidden, N = 2*intermediate; down with K = intermediate, N =
 * hidden. */
#ifndef ENGINEBAY_MOE_H
#define ENGINEBAY_MOE_H

#include "abi.h"
#include "elementwise.h"
#include "quant_linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum eb_moe_scoring {
  EB_SCORE_SOFTMAX = 0,     /* softmax over all experts, then top-k */
  EB_SCORE_SIGMOID = 1,     /* sigmoid of each logit, then top-k */
  EB_SCORE_SOFTMAX_TOPK = 2 /* top-k of the logits, then softmax over the chosen */
} eb_moe_scoring;

typedef struct eb_moe_desc {
  int32_t num_experts, top_k;
  int32_t hidden, intermediate;
  eb_moe_scoring scoring;
  int32_t renormalize;            /* 0 or 1 */
  int32_t num_groups, top_groups; /* 0, 0 or 1, 1: no groups; num_groups divides num_experts */
  float routed_scale;             /* 1: none */
  eb_activation activation;
  eb_dtype format;               /* of the experts' weights, as in eb_quant_linear_desc */
  int32_t block_size, symmetric; /* block_size 0 of an integer format: a whole row of either matrix */
  eb_dtype io_dtype;             /* of x and y */
  float clamp;                   /* 0: none; else gate is at most clamp, up within -clamp..clamp, and */
  float clamp_alpha; /* (up + 1) * gate * sigmoid(clamp_alpha * gate) replaces activation(gate) * up */
} eb_moe_desc;

typedef struct eb_moe_args {
  int64_t tokens;               /* T; may be 0 */
  const void* x;                /* [T, hidden] */
  const float* router_logits;   /* [T, num_experts] */
  const float* correction_bias; /* [num_experts] or NULL */
  const void* gate_up;          /* packed, num_experts * stride bytes */
  const void* down;             /* packed */
  const float* gate_up_bias;    /* [num_experts, 2*intermediate] or NULL */
  const float* down_bias;       /* [num_experts, hidden] or NULL */
  void* y;                      /* [T, hidden] */
} eb_moe_args;

/* Bytes from one expert's packed weights to the next: packed_bytes rounded up to 256. */
EB_API eb_status eb_moe_expert_stride(const eb_context* context, const eb_moe_desc* desc,
                                      size_t* gate_up_bytes, size_t* down_bytes);
EB_API eb_status eb_moe_workspace_size(const eb_context* context, const eb_moe_desc* desc, int64_t tokens,
                                       size_t* workspace_bytes);
EB_API eb_status eb_moe_run(const eb_context* context, const eb_moe_desc* desc, const eb_moe_args* args,
                            void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
