// QuantMoE: route, sort tokens by expert, two grouped products with the gated activation between them,
// combine.
#include "activation.cuh"
#include "grouped.cuh"
#include "int4_gemm.cuh"
#include "int4_stream.cuh"
#include "moe_route.cuh"

namespace enginebay::cuda::moe {
namespace {

// [gate, up] of every entry, in place of its expert's order, to the activation. A block an entry.
template <typename T>
__global__ void __launch_bounds__(256) gate_entries(const T* gate_up, int width, const int* place,
                                                    const int* expert, const float* bias, Gate gate, T* out) {
  let_next_start();
  wait_for_previous();
  const int64_t row = place[blockIdx.x];
  const float* const own_bias = bias != nullptr ? bias + int64_t{expert[blockIdx.x]} * 2 * width : nullptr;
  for (int i = threadIdx.x * 2; i < width; i += 512) {
    float g[2], u[2];
    for (int j = 0; j < 2; ++j) {
      g[j] = to_float(gate_up[row * 2 * width + i + j]) + (own_bias != nullptr ? own_bias[i + j] : 0.f);
      u[j] = to_float(gate_up[row * 2 * width + width + i + j]) +
             (own_bias != nullptr ? own_bias[width + i + j] : 0.f);
    }
    *reinterpret_cast<typename Half16<T>::Pair*>(out + row * width + i) =
        Half16<T>::pair(gate(g[0], u[0]), gate(g[1], u[1]));
  }
}

// y = sum of weight * (down + bias) over a token's entries, in their order. A block a token.
template <typename T>
__global__ void __launch_bounds__(256)
    combine(const T* down, int width, int top_k, const int* place, const int* expert, const float* weight,
            const float* bias, T* y) {
  let_next_start();
  wait_for_previous();
  const int64_t entry = int64_t{blockIdx.x} * top_k;
  for (int i = threadIdx.x; i < width; i += 256) {
    float sum = 0.f;
    for (int k = 0; k < top_k; ++k) {
      float v = to_float(down[int64_t{place[entry + k]} * width + i]);
      if (bias != nullptr) v += bias[int64_t{expert[entry + k]} * width + i];
      sum = fmaf(weight[entry + k], v, sum);
    }
    y[int64_t{blockIdx.x} * width + i] = from_float<T>(sum);
  }
}

eb_quant_linear_desc half_of(const eb_moe_desc& d, bool down) {
  return {down ? d.intermediate : d.hidden,
          down ? d.hidden : 2 * d.intermediate,
          d.format,
          d.block_size,
          d.symmetric,
          d.io_dtype};
}

// Which kernel multiplies, in tiles of how many rows of x: twice what an expert gets on average.
struct Plan {
  enum { kStream, kGemm, kGrouped } kind;
  int rows, most_tiles;

  Plan(const eb_moe_desc& d, int64_t tokens, int capability) {
    const int64_t twice = 2 * ceil_div<int64_t>(tokens * d.top_k, d.num_experts);
    if (d.format == EB_I4 && capability == 90) {
      rows = twice <= 16 ? 16 : int4_gemm::rows_per_block(twice);
      kind = rows <= 32 ? kStream : kGemm;
    } else {
      rows = twice <= 16 ? 16 : 64;
      kind = kGrouped;
    }
    most_tiles = static_cast<int>(tokens * d.top_k / rows + min(tokens * d.top_k, int64_t{d.num_experts}));
  }
};

struct Layout {
  size_t expert, weight, place, tiles, tile_count, sorted, gate_up, gated, down, total;

