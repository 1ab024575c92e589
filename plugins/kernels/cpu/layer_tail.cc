// LayerTail: the other ops' entry points in a row, over intermediate rows that never leave the workspace.
#include "enginebay/layer_tail.h"

#include <algorithm>

#include "quant_linear_layout.h"
#include "status.h"
#include "team.h"

namespace enginebay {
namespace {

constexpr int64_t kRowsAtOnce = 256;    // enough for products to be bound by arithmetic
constexpr int64_t kBoundByMemory = 32;  // rows up to which products wait for their weights

struct Room {
  size_t normed, wide, gated, scratch, bytes;  // offsets, and the whole
  size_t scratch_bytes;
};

eb_status check(const eb_context* context, const eb_layer_tail_desc* desc) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (desc == nullptr) return fail(context, EB_INVALID_ARGUMENT, "LayerTail: the descriptor is null");
  const eb_quant_linear_desc *out = desc->products, *gate_up = out + 1, *down = out + 2, *next = out + 3;
  for (int i = 0; i < EB_TAIL_PRODUCTS; ++i) {
    QuantLinearLayout layout{};
    EB_RETURN_IF_ERROR(make_layout(context, out + i, &layout));
  }
  const int32_t hidden = out->out_features;
  if (gate_up->in_features != hidden || down->out_features != hidden || next->in_features != hidden) {
    return fail(context, EB_INVALID_ARGUMENT,
                "LayerTail: out gives rows of %d, but gate_up takes %d, down gives %d and next takes %d",
                hidden, gate_up->in_features, down->out_features, next->in_features);
  }
  if (gate_up->out_features != 2 * static_cast<int64_t>(down->in_features)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "LayerTail: gate_up gives rows of %d, expected twice the %d that down takes",
                gate_up->out_features, down->in_features);
  }
  return EB_OK;
}

eb_status make_room(const eb_context* context, const eb_layer_tail_desc& desc, int64_t rows, Room* room) {
  for (const eb_quant_linear_desc& product : desc.products) {
    QuantLinearLayout layout{};
    EB_RETURN_IF_ERROR(make_layout(context, &product, &layout));
    EB_RETURN_IF_ERROR(check_rows(context, layout, rows));
  }
  rows = std::min(rows, kRowsAtOnce);
  const auto bytes = [rows](int32_t width) {
    return align_up(static_cast<size_t>(rows * width) * sizeof(float));
  };
  *room = Room{};
  room->wide = room->normed + bytes(desc.products[EB_TAIL_OUT].out_features);
  room->gated = room->wide + bytes(desc.products[EB_TAIL_GATE_UP].out_features);
  room->scratch = room->gated + bytes(desc.products[EB_TAIL_DOWN].in_features);
  for (const eb_quant_linear_desc& product : desc.products) {
    size_t needed;
    EB_RETURN_IF_ERROR(eb_quant_linear_workspace_size(context, &product, rows, &needed));
    room->scratch_bytes = std::max(room->scratch_bytes, needed);
  }
  room->bytes = room->scratch + room->scratch_bytes;
  return EB_OK;
}

// `rows` rows from `first` on.
eb_status run_rows(const eb_context* context, Team* team, const eb_layer_tail_desc& desc,
                   const eb_layer_tail_args& args, const Room& room, uint8_t* memory, int64_t first,
                   int64_t rows) {
  const int32_t hidden = desc.products[EB_TAIL_OUT].out_features;
  const auto at = [first](const void* base, int32_t width) {
    return const_cast<float*>(static_cast<const float*>(base)) + first * width;
  };
  const auto product = [&](eb_layer_tail_product which, const float* x, float* y) {
    return eb_quant_linear_run(context, &desc.products[which], rows, x, args.weights[which],
                               args.weight_bytes[which], args.biases[which], y, memory + room.scratch,
                               room.scratch_bytes);
  };
  float* const normed = reinterpret_cast<float*>(memory + room.normed);
  float* const wide = reinterpret_cast<float*>(memory + room.wide);
  float* const gated = reinterpret_cast<float*>(memory + room.gated);
  float* const sum = at(args.sum, hidden);
  const eb_rms_norm_desc mlp_norm{hidden, desc.mlp_epsilon, EB_F32},
      next_norm{hidden, desc.next_epsilon, EB_F32};
  const eb_gated_activation_desc activation{desc.products[EB_TAIL_DOWN].in_features, desc.activation, EB_F32};
  const auto expect = [&](eb_layer_tail_product which) {
    if (team != nullptr && rows <= kBoundByMemory)
      team->expect(args.weights[which], args.weight_bytes[which]);
  };
  expect(EB_TAIL_OUT);
  EB_RETURN_IF_ERROR(product(EB_TAIL_OUT, at(args.x, desc.products[EB_TAIL_OUT].in_features), normed));
  expect(EB_TAIL_GATE_UP);
  EB_RETURN_IF_ERROR(eb_add_rms_norm_run(context, &mlp_norm, rows, normed, at(args.residual, hidden),
                                         args.mlp_norm, normed, sum));
  EB_RETURN_IF_ERROR(product(EB_TAIL_GATE_UP, normed, wide));
  expect(EB_TAIL_DOWN);
  EB_RETURN_IF_ERROR(eb_gated_activation_run(context, &activation, rows, wide, gated));
  EB_RETURN_IF_ERROR(product(EB_TAIL_DOWN, gated, normed));
  expect(EB_TAIL_NEXT);
  EB_RETURN_IF_ERROR(
      eb_add_rms_norm_run(context, &next_norm, rows, normed, sum, args.next_norm, normed, sum));
  return product(EB_TAIL_NEXT, normed, at(args.y, desc.products[EB_TAIL_NEXT].out_features));
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry points below

extern "C" eb_status eb_layer_tail_workspace_size(const eb_context* context, const eb_layer_tail_desc* desc,
                                                  int64_t rows, size_t* workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (workspace_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT, "LayerTail: `workspace_bytes` is NULL");
  }
  Room room;
  EB_RETURN_IF_ERROR(make_room(context, *desc, rows, &room));
  *workspace_bytes = room.bytes;
  return EB_OK;
}

extern "C" eb_status eb_layer_tail_run(const eb_context* context, const eb_layer_tail_desc* desc,
                                       const eb_layer_tail_args* args, void* workspace,
                                       size_t workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "LayerTail: the arguments are null");
  Room room;
  EB_RETURN_IF_ERROR(make_room(context, *desc, args->rows, &room));
  if (args->rows == 0) return EB_OK;
  for (const void* pointer : {args->x, args->residual, static_cast<const void*>(args->mlp_norm),
                              static_cast<const void*>(args->next_norm), static_cast<const void*>(args->y),
                              static_cast<const void*>(args->sum)}) {
    EB_RETURN_IF_ERROR(check_pointer(context, "an input or output", pointer, alignof(float)));
  }
  EB_RETURN_IF_ERROR(check_pointer(context, "workspace", workspace, kPointerAlignment));
  if (workspace_bytes < room.bytes) {
    return fail(
        context, EB_INVALID_ARGUMENT,
        "LayerTail: the workspace has %zu bytes, but this call needs %zu; ask workspace_size with the same "
        "rows",
        workspace_bytes, room.bytes);
  }
  eb_status status = EB_OK;
  Team::run(context, [&](const eb_context* shared, Team* team) {
    for (int64_t first = 0; first < args->rows && status == EB_OK; first += kRowsAtOnce) {
      status = run_rows(shared, team, *desc, *args, room, static_cast<uint8_t*>(workspace), first,
                        std::min(kRowsAtOnce, args->rows - first));
    }
  });
  return status;
}
