// The walk through the drafts, and the choice of the next token.
//
// totals: weight of what each row keeps, where refine has not come to know it.
// accept: walks the drafts of each sequence.
// choose: draws the next token, the one with the least exponential variable over its weight.
#ifndef ENGINEBAY_CUDA_SPEC_WALK_CUH
#define ENGINEBAY_CUDA_SPEC_WALK_CUH

#include "spec_select.cuh"

namespace enginebay::cuda::spec {

// Weight of a logit in the row's filtered distribution, unnormalised.
struct Filter {
  float best, inverse_temperature, min_p;
  unsigned long long last;
  __device__ __forceinline__ Filter(const Row& state, const Extremes& e)
      : best(e.best), inverse_temperature(state.inverse_temperature), min_p(state.min_p), last(state.last) {}
  __device__ __forceinline__ float operator()(float v, int id) const {
    if (!(v > -INFINITY) || composite(v, id) < last) return 0.f;
    const float w = weight_of(v, best, inverse_temperature);
    return w >= min_p ? w : 0.f;
  }
};

__device__ inline float block_sum(float v) {
  __shared__ float warps[kThreads / 32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) totals(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.y, slice = blockIdx.x;
  const Row state = p.rows[row];
  if (state.sequence < 0 || state.inverse_temperature == 0.f || state.total > 0.f) return;
  const Extremes e = row_extremes(p, row);
  const Filter filter(state, e);
  float sum = 0.f;
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  for_slice(static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab, begin, end, rows_vectorise<T>(p),
            [&](float v, int id) { sum += filter(v, id); });
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.totals[int64_t{row} * p.slices + slice] = sum;
}

// All lanes of a warp call it.
__device__ inline float row_total(const Problem& p, int row) {
  if (p.rows[row].total > 0.f) return p.rows[row].total;
  const int lane = threadIdx.x % 32;
  float sum = lane < p.slices ? p.totals[int64_t{row} * p.slices + lane] : 0.f;
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

__device__ __forceinline__ int parent_of(const Problem& p, int first, int node) {
  return p.a.parents != nullptr ? p.a.parents[first + node] : node - 1;
}

// p after the refusals so far at node `at`: those of its children that stand before `until`.
template <typename T>
__device__ inline float left_over(const Problem& p, const Filter& filter, float inverse_total, int first,
                                  int nodes, int at, int until, int token) {
  const int row = first + at;
  float w = filter(to_float(static_cast<const T*>(p.a.logits)[int64_t{row} * p.vocab + token]), token) *
            inverse_total;
  for (int child = at + 1; child < until && child < nodes && w > 0.f; ++child) {
    if (parent_of(p, first, child) != at) continue;
    if (p.a.draft_probs == nullptr)
      w = p.a.draft_tokens[first + child] == token ? 0.f : w;
    else
      w = fmaxf(w - p.a.draft_probs[int64_t{first + child} * p.vocab + token], 0.f) / p.norms[first + child];
  }
  return w;
}

// One block a sequence: all threads walk alike, and share only the sums over the vocabulary.
template <typename T>
__global__ void __launch_bounds__(kThreads) accept(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, first = p.a.row_start[b], nodes = p.a.row_start[b + 1] - first;
  int at = 0, accepted = 0, tried = 1;
  if (nodes > 0 && first >= 0 && first + nodes <= p.a.rows) {
    const float t = p.a.temperature != nullptr ? p.a.temperature[b] : 0.f;
    const uint64_t seed = p.a.seeds != nullptr ? p.a.seeds[b] : 0;
    const int64_t position = p.a.positions != nullptr ? p.a.positions[b] : 0;
    for (;;) {
      if (accepted >= p.depth) {
        tried = 0;
        break;
      }
      const int row = first + at;
      const Extremes e = row_extremes(p, row);
      if (e.id < 0) break;
      const Row state = p.rows[row];
      const Filter filter(state, e);
      const float inverse_total = t > 0.f ? 1.f / row_total(p, row) : 0.f;
      float refused = 0.f;  // one-hot drafts: probability taken out so far
      int next = -1;
      for (int child = at + 1; child < nodes && next < 0; ++child) {
        if (parent_of(p, first, child) != at) continue;
        const int token = p.a.draft_tokens[first + child];
        const bool known = token >= 0 && token < p.vocab;
        if (!(t > 0.f)) {
          if (token == e.id) next = child;
          continue;
        }
        const float u = accept_random(seed, position, child);
        if (p.a.draft_probs == nullptr) {
          const float w =
              known ? left_over<T>(p, filter, inverse_total, first, nodes, at, child, token) : 0.f;
          if (w > 0.f && u * (1.f - refused) < w)
            next = child;
          else
            refused += w;
          continue;
        }
        const float* const q = p.a.draft_probs + int64_t{first + child} * p.vocab;
        const float w = known ? left_over<T>(p, filter, inverse_total, first, nodes, at, child, token) : 0.f;
        if (w > 0.f && u * q[token] < w) {
          next = child;
          continue;
        }
        // A later child is weighed against the residual's norm; the final choice needs none.
        bool more = false;
        for (int later = child + 1; later < nodes && !more; ++later) more = parent_of(p, first, later) == at;
        float sum = more ? 0.f : 1.f;
        if (more) {
          for (int i = threadIdx.x; i < p.vocab; i += kThreads)
            sum += fmaxf(left_over<T>(p, filter, inverse_total, first, nodes, at, child, i) - q[i], 0.f);
          sum = block_sum(sum);
        }
        if (threadIdx.x == 0) p.norms[first + child] = sum > 0.f ? sum : 1.f;
        __threadfence_block();
        __syncthreads();
      }
      if (next < 0) break;
      if (threadIdx.x == 0 && p.a.path != nullptr) p.a.path[int64_t{b} * p.depth + accepted] = next;
      at = next;
      ++accepted;
    }
  }
  if (threadIdx.x == 0) {
    if (p.a.path != nullptr)
      for (int i = accepted; i < p.depth; ++i) p.a.path[int64_t{b} * p.depth + i] = -1;
    if (p.a.accepted != nullptr) p.a.accepted[b] = accepted;
    const bool there = nodes > 0 && first >= 0 && first + nodes <= p.a.rows;
    p.finals[b] = {there ? first + at : -1, tried, 0};
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) choose(const Problem p) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.y, slice = blockIdx.x;
  const Final end_of_walk = p.finals[b];
  const int row = end_of_walk.row;
  if (row < 0) {
    if (slice == 0 && threadIdx.x == 0) p.a.next_token[b] = -1;
    return;
  }
  const Row state = p.rows[row];
  if (state.done) return;
  const Extremes e = row_extremes(p, row);
  if (e.id < 0 || state.inverse_temperature == 0.f) {
    if (slice == 0 && threadIdx.x == 0) p.a.next_token[b] = e.id;
    return;
  }
  const int first = p.a.row_start != nullptr ? p.a.row_start[b] : b;
  const int nodes = p.a.row_start != nullptr ? p.a.row_start[b + 1] - first : 1, node = row - first;
  const bool refusals = end_of_walk.tried && nodes > node + 1;
  const Filter filter(state, e);
  const float inverse_total = refusals ? 1.f / row_total(p, row) : 1.f;
  const uint64_t seed = p.a.seeds != nullptr ? p.a.seeds[b] : 0;
  const int64_t position = p.a.positions != nullptr ? p.a.positions[b] : 0;

  Best best{INFINITY, INFINITY, -1, -1};
  Random4 random{};
  const int begin = slice * p.slice, end = min(p.vocab, begin + p.slice);
  const T* const logits = static_cast<const T*>(p.a.logits) + int64_t{row} * p.vocab;
  const bool vectors = rows_vectorise<T>(p);
  const float exponent_scale = state.inverse_temperature * kLog2e;
  const auto draw = [&](int id) {
    // Ids rise by one inside a vector, which holds whole groups of four.
    if (!vectors || id % 4 == 0) random = token_random(seed, position, node, id);
    return word_of(random, id);
  };
  // The exponential over the weight, without a division: weight is 2^x.
  const auto cost_of = [&](float v, uint32_t drawn) {
    return exponential_of(drawn) * fast_exp2((e.best - v) * exponent_scale);
  };
  const auto weigh = [&](float v, int id, uint32_t drawn) {
    const float cost = cost_of(v, drawn);
    if (cost < best.cost) {  // ids rise, so the first of equals stays
      best.cost = cost;
      best.id = id;
    }
  };
  const auto weigh_after_refusals = [&](float whole, int id, uint32_t drawn) {
    const float exponential = exponential_of(drawn);
    const float weight = left_over<T>(p, filter, inverse_total, first, nodes, node, nodes, id);
    if (weight > 0.f) keep_better(&best.cost, &best.id, exponential / weight, id);
    keep_better(&best.spare_cost, &best.spare_id, exponential / whole, id);
  };
  if (state.listed > 0) {
    // Few are kept and known: one block draws for them alone.
    if (slice > 0) return;
    for (int i = threadIdx.x; i < state.listed; i += kThreads) {
      const int id = p.lists[int64_t{row} * kList + i];
      const float v = to_float(logits[id]), whole = filter(v, id);
      if (!(whole > 0.f)) continue;
      random = token_random(seed, position, node, id);
      if (refusals)
        weigh_after_refusals(whole, id, word_of(random, id));
      else
        keep_better(&best.cost, &best.id, cost_of(v, word_of(random, id)), id);
    }
  } else if (!refusals) {
    if (state.last == 0 && state.min_p <= 0.f) {
      for_slice(logits, begin, end, vectors, [&](float v, int id) { weigh(v, id, draw(id)); });
    } else {
      const auto least_key = static_cast<uint32_t>(state.last >> 32);
      for_slice(logits, begin, end, vectors, [&](float v, int id) {
        if (order_key(v) < least_key || !(filter(v, id) > 0.f)) return;
        random = token_random(seed, position, node, id);
        weigh(v, id, word_of(random, id));
      });
    }
  } else {
    for_slice(logits, begin, end, vectors, [&](float v, int id) {
      const uint32_t drawn = draw(id);
      const float whole = filter(v, id);
      if (whole > 0.f) weigh_after_refusals(whole, id, drawn);
    });
  }
  const auto join = [](Best a, const Best& o) {
    keep_better(&a.cost, &a.id, o.cost, o.id);
    keep_better(&a.spare_cost, &a.spare_id, o.spare_cost, o.spare_id);
    return a;
  };
  for (int o = 16; o > 0; o /= 2)
    best = join(best, Best{__shfl_xor_sync(~0u, best.cost, o), __shfl_xor_sync(~0u, best.spare_cost, o),
                           __shfl_xor_sync(~0u, best.id, o), __shfl_xor_sync(~0u, best.spare_id, o)});
  __shared__ Best warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) best = join(best, warps[w]);
    p.bests[int64_t{b} * p.slices + slice] = best;
  }
  if (state.listed == 0 && !is_last(&p.finals[b].arrivals, p.slices)) return;
  if (threadIdx.x == 0) {
    best = Best{INFINITY, INFINITY, -1, -1};
    for (int s = 0; s < (state.listed > 0 ? 1 : p.slices); ++s) {
      const Best* const o = p.bests + int64_t{b} * p.slices + s;
      best = join(best, Best{__ldcg(&o->cost), __ldcg(&o->spare_cost), __ldcg(&o->id), __ldcg(&o->spare_id)});
    }
    // Nothing left means that p and q agree to the last bit: then p itself is as good.
    p.a.next_token[b] = best.id >= 0 ? best.id : best.spare_id >= 0 ? best.spare_id : e.id;
  }
}

}  // namespace enginebay::cuda::spec

#endif