  Layout(const eb_moe_desc& d, int64_t tokens) {
    const auto entries = static_cast<size_t>(tokens * d.top_k);
    const auto experts = static_cast<size_t>(d.num_experts);
    const size_t most_tiles = entries / 16 + (entries < experts ? entries : experts);  // of any Plan
    size_t at = 0;
    const auto take = [&](size_t bytes) {
      const size_t here = at;
      at += (bytes + 255) / 256 * 256;
      return here;
    };
    expert = take(entries * 4);
    weight = take(entries * 4);
    place = take(entries * 4);
    tiles = take(most_tiles * sizeof(int4));
    tile_count = take(4);
    sorted = take(entries * static_cast<size_t>(d.hidden) * 2);
    gate_up = take(entries * static_cast<size_t>(d.intermediate) * 4);
    gated = take(entries * static_cast<size_t>(d.intermediate) * 2);
    down = take(entries * static_cast<size_t>(d.hidden) * 2);
    total = at;
  }
};

template <typename T>
eb_status run(const eb_context* context, const Device& device, const eb_moe_desc& d, const eb_moe_args& a,
              uint8_t* workspace) {
  const cudaStream_t stream = stream_of(context);
  const Layout layout(d, a.tokens);
  const auto tokens = static_cast<unsigned>(a.tokens), entries = static_cast<unsigned>(a.tokens * d.top_k);
  int* const expert = reinterpret_cast<int*>(workspace + layout.expert);
  float* const weight = reinterpret_cast<float*>(workspace + layout.weight);
  int* const place = reinterpret_cast<int*>(workspace + layout.place);
  int4* const tiles = reinterpret_cast<int4*>(workspace + layout.tiles);
  int* const tile_count = reinterpret_cast<int*>(workspace + layout.tile_count);
  T* const gate_up = reinterpret_cast<T*>(workspace + layout.gate_up);
  T* const gated = reinterpret_cast<T*>(workspace + layout.gated);
  T* const down = reinterpret_cast<T*>(workspace + layout.down);
  const bool grouped = d.num_groups > 1;
  const Routing routing{static_cast<int>(a.tokens),
                        d.num_experts,
                        d.top_k,
                        d.scoring,
                        d.renormalize,
                        grouped ? d.num_groups : 0,
                        d.top_groups,
                        d.routed_scale,
                        a.router_logits,
                        a.correction_bias,
                        expert,
                        weight};
  const Plan plan(d, a.tokens, device.capability);
  const Gate gate{d.activation, d.clamp, d.clamp_alpha};
  size_t gate_up_stride = 0, down_stride = 0;
  EB_RETURN_IF_ERROR(eb_moe_expert_stride(context, &d, &gate_up_stride, &down_stride));

  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(tokens), dim3(32),
                                    size_t{8} * static_cast<size_t>(d.num_experts), 1, route, routing));
  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(1), dim3(1024), 0, 1, sort_entries,
                                    Sorting{static_cast<int>(entries), d.num_experts, plan.rows, expert,
                                            place, tiles, tile_count}));
  EB_RETURN_IF_CUDA(
      context, launch(device, stream, dim3(entries), dim3(128), 0, 1, spread, static_cast<const uint4*>(a.x),
                      d.top_k, d.hidden / 8, place, reinterpret_cast<uint4*>(workspace + layout.sorted)));
  const Int4Groups up_groups{tiles, tile_count, static_cast<int64_t>(gate_up_stride)},
      down_groups{tiles, tile_count, static_cast<int64_t>(down_stride)};
  const auto multiply = [&](const Int4Problem& p, const Int4Groups& groups) {
    const bool symmetric = d.symmetric != 0;
    if (plan.kind == Plan::kStream)
      return int4_stream::run_groups(context, device, d.io_dtype, p, symmetric, groups, plan.rows, nullptr);
    if (plan.kind == Plan::kGemm)
      return int4_run_groups(context, device, d.io_dtype, p, symmetric, groups, plan.most_tiles, plan.rows);
    return grouped::run(context, device, d.format, d.io_dtype, p, symmetric, groups, plan.most_tiles,
                        plan.rows);
  };
  const int m = static_cast<int>(entries);
  Int4Problem up{static_cast<const uint8_t*>(a.gate_up),
                 workspace + layout.sorted,
                 nullptr,
                 gate_up,
                 m,
                 2 * d.intermediate,
                 d.hidden,
                 d.block_size};
  if (plan.kind == Plan::kStream) {
    up.bias = a.gate_up_bias;
    up.y = gated;
    EB_RETURN_IF_ERROR(int4_stream::run_groups(context, device, d.io_dtype, up, d.symmetric != 0, up_groups,
                                               plan.rows, &gate));
  } else {
    EB_RETURN_IF_ERROR(multiply(up, up_groups));
    EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(entries), dim3(256), 0, 1, gate_entries<T>,
                                      gate_up, d.intermediate, place, expert, a.gate_up_bias, gate, gated));
  }
  EB_RETURN_IF_ERROR(multiply(
      {static_cast<const uint8_t*>(a.down), gated, nullptr, down, m, d.hidden, d.intermediate, d.block_size},
      down_groups));
  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(tokens), dim3(256), 0, 1, combine<T>, down, d.hidden,
                                    d.top_k, place, expert, weight, a.down_bias, static_cast<T*>(a.y)));
  return EB_OK;
}

