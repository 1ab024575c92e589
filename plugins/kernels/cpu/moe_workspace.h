// The descriptor's consequences and the workspace of MoE.
#ifndef ENGINEBAY_MOE_WORKSPACE_H
#define ENGINEBAY_MOE_WORKSPACE_H

#include "enginebay/moe.h"
#include "quant_linear_layout.h"

namespace enginebay {

constexpr int64_t kUnitRows = 64;     // of one expert, multiplied at a time
constexpr int64_t kMostSlots = 8192;  // (token, expert) pairs of a run

inline eb_quant_linear_desc linear_desc(const eb_moe_desc& desc, int32_t in, int32_t out) {
  const bool scaled = desc.format == EB_I8 || desc.format == EB_I4 || desc.format == EB_F8E4M3;
  const bool by_row = desc.block_size == 0 && scaled;
  return {in, out, desc.format, by_row ? in : desc.block_size, desc.symmetric, desc.io_dtype};
}

// What follows from the descriptor alone.
struct MoeShape {
  QuantLinearLayout gate_up, down;
  size_t gate_up_stride, down_stride;
  bool sliced;  // gate and up begin on panels, so that their columns can be cut
};

// Validates the context and the descriptor.
eb_status check_moe(const eb_context* context, const eb_moe_desc* desc, MoeShape* shape);

// Rows [begin, begin + rows) of the sorted pairs, all of one expert.
struct MoeUnit {
  int32_t expert, rows;
  int64_t begin;
};

// Where everything lies in the workspace, in bytes; `lanes` pieces of scratch, one for each thread.
struct MoeWorkspace {
  int64_t run_tokens, slots, lanes;
  size_t prepared_bytes, scratch_bytes;  // of a lane; scratch includes prepared
  size_t experts, weights, token_of, slot_of, starts, units, inner, out, busy, scratch, total;
};

eb_status make_moe_workspace(const eb_context* context, const eb_moe_desc& desc, int64_t tokens,
                             MoeWorkspace* workspace);

}  // namespace enginebay
#endif
