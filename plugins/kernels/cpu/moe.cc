// MoE: checks, routing, and grouped products over the tokens of each expert.
//
// Tokens are handled in runs of at most kMostSlots (token, expert) pairs. The pairs of a run are sorted by
// expert; each expert's pairs are cut into units of at most kUnitRows rows, and the product of a unit into
// column slices, so that threads share the work however the router spread it. A slice of whole panels of
// packed weights is itself a packed matrix. No sum depends on the cut.
#include "enginebay/moe.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu_features.h"
#include "elementwise_kernels.h"
#include "moe_route.h"
#include "moe_workspace.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kRouteAtOnce = 16;
constexpr int64_t kCombineAtOnce = 32768;  // products

// One call on a run of tokens.
class Run {
 public:
  Run(const eb_context* context, const eb_moe_desc& desc, const MoeShape& shape, const MoeWorkspace& room,
      uint8_t* memory, const ElementwiseKernels& elementwise, const eb_moe_args& args)
      : context_(context),
        desc_(desc),
        shape_(shape),
        room_(room),
        memory_(memory),
        elementwise_(elementwise),
        args_(args) {}

  eb_status operator()(int64_t first, int64_t tokens) {
    first_ = first;
    for (int64_t lane = 0; lane < room_.lanes; ++lane) new (busy() + lane) std::atomic<int32_t>(0);
    route(tokens);
    const int64_t units = sort(tokens);
    products(units, shape_.sliced ? desc_.intermediate / kPanel : 1,
             [this](const MoeUnit& unit, int64_t panel, int64_t panels, uint8_t* scratch) {
               return gate_up(unit, panel, panels, scratch);
             });
    products(units, shape_.down.panels,
             [this](const MoeUnit& unit, int64_t panel, int64_t panels, uint8_t* scratch) {
               return down(unit, panel, panels, scratch);
             });
    if (failure_.load() != EB_OK) {
      return fail(context_, static_cast<eb_status>(failure_.load()), "MoE: a product of an expert failed");
    }
    combine(tokens);
    return EB_OK;
  }

 private:
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  std::atomic<int32_t>* busy() const { return at<std::atomic<int32_t>>(room_.busy); }

  // Runs body(scratch) with a piece of memory no other thread has: at most `lanes` threads are in here.
  template <class Body>
  void with_scratch(const Body& body) const {
    for (int64_t lane = 0;; lane = (lane + 1) % room_.lanes) {
      if (busy()[lane].exchange(1, std::memory_order_acquire) != 0) continue;
      body(memory_ + room_.scratch + static_cast<size_t>(lane) * room_.scratch_bytes);
      busy()[lane].store(0, std::memory_order_release);
      return;
    }
  }

  void route(int64_t tokens) const {
    const size_t tasks = static_cast<size_t>((tokens + kRouteAtOnce - 1) / kRouteAtOnce);
    parallel_for(context_, tasks, [&](size_t task) {
      with_scratch([&](uint8_t* scratch) {
        const int64_t begin = static_cast<int64_t>(task) * kRouteAtOnce;
        for (int64_t t = begin; t < std::min(begin + kRouteAtOnce, tokens); ++t) {
          route_token(desc_, args_.router_logits + (first_ + t) * desc_.num_experts, args_.correction_bias,
                      reinterpret_cast<float*>(scratch), at<int32_t>(room_.experts) + t * desc_.top_k,
                      at<float>(room_.weights) + t * desc_.top_k);
        }
      });
    });
  }

