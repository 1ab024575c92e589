#include "moe_workspace.h"

#include <algorithm>
#include <atomic>

#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr size_t kStride = 256;  // experts' weights begin at multiples of it

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// Bytes that a product of up to `rows` rows prepares them in, on one thread.
eb_status prepared_bytes(const eb_context* context, const eb_quant_linear_desc& desc, int64_t rows,
                         size_t* bytes) {
  eb_context alone = *context;
  alone.parallel_for = nullptr;
  alone.threads = 1;
  *bytes = 0;
  for (int64_t count = 1; count <= rows; ++count) {
    size_t needed;
    EB_RETURN_IF_ERROR(eb_quant_linear_workspace_size(&alone, &desc, count, &needed));
    *bytes = std::max(*bytes, round_up(needed, kAlignment));
  }
  return EB_OK;
}

}  // namespace

eb_status check_moe(const eb_context* context, const eb_moe_desc* desc, MoeShape* shape) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "MoE: the descriptor is NULL");
  if (desc->num_experts < 1 || desc->top_k < 1 || desc->top_k > desc->num_experts) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: top_k %d of %d experts", desc->top_k, desc->num_experts);
  }
  if (desc->hidden < 1 || desc->intermediate < 1 || desc->intermediate > INT32_MAX / 2) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: hidden %d and intermediate %d must be positive",
                desc->hidden, desc->intermediate);
  }
  if (desc->num_groups > 1) {
    if (desc->num_experts % desc->num_groups != 0) {
      return fail(context, EB_INVALID_ARGUMENT, "MoE: num_groups %d does not divide num_experts %d",
                  desc->num_groups, desc->num_experts);
    }
    const int64_t reach = int64_t{desc->top_groups} * (desc->num_experts / desc->num_groups);
    if (desc->top_groups < 1 || desc->top_groups > desc->num_groups || reach < desc->top_k) {
      return fail(context, EB_INVALID_ARGUMENT, "MoE: top_k %d experts from %d of %d groups of %d",
                  desc->top_k, desc->top_groups, desc->num_groups, desc->num_experts / desc->num_groups);
    }
  }
  if (desc->scoring < EB_SCORE_SOFTMAX || desc->scoring > EB_SCORE_SOFTMAX_TOPK ||
      desc->activation < EB_SILU || desc->activation > EB_RELU2) {
    return fail(context, EB_UNSUPPORTED, "MoE: scoring %d or activation %d is unknown to this library",
                static_cast<int>(desc->scoring), static_cast<int>(desc->activation));
  }
  if (!(desc->clamp >= 0.0f) || (desc->clamp > 0.0f && !(desc->clamp_alpha > 0.0f))) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: clamp %g with clamp_alpha %g", desc->clamp,
                desc->clamp_alpha);
  }
  const auto gate_up = linear_desc(*desc, desc->hidden, 2 * desc->intermediate);
  const auto down = linear_desc(*desc, desc->intermediate, desc->hidden);
  EB_RETURN_IF_ERROR(make_layout(context, &gate_up, &shape->gate_up));
  EB_RETURN_IF_ERROR(make_layout(context, &down, &shape->down));
  shape->gate_up_stride = round_up(packed_bytes(shape->gate_up), kStride);
  shape->down_stride = round_up(packed_bytes(shape->down), kStride);
  shape->sliced = desc->intermediate % kPanel == 0;
  return EB_OK;
}

eb_status make_moe_workspace(const eb_context* context, const eb_moe_desc& desc, int64_t tokens,
                             MoeWorkspace* workspace) {
  MoeWorkspace room{};
  room.run_tokens = std::min(tokens, std::max<int64_t>(1, kMostSlots / desc.top_k));
  room.slots = room.run_tokens * desc.top_k;
  room.lanes = thread_count(context);
  const int64_t rows = std::min(kUnitRows, room.run_tokens);
  size_t gate_up, down;
  EB_RETURN_IF_ERROR(
      prepared_bytes(context, linear_desc(desc, desc.hidden, 2 * desc.intermediate), rows, &gate_up));
  EB_RETURN_IF_ERROR(prepared_bytes(context, linear_desc(desc, desc.intermediate, desc.hidden), rows, &down));
  room.prepared_bytes = std::max(gate_up, down);
  const int64_t of_product = rows * (int64_t{desc.hidden} + 2 * int64_t{desc.intermediate});
  const int64_t floats = std::max(of_product, 3 * int64_t{desc.num_experts});
  room.scratch_bytes =
      room.prepared_bytes + round_up(static_cast<size_t>(floats) * sizeof(float), kAlignment);
  const auto take = [&room](int64_t count, size_t size) {
    const size_t at = room.total;
    room.total += round_up(static_cast<size_t>(count) * size, kAlignment);
    return at;
  };
  const int64_t most_units = room.slots / kUnitRows + std::min<int64_t>(desc.num_experts, room.slots);
  room.experts = take(room.slots, sizeof(int32_t));
  room.weights = take(room.slots, sizeof(float));
  room.token_of = take(room.slots, sizeof(int32_t));
  room.slot_of = take(room.slots, sizeof(int32_t));
  room.starts = take(int64_t{desc.num_experts} + 1, sizeof(int64_t));
  room.units = take(most_units, sizeof(MoeUnit));
  room.inner = take(room.slots * desc.intermediate, sizeof(float));
  room.out = take(room.slots * desc.hidden, sizeof(float));
  room.busy = take(room.lanes, sizeof(std::atomic<int32_t>));
  room.scratch = take(room.lanes, room.scratch_bytes);
  *workspace = room;
  return EB_OK;
}

}  // namespace enginebay