eb_status check(const eb_context* context, const eb_moe_desc* d) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (d == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: desc is NULL");
  if (d->num_experts <= 0 || d->top_k <= 0 || d->top_k > d->num_experts)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: top_k %d of num_experts %d", d->top_k,
                d->num_experts);
  if (d->num_experts > kMostExperts || d->top_k > kMostTopK)
    return fail(context, EB_UNSUPPORTED, "QuantMoE on CUDA: %d experts, top_k %d; it has up to %d and %d",
                d->num_experts, d->top_k, kMostExperts, kMostTopK);
  if (d->hidden <= 0 || d->intermediate <= 0)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: hidden %d and intermediate %d must be positive",
                d->hidden, d->intermediate);
  if (d->scoring < EB_SCORE_SOFTMAX || d->scoring > EB_SCORE_SOFTMAX_TOPK || d->activation < EB_SILU ||
      d->activation > EB_RELU2)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: unknown scoring %d or activation %d",
                static_cast<int>(d->scoring), static_cast<int>(d->activation));
  if (d->num_groups > 1) {
    if (d->num_experts % d->num_groups != 0 || d->top_groups <= 0 || d->top_groups > d->num_groups ||
        d->top_groups * (d->num_experts / d->num_groups) < d->top_k)
      return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: %d of %d groups of %d experts cannot give %d",
                  d->top_groups, d->num_groups, d->num_experts, d->top_k);
    if (d->num_groups > kMostGroups)
      return fail(context, EB_UNSUPPORTED, "QuantMoE on CUDA: %d groups; it has up to %d", d->num_groups,
                  kMostGroups);
  }
  size_t bytes;
  const eb_quant_linear_desc up = half_of(*d, false), down = half_of(*d, true);
  EB_RETURN_IF_ERROR(eb_quant_linear_packed_bytes(context, &up, &bytes));
  return eb_quant_linear_packed_bytes(context, &down, &bytes);
}

}  // namespace
}  // namespace enginebay::cuda::moe

extern "C" {

using namespace enginebay;
using namespace enginebay::cuda;
using namespace enginebay::cuda::moe;

eb_status eb_moe_expert_stride(const eb_context* context, const eb_moe_desc* desc, size_t* gate_up_bytes,
                               size_t* down_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (gate_up_bytes == nullptr || down_bytes == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: gate_up_bytes or down_bytes is NULL");
  const eb_quant_linear_desc up = half_of(*desc, false), down = half_of(*desc, true);
  EB_RETURN_IF_ERROR(eb_quant_linear_packed_bytes(context, &up, gate_up_bytes));
  EB_RETURN_IF_ERROR(eb_quant_linear_packed_bytes(context, &down, down_bytes));
  *gate_up_bytes = ceil_div<size_t>(*gate_up_bytes, 256) * 256;
  *down_bytes = ceil_div<size_t>(*down_bytes, 256) * 256;
  return EB_OK;
}

eb_status eb_moe_workspace_size(const eb_context* context, const eb_moe_desc* desc, int64_t tokens,
                                size_t* bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (bytes == nullptr || tokens < 0 || tokens > INT32_MAX / 64)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: workspace_bytes %p, tokens %lld",
                static_cast<void*>(bytes), static_cast<long long>(tokens));
  *bytes = Layout(*desc, tokens).total;
  return EB_OK;
}

eb_status eb_moe_run(const eb_context* context, const eb_moe_desc* desc, const eb_moe_args* args,
                     void* workspace, size_t workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: args is NULL");
  if (args->tokens < 0 || args->tokens > INT32_MAX / 64)
    return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: tokens %lld", static_cast<long long>(args->tokens));
  if (args->tokens == 0) return EB_OK;
  const struct {
    const char* name;
    const void* pointer;
  } needed[] = {{"x", args->x},
                {"router_logits", args->router_logits},
                {"gate_up", args->gate_up},
                {"down", args->down},
                {"y", args->y}};
  for (const auto& n : needed)
    if (n.pointer == nullptr || reinterpret_cast<uintptr_t>(n.pointer) % 16 != 0)
      return fail(context, EB_INVALID_ARGUMENT, "QuantMoE: %s at %p; it must be there, aligned to 16 bytes",
                  n.name, n.pointer);
  const Layout layout(*desc, args->tokens);
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
      workspace_bytes < layout.total)
    return fail(context, EB_INVALID_ARGUMENT,
                "QuantMoE: workspace %p of %zu bytes; it takes %zu, aligned to 256 bytes", workspace,
                workspace_bytes, layout.total);
  Device device;
  EB_RETURN_IF_ERROR(current_device(context, &device));
  auto* const bytes = static_cast<uint8_t*>(workspace);
  return desc->io_dtype == EB_F16 ? run<half>(context, device, *desc, *args, bytes)
                                  : run<__nv_bfloat16>(context, device, *desc, *args, bytes);
}

}  // extern "C"
