// QuantMoE with INT4 experts: route, sort tokens by expert, two grouped products with the gated activation
// between them, combine. Counts and tiles stay on the device, so that a captured graph follows the routing.
#include "activation.cuh"
#include "enginebay/moe.h"
#include "int4_gemm.cuh"

namespace enginebay::cuda {
namespace {

constexpr int kMostExperts = 1024, kMostTopK = 32, kMostGroups = 32;

struct Routing {
  int tokens, experts, top_k;
  eb_moe_scoring scoring;
  int renormalize, num_groups, top_groups;
  float routed_scale;
  const float *logits, *bias;
  int* expert;    // [T, top_k]
  float* weight;  // [T, top_k]
};

// The best of a warp's candidates, the lower index among equals; NaN never wins.
__device__ __forceinline__ void warp_best(float* value, int* index) {
  for (int o = 16; o > 0; o /= 2) {
    const float v = __shfl_xor_sync(~0u, *value, o);
    const int i = __shfl_xor_sync(~0u, *index, o);
    if (v > *value || (v == *value && i < *index)) {
      *value = v;
      *index = i;
    }
  }
}

// A warp a token.
__global__ void __launch_bounds__(32) route(const Routing r) {
  extern __shared__ float scores[];  // [E] scores, then [E] what experts are chosen by
  float* const choice = scores + r.experts;
  let_next_start();
  wait_for_previous();
  const int token = blockIdx.x, lane = threadIdx.x;
  const float* const logits = r.logits + int64_t{token} * r.experts;
  float top = -INFINITY;
  bool nan = false;
  for (int e = lane; e < r.experts; e += 32) {
    top = fmaxf(top, logits[e]);
    nan |= isnan(logits[e]);
  }
  for (int o = 16; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  nan = __any_sync(~0u, nan);
  float total = 0.f;
  for (int e = lane; e < r.experts; e += 32) total += expf(logits[e] - top);
  for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
  for (int e = lane; e < r.experts; e += 32) {
    const float v = logits[e];
    scores[e] = r.scoring == EB_SCORE_SOFTMAX   ? expf(v - top) / total
                : r.scoring == EB_SCORE_SIGMOID ? 1.f / (1.f + expf(-v))
                                                : v;
    choice[e] = scores[e] + (r.bias != nullptr ? r.bias[e] : 0.f);
  }
  __syncwarp();
  if (r.num_groups > 1) {
    // A lane a group: its rank, then every expert outside the best groups is out.
    const int each = r.experts / r.num_groups;
    float rank = -INFINITY;
    if (lane < r.num_groups) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = 0; i < each; ++i) {
        const float v = choice[lane * each + i];
        if (v > first) {
          second = first;
          first = v;
        } else if (v > second) {
          second = v;
        }
      }
      rank = r.bias != nullptr && each > 1 ? first + second : first;
    }
    bool kept = false;
    float left = rank;
    for (int i = 0; i < r.top_groups; ++i) {
      float value = left;
      int index = lane < r.num_groups && !kept ? lane : 1 << 20;
      if (kept || lane >= r.num_groups) value = -INFINITY;
      warp_best(&value, &index);
      if (index == lane) kept = true;
    }
    if (lane < r.num_groups && !kept)
      for (int i = 0; i < each; ++i) choice[lane * each + i] = -INFINITY;
    __syncwarp();
  }
  float sum = 0.f, mine = 0.f, best_logit = 0.f;
  int my_expert = 0;
  for (int k = 0; k < r.top_k; ++k) {
    float value = -INFINITY;
    int index = 1 << 20;
    for (int e = lane; e < r.experts; e += 32)
      if (choice[e] > value) {
        value = choice[e];
        index = e;
      }
    warp_best(&value, &index);
    if (index >= r.experts) index = k;  // a row of NaN: any expert will do, the weight says NaN
    float weight = nan ? __int_as_float(0x7fc00000) : scores[index];
    if (r.scoring == EB_SCORE_SOFTMAX_TOPK) {
      if (k == 0) best_logit = weight;
      weight = expf(weight - best_logit);
    }
    sum += weight;
    if (lane == k) {
      mine = weight;
      my_expert = index;
    }
    __syncwarp();
    if (lane == 0) choice[index] = -INFINITY;
    __syncwarp();
  }
  if (lane < r.top_k) {
    if (r.renormalize || r.scoring == EB_SCORE_SOFTMAX_TOPK) mine /= sum;
    r.expert[int64_t{token} * r.top_k + lane] = my_expert;
    r.weight[int64_t{token} * r.top_k + lane] = mine * r.routed_scale;
  }
}

struct Sorting {
  int entries, experts, tile_rows;  // T*top_k
  const int* expert;                // [entries]
  int* place;                       // [entries]: where the entry went
  int4* tiles;
  int* tile_count;
};

// Places entries by expert and lists the tiles. One block. Entries of an expert may come in any order: no
// result depends on it.
__global__ void __launch_bounds__(1024) sort_entries(const Sorting s) {
  __shared__ int count[kMostExperts], begin[kMostExperts], tile_begin[kMostExperts];
  let_next_start();
  wait_for_previous();
  for (int e = threadIdx.x; e < s.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < s.entries; i += 1024) atomicAdd(count + s.expert[i], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int rows = 0, tiles = 0;
    for (int e = 0; e < s.experts; ++e) {
      begin[e] = rows;
      tile_begin[e] = tiles;
      rows += count[e];
      tiles += ceil_div(count[e], s.tile_rows);
    }
    *s.tile_count = tiles;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < s.experts; e += 1024) {
    const int end = begin[e] + count[e];
    for (int first = begin[e], tile = tile_begin[e]; first < end; first += s.tile_rows)
      s.tiles[tile++] = make_int4(e, first, end, 0);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < s.experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < s.entries; i += 1024) {
    const int e = s.expert[i];
    s.place[i] = begin[e] + atomicAdd(count + e, 1);
  }
}

// Rows of x to where their experts look for them. A block an entry.
__global__ void __launch_bounds__(128)
    spread(const uint4* x, int top_k, int pieces, const int* place, uint4* sorted) {
  let_next_start();
  wait_for_previous();
  const int64_t from = int64_t{blockIdx.x} / top_k * pieces, to = int64_t{place[blockIdx.x]} * pieces;
  for (int i = threadIdx.x; i < pieces; i += 128) sorted[to + i] = x[from + i];
}

struct Gate {
  eb_activation activation;
  float clamp, clamp_alpha;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    if (clamp <= 0.f) return activate(activation, gate) * up;
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
    return (up + 1.f) * gate / (1.f + __expf(-clamp_alpha * gate));
  }
};

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