  // Sorts the pairs by expert, tokens in order, and cuts them into units; how many.
  int64_t sort(int64_t tokens) const {
    const int64_t pairs = tokens * desc_.top_k;
    const int32_t* experts = at<int32_t>(room_.experts);
    int64_t* starts = at<int64_t>(room_.starts);
    std::fill_n(starts, desc_.num_experts + 1, int64_t{0});
    for (int64_t pair = 0; pair < pairs; ++pair) ++starts[experts[pair] + 1];
    MoeUnit* unit = at<MoeUnit>(room_.units);
    for (int32_t e = 0; e < desc_.num_experts; ++e) {
      const int64_t count = starts[e + 1];
      starts[e + 1] += starts[e];
      for (int64_t row = 0; row < count; row += kUnitRows) {
        *unit++ = {e, static_cast<int32_t>(std::min(kUnitRows, count - row)), starts[e] + row};
      }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t slot = starts[experts[pair]]++;
      at<int32_t>(room_.token_of)[slot] = static_cast<int32_t>(pair / desc_.top_k);
      at<int32_t>(room_.slot_of)[pair] = static_cast<int32_t>(slot);
    }
    return unit - at<MoeUnit>(room_.units);
  }

  // Calls body(unit, first panel, panels, scratch) over all units and slices of `panels` panels.
  template <class Body>
  void products(int64_t units, int64_t panels, const Body& body) {
    const int64_t wanted = thread_count(context_) > 1 ? thread_count(context_) * kTasksPerThread : 1;
    const int64_t slices = std::min(panels, std::max<int64_t>(1, (wanted + units - 1) / units));
    const int64_t width = (panels + slices - 1) / slices;
    parallel_for(context_, static_cast<size_t>(units * slices), [&](size_t task) {
      const int64_t panel = static_cast<int64_t>(task) % slices * width;
      if (panel >= panels) return;
      with_scratch([&](uint8_t* scratch) {
        const MoeUnit& unit = at<MoeUnit>(room_.units)[static_cast<int64_t>(task) / slices];
        const eb_status status = body(unit, panel, std::min(width, panels - panel), scratch);
        if (status != EB_OK) failure_.store(status);
      });
    });
  }

  // `columns` outputs from a packed matrix's panel on, compact, on this thread alone.
  eb_status product(const QuantLinearLayout& layout, const void* packed, int64_t panel, int64_t columns,
                    const float* bias, const MoeUnit& unit, const float* x, float* y,
                    uint8_t* prepared) const {
    eb_context alone = *context_;
    alone.parallel_for = nullptr;
    alone.threads = 1;
    alone.message = nullptr;  // other tasks would write it at the same time
    alone.message_bytes = 0;
    const auto desc =
        linear_desc(desc_, static_cast<int32_t>(layout.in_features), static_cast<int32_t>(columns));
    const size_t bytes = static_cast<size_t>((columns + kPanel - 1) / kPanel) * layout.panel_bytes;
    return eb_quant_linear_run(
        &alone, &desc, unit.rows, x,
        static_cast<const uint8_t*>(packed) + static_cast<size_t>(panel) * layout.panel_bytes, bytes,
        bias == nullptr ? nullptr : bias + panel * kPanel, y, prepared, room_.prepared_bytes);
  }

  eb_status gate_up(const MoeUnit& unit, int64_t panel, int64_t panels, uint8_t* scratch) const {
    const int64_t intermediate = desc_.intermediate, hidden = desc_.hidden;
    uint8_t* prepared = scratch;
    float* x = reinterpret_cast<float*>(scratch + room_.prepared_bytes);
    for (int64_t row = 0; row < unit.rows; ++row) {
      const int64_t token = first_ + at<int32_t>(room_.token_of)[unit.begin + row];
      std::memcpy(x + row * hidden, static_cast<const float*>(args_.x) + token * hidden,
                  static_cast<size_t>(hidden) * sizeof(float));
    }
    const uint8_t* packed =
        static_cast<const uint8_t*>(args_.gate_up) + static_cast<size_t>(unit.expert) * shape_.gate_up_stride;
    const float* bias =
        args_.gate_up_bias == nullptr ? nullptr : args_.gate_up_bias + unit.expert * 2 * intermediate;
    float* gate = x + unit.rows * hidden;
    const int64_t columns = shape_.sliced ? panels * kPanel : intermediate;
    float* up;
    int64_t stride;
    if (shape_.sliced) {
      up = gate + unit.rows * columns;
      stride = columns;
      EB_RETURN_IF_ERROR(product(shape_.gate_up, packed, panel, columns, bias, unit, x, gate, prepared));
      EB_RETURN_IF_ERROR(product(shape_.gate_up, packed, panel + intermediate / kPanel, columns, bias, unit,
                                 x, up, prepared));
    } else {
      up = gate + intermediate;
      stride = 2 * intermediate;
      EB_RETURN_IF_ERROR(product(shape_.gate_up, packed, 0, stride, bias, unit, x, gate, prepared));
    }
    for (int64_t row = 0; row < unit.rows; ++row) {
      activate(gate + row * stride, up + row * stride, columns,
               at<float>(room_.inner) + (unit.begin + row) * intermediate + panel * kPanel);
    }
    return EB_OK;
  }

