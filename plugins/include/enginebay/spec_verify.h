/* SpecVerify and Sample: choose tokens from logits so that the target's distribution is kept
 * (plugins/ops.py).
 *
 * Every sequence owns the rows row_start[b] .. row_start[b+1]-1 of the logits: row 0 of them is the root (the
 * row of the last committed token), the others are draft nodes. parents[r] is the node's parent as an index
 * inside the sequence, smaller than its own; NULL parents mean a chain. Sample is the case of one row a
 * sequence.
 *
 * p is softmax(logits/temperature) after top-k, then top-p on what is left, then min-p, each keeping whole
 * prefixes of the order (logit falling, id rising) and at least one token. temperature 0 is greedy: the best
 * logit, the lowest id among equals. At a node the children are tried in row order: child x, drawn from q
 * (its row of draft_probs; without draft_probs one-hot), is accepted with probability min(1, p(x)/q(x)); a
 * refusal replaces p by (p-q)+ renormalised. When no child is left the next token is drawn from that p, so
 * its distribution is p whatever the drafts were (Leviathan et al. 2023; Miao et al. 2024 for trees).
 *
 * Random numbers are Philox4x32-10 of (seed, position, row, token): a sequence's choices are its own whatever
 * it is batched with, and a CPU and a CUDA library draw the same numbers. */
#ifndef ENGINEBAY_SPEC_VERIFY_H
#define ENGINEBAY_SPEC_VERIFY_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct eb_spec_verify_desc {
  int32_t vocab;     /* V */
  int32_t max_depth; /* D: the longest accepted path a sequence may have; 0 for Sample */
  eb_dtype dtype;    /* of the logits: EB_F32, EB_F16, EB_BF16 */
} eb_spec_verify_desc;

typedef struct eb_spec_verify_args {
  int64_t sequences;           /* B */
  int64_t rows;                /* R */
  void* logits;                /* [R, V]; penalties are applied in place */
  const int32_t* row_start;    /* [B+1]; NULL: row b is sequence b's only one (Sample) */
  const int32_t* draft_tokens; /* [R], the root's entry is not read; NULL only where row_start is */
  const int32_t* parents;      /* [R] or NULL: chains */
  const float* draft_probs;    /* [R, V] or NULL: one-hot drafts; the root's row is not read */
  const float* temperature;    /* [B]; 0 is greedy; NULL: all greedy */
  const int32_t* top_k;        /* [B] or NULL; below 1: all */
  const float* top_p;          /* [B] or NULL; 0 keeps the best token, 1 and above keeps all */
  const float* min_p;          /* [B] or NULL; part of the best token's probability */
  const uint64_t* seeds;       /* [B] or NULL: 0 */
  const int64_t* positions;    /* [B] or NULL: 0; the number of tokens committed before this step */
  /* Penalties of row r are the entries penalty_start[r] .. penalty_start[r+1]-1, each token once; NULL: none.
   */
  const int32_t* penalty_start;  /* [R+1] */
  const int32_t* penalty_tokens; /* ids seen in the prompt, the output or on the path to the row */
  const int32_t* penalty_counts; /* how often in output and path; 0: in the prompt only */
  const float* repetition;       /* [B], 1: none: logit > 0 is divided by it, else multiplied */
  const float* presence;         /* [B], 0: none: subtracted where the count is above 0 */
  const float* frequency;        /* [B], 0: none: subtracted times the count */
  int32_t* accepted;             /* [B] how many drafts were accepted; may be NULL for Sample */
  int32_t* path;                 /* [B, D] accepted rows inside the sequence, -1 after them; may be NULL */
  int32_t* next_token;           /* [B]; -1 where the row has no finite logit or is NaN */
} eb_spec_verify_args;

EB_API eb_status eb_spec_verify_workspace_size(const eb_context* context, const eb_spec_verify_desc* desc,
                                               int64_t sequences, int64_t rows, size_t* workspace_bytes);
EB_API eb_status eb_spec_verify_run(const eb_context* context, const eb_spec_verify_desc* desc,
                                    const eb_spec_verify_args* args, void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