// Rows of x a tile of the grouped products takes: twice what an expert gets on average.
int tile_rows(const eb_moe_desc& d, int64_t tokens) {
  return int4_gemm::rows_per_block(2 * ceil_div<int64_t>(tokens * d.top_k, d.num_experts));
}

struct Layout {
  size_t expert, weight, place, tiles, tile_count, sorted, gate_up, gated, down, total;
  int most_tiles;

  Layout(const eb_moe_desc& d, int64_t tokens) {
    const auto entries = static_cast<size_t>(tokens * d.top_k);
    const auto busy =
        entries < static_cast<size_t>(d.num_experts) ? entries : static_cast<size_t>(d.num_experts);
    most_tiles = static_cast<int>(entries / static_cast<size_t>(tile_rows(d, tokens)) + busy);
    size_t at = 0;
    const auto take = [&](size_t bytes) {
      const size_t here = at;
      at += (bytes + 255) / 256 * 256;
      return here;
    };
    expert = take(entries * 4);
    weight = take(entries * 4);
    place = take(entries * 4);
    tiles = take(static_cast<size_t>(most_tiles) * sizeof(int4));
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
  const int rows = tile_rows(d, a.tokens);
  size_t gate_up_stride = 0, down_stride = 0;
  EB_RETURN_IF_ERROR(eb_moe_expert_stride(context, &d, &gate_up_stride, &down_stride));

  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(tokens), dim3(32),
                                    size_t{8} * static_cast<size_t>(d.num_experts), 1, route, routing));
  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(1), dim3(1024), 0, 1, sort_entries,
                                    Sorting{static_cast<int>(entries), d.num_experts, rows, expert, place,
                                            tiles, tile_count}));
  EB_RETURN_IF_CUDA(
      context, launch(device, stream, dim3(entries), dim3(128), 0, 1, spread, static_cast<const uint4*>(a.x),
                      d.top_k, d.hidden / 8, place, reinterpret_cast<uint4*>(workspace + layout.sorted)));
  const Int4Problem first{static_cast<const uint8_t*>(a.gate_up),
                          workspace + layout.sorted,
                          nullptr,
                          gate_up,
                          static_cast<int>(entries),
                          2 * d.intermediate,
                          d.hidden,
                          d.block_size};
  EB_RETURN_IF_ERROR(int4_run_groups(context, device, d.io_dtype, first, d.symmetric != 0,
                                     {tiles, tile_count, static_cast<int64_t>(gate_up_stride)},
                                     layout.most_tiles, rows));
  EB_RETURN_IF_CUDA(context, launch(device, stream, dim3(entries), dim3(256), 0, 1, gate_entries<T>, gate_up,
                                    d.intermediate, place, expert, a.gate_up_bias,
                                    Gate{d.activation, d.clamp, d.clamp_alpha}, gated));
  const Int4Problem second{static_cast<const uint8_t*>(a.down), gated,    nullptr,        down,
                           static_cast<int>(entries),           d.hidden, d.intermediate, d.block_size};
  EB_RETURN_IF_ERROR(int4_run_groups(context, device, d.io_dtype, second, d.symmetric != 0,
                                     {tiles, tile_count, static_cast<int64_t>(down_stride)},
                                     layout.most_tiles, rows));
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
  if (d->format != EB_I4)
    return fail(context, EB_UNSUPPORTED, "QuantMoE on CUDA: experts in %s; it has int4",
                dtype_name(d->format));
  size_t bytes;
  const eb_quant_linear_desc up = half_of(*d, false), down = half_of(*d, true);
  EB_RETURN_IF_ERROR(eb_quant_linear_packed_bytes(context, &up, &bytes));
  return eb_quant_linear_packed_bytes(context, &down, &bytes);
}

}  // namespace
}  // namespace enginebay::cuda

extern "C" {

using namespace enginebay;
using namespace enginebay::cuda;

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
  if (device.capability != 90)
    return fail(context, EB_UNSUPPORTED, "QuantMoE on CUDA: its products are for sm_90; this device is sm_%d",
                device.capability);
  auto* const bytes = static_cast<uint8_t*>(workspace);
  return desc->io_dtype == EB_F16 ? run<half>(context, device, *desc, *args, bytes)
                                  : run<__nv_bfloat16>(context, device, *desc, *args, bytes);
}

}  // extern "C"