  void activate(float* gate, float* up, int64_t count, float* inner) const {
    eb_activation activation = desc_.activation;
    if (desc_.clamp > 0.0f) {
      // gate * sigmoid(alpha * gate) = silu(alpha * gate) / alpha. The comparisons let NaN through.
      const float limit = desc_.clamp, alpha = desc_.clamp_alpha;
      for (int64_t i = 0; i < count; ++i) {
        gate[i] = alpha * (gate[i] > limit ? limit : gate[i]);
        const float low = up[i] < -limit ? -limit : up[i];
        up[i] = ((low > limit ? limit : low) + 1.0f) / alpha;
      }
      activation = EB_SILU;
    }
    elementwise_.gated_activation(activation, static_cast<int>(count), gate, up, inner);
  }

  eb_status down(const MoeUnit& unit, int64_t panel, int64_t panels, uint8_t* scratch) const {
    const int64_t hidden = desc_.hidden, column = panel * kPanel;
    const int64_t columns = std::min(panels * kPanel, hidden - column);
    float* y = reinterpret_cast<float*>(scratch + room_.prepared_bytes);
    const uint8_t* packed =
        static_cast<const uint8_t*>(args_.down) + static_cast<size_t>(unit.expert) * shape_.down_stride;
    const float* bias = args_.down_bias == nullptr ? nullptr : args_.down_bias + unit.expert * hidden;
    const float* inner = at<float>(room_.inner) + unit.begin * desc_.intermediate;
    EB_RETURN_IF_ERROR(product(shape_.down, packed, panel, columns, bias, unit, inner, y, scratch));
    for (int64_t row = 0; row < unit.rows; ++row) {
      std::memcpy(at<float>(room_.out) + (unit.begin + row) * hidden + column, y + row * columns,
                  static_cast<size_t>(columns) * sizeof(float));
    }
    return EB_OK;
  }

  // Each token's experts in the order of their scores.
  void combine(int64_t tokens) const {
    const int64_t hidden = desc_.hidden;
    const int64_t each = std::max<int64_t>(1, kCombineAtOnce / (hidden * desc_.top_k));
    parallel_for(context_, static_cast<size_t>((tokens + each - 1) / each), [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * each;
      for (int64_t t = begin; t < std::min(begin + each, tokens); ++t) combine_token(t, hidden);
    });
  }

  void combine_token(int64_t t, int64_t hidden) const {
    float* y = static_cast<float*>(args_.y) + (first_ + t) * hidden;
    for (int64_t pair = t * desc_.top_k; pair < (t + 1) * desc_.top_k; ++pair) {
      const float weight = at<float>(room_.weights)[pair];
      const float* out = at<float>(room_.out) + int64_t{at<int32_t>(room_.slot_of)[pair]} * hidden;
      if (pair == t * desc_.top_k) {
        for (int64_t h = 0; h < hidden; ++h) y[h] = weight * out[h];
      } else {
        for (int64_t h = 0; h < hidden; ++h) y[h] += weight * out[h];
      }
    }
  }

  const eb_context* context_;
  const eb_moe_desc& desc_;
  const MoeShape& shape_;
  const MoeWorkspace& room_;
  uint8_t* memory_;
  const ElementwiseKernels& elementwise_;
  const eb_moe_args& args_;
  int64_t first_ = 0;
  std::atomic<int32_t> failure_{EB_OK};
};

eb_status check_args(const eb_context* context, const eb_moe_args* args) {
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "MoE: the arguments are NULL");
  if (args->tokens < 0) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: %lld tokens", static_cast<long long>(args->tokens));
  }
  if (args->tokens == 0) return EB_OK;
  EB_RETURN_IF_ERROR(check_pointer(context, "x", args->x, alignof(float)));
  EB_RETURN_IF_ERROR(check_pointer(context, "router_logits", args->router_logits, alignof(float)));
  EB_RETURN_IF_ERROR(check_pointer(context, "gate_up", args->gate_up, kPointerAlignment));
  EB_RETURN_IF_ERROR(check_pointer(context, "down", args->down, kPointerAlignment));
  return check_pointer(context, "y", args->y, alignof(float));
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry points below

extern "C" eb_status eb_moe_expert_stride(const eb_context* context, const eb_moe_desc* desc,
                                          size_t* gate_up_bytes, size_t* down_bytes) {
  MoeShape shape{};
  EB_RETURN_IF_ERROR(check_moe(context, desc, &shape));
  if (gate_up_bytes == nullptr || down_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: a result pointer is NULL");
  }
  *gate_up_bytes = shape.gate_up_stride;
  *down_bytes = shape.down_stride;
  return EB_OK;
}

extern "C" eb_status eb_moe_workspace_size(const eb_context* context, const eb_moe_desc* desc, int64_t tokens,
                                           size_t* workspace_bytes) {
  MoeShape shape{};
  EB_RETURN_IF_ERROR(check_moe(context, desc, &shape));
  if (tokens < 0 || workspace_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT, "MoE: %lld tokens, or `workspace_bytes` is NULL",
                static_cast<long long>(tokens));
  }
  *workspace_bytes = 0;
  if (tokens == 0) return EB_OK;
  MoeWorkspace room{};
  EB_RETURN_IF_ERROR(make_moe_workspace(context, *desc, tokens, &room));
  *workspace_bytes = room.total;
  return EB_OK;
}

extern "C" eb_status eb_moe_run(const eb_context* context, const eb_moe_desc* desc, const eb_moe_args* args,
                                void* workspace, size_t workspace_bytes) {
  MoeShape shape{};
  EB_RETURN_IF_ERROR(check_moe(context, desc, &shape));
  EB_RETURN_IF_ERROR(check_args(context, args));
  if (args->tokens == 0) return EB_OK;
  MoeWorkspace room{};
  EB_RETURN_IF_ERROR(make_moe_workspace(context, *desc, args->tokens, &room));
  EB_RETURN_IF_ERROR(check_pointer(context, "workspace", workspace, kPointerAlignment));
  if (workspace_bytes < room.total) {
    return fail(context, EB_INVALID_ARGUMENT,
                "MoE: the workspace has %zu bytes, but this call needs %zu; ask workspace_size with the same "
                "tokens and threads",
                workspace_bytes, room.total);
  }
  CpuFeatures features;
  EB_RETURN_IF_ERROR(cpu_features(context, &features));
  const ElementwiseKernels& elementwise = features.isa >= Isa::kAvx512 ? elementwise_kernels_avx512()
                                          : features.isa >= Isa::kAvx2 ? elementwise_kernels_avx2()
                                                                       : elementwise_kernels_baseline();
  Run run(context, *desc, shape, room, static_cast<uint8_t*>(workspace), elementwise, *args);
  for (int64_t first = 0; first < args->tokens; first += room.run_tokens) {
    EB_RETURN_IF_ERROR(run(first, std::min(room.run_tokens, args->tokens - first)));
  }
  return EB_OK;
}
