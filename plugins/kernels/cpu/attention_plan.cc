// Cutting a step into tiles and items. Answers do not depend on the cut, so it follows the load alone.
#include <algorithm>
#include <cstring>
#include <new>

#include "attention.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

constexpr int32_t kMagic = 0x45425031;  // "EBP1"
constexpr int kItemsPerThread = 4;      // fewer items than this and tiles are cut along the cache as well
constexpr size_t kAlignment = 64;       // bytes

constexpr int64_t kHeaderInts = sizeof(PlanHeader) / sizeof(int32_t);
constexpr int64_t kTileInts = sizeof(PlanTile) / sizeof(int32_t);
constexpr int64_t kItemInts = sizeof(PlanItem) / sizeof(int32_t);

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many tiles as this are work enough without cutting them.
int64_t enough_tiles(const eb_context* context, const eb_paged_attention_desc& desc) {
  return ceil_div(int64_t{kItemsPerThread} * thread_count(context), desc.num_kv_heads);
}

int64_t cost(const PlanTile* tiles, const PlanItem& item) {
  return int64_t{tiles[item.tile].tokens} * (item.end_split - item.first_split);
}

}  // namespace

PlanBounds plan_bounds(const eb_context* context, const eb_paged_attention_desc& desc, int64_t tokens,
                       int64_t sequences) {
  const AttentionShape shape = attention_shape(desc);
  const int64_t splits = ceil_div(int64_t{desc.table_width} * desc.block_size, kSplit);
  const int64_t enough = enough_tiles(context, desc);
  PlanBounds bounds;
  bounds.tiles = std::min(tokens, tokens / shape.tile_tokens + sequences);
  bounds.items = bounds.tiles + std::min(bounds.tiles, enough) * splits;
  bounds.part_tokens = thread_count(context) == 1 ? 0 : std::min(tokens, enough * shape.tile_tokens) * splits;
  bounds.plan_ints = kHeaderInts + bounds.tiles * kTileInts + bounds.items * kItemInts;
  return bounds;
}

AttentionWorkspace attention_workspace(const eb_context* context, const eb_paged_attention_desc& desc,
                                       int64_t tokens, const PlanBounds& bounds) {
  const AttentionShape shape = attention_shape(desc);
  AttentionWorkspace workspace;
  size_t bytes = 0;
  const auto take = [&bytes](size_t more) {
    const size_t start = bytes;
    bytes = (bytes + more + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  };
  workspace.queries = take(sizeof(float) * tokens * desc.num_heads * shape.padded_dim);
  const size_t scratch = sizeof(float) * attention_scratch_floats(shape);
  workspace.scratch_bytes = (scratch + kAlignment - 1) / kAlignment * kAlignment;
  workspace.scratch = take(workspace.scratch_bytes * thread_count(context));
  workspace.parts = take(sizeof(float) * bounds.part_tokens * desc.num_heads * (shape.padded_dim + 2));
  workspace.counters = take(sizeof(uint32_t) * bounds.tiles * desc.num_kv_heads);
  workspace.bytes = bytes + kAlignment;  // the caller's pointer may lie anywhere
  return workspace;
}

eb_status read_plan(const eb_context* context, const eb_paged_attention_desc& desc,
                    const eb_paged_attention_args& args, const int32_t* ints, size_t count, Plan* plan) {
  if (ints == nullptr || count < static_cast<size_t>(kHeaderInts)) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: the plan has %zu ints, a header takes %d",
                count, static_cast<int>(kHeaderInts));
  }
  plan->header = reinterpret_cast<const PlanHeader*>(ints);
  const PlanHeader& header = *plan->header;
  if (header.magic != kMagic || header.tokens != args.tokens || header.sequences != args.sequences) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: the plan is for %d tokens of %d sequences, the call has %lld and %lld; call "
                "eb_paged_attention_plan once per step",
                header.tokens, header.sequences, static_cast<long long>(args.tokens),
                static_cast<long long>(args.sequences));
  }
  const PlanBounds bounds = plan_bounds(context, desc, args.tokens, args.sequences);
  const int64_t need = kHeaderInts + int64_t{header.tiles} * kTileInts + int64_t{header.items} * kItemInts;
  if (header.tiles < 0 || header.items < 0 || header.tiles > bounds.tiles || header.items > bounds.items ||
      header.part_tokens > bounds.part_tokens || static_cast<int64_t>(count) < need) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: a plan of %zu ints, %d tiles, %d items and %d part tokens does not fit this "
                "context's %u threads",
                count, header.tiles, header.items, header.part_tokens, thread_count(context));
  }
  plan->tiles = reinterpret_cast<const PlanTile*>(ints + kHeaderInts);
  plan->items = reinterpret_cast<const PlanItem*>(ints + kHeaderInts + int64_t{header.tiles} * kTileInts);
  return EB_OK;
}

}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry points below

extern "C" eb_status eb_paged_attention_plan_size(const eb_context* context,
                                                  const eb_paged_attention_desc* desc, int64_t tokens,
                                                  int64_t sequences, size_t* plan_ints,
                                                  size_t* workspace_bytes) {
  EB_RETURN_IF_ERROR(check_attention_desc(context, desc));
  if (tokens < 0 || tokens > INT32_MAX || sequences < 0 || sequences > INT32_MAX || plan_ints == nullptr ||
      workspace_bytes == nullptr) {
    return fail(context, EB_INVALID_ARGUMENT, "PagedAttention: plan_size of %lld tokens, %lld sequences",
                static_cast<long long>(tokens), static_cast<long long>(sequences));
  }
  const PlanBounds bounds = plan_bounds(context, *desc, tokens, sequences);
  *plan_ints = static_cast<size_t>(bounds.plan_ints);
  *workspace_bytes = attention_workspace(context, *desc, tokens, bounds).bytes;
  return EB_OK;
}

extern "C" eb_status eb_paged_attention_plan(const eb_context* context, const eb_paged_attention_desc* desc,
                                             int64_t tokens, int64_t sequences, const int32_t* query_start,
                                             const int32_t* kv_len, int32_t* plan, size_t plan_ints) {
  EB_RETURN_IF_ERROR(check_attention_desc(context, desc));
  EB_RETURN_IF_ERROR(check_attention_lengths(context, *desc, tokens, sequences, query_start, kv_len));
  const PlanBounds bounds = plan_bounds(context, *desc, tokens, sequences);
  if (plan == nullptr || plan_ints < static_cast<size_t>(bounds.plan_ints)) {
    return fail(context, EB_INVALID_ARGUMENT,
                "PagedAttention: the plan has room for %zu ints, this step takes %lld", plan_ints,
                static_cast<long long>(bounds.plan_ints));
  }
  const AttentionShape shape = attention_shape(*desc);
  PlanHeader header{kMagic, static_cast<int32_t>(tokens), static_cast<int32_t>(sequences), 0, 0, 0};
  auto* tiles = reinterpret_cast<PlanTile*>(plan + kHeaderInts);
  for (int32_t b = 0; b < sequences; ++b) {
    const int32_t end = query_start[b + 1];
    for (int32_t token = query_start[b]; token < end; token += shape.tile_tokens) {
      PlanTile& tile = tiles[header.tiles++];
      tile.sequence = b;
      tile.first_token = token;
      tile.tokens = std::min(shape.tile_tokens, end - token);
      const int64_t position = int64_t{kv_len[b]} - end + token;
      const int64_t visible = desc->causal ? position + tile.tokens : kv_len[b];
      tile.first_split = static_cast<int32_t>(first_visible(*desc, position) / kSplit);
      tile.end_split = static_cast<int32_t>(ceil_div(visible, kSplit));
      tile.part_token = -1;
    }
  }
  auto* items = reinterpret_cast<PlanItem*>(plan + kHeaderInts + header.tiles * kTileInts);
  const bool cut = thread_count(context) > 1 && header.tiles < enough_tiles(context, *desc);
  for (int32_t t = 0; t < header.tiles; ++t) {
    PlanTile& tile = tiles[t];
    if (!cut || tile.end_split - tile.first_split == 1) {
      items[header.items++] = {t, tile.first_split, tile.end_split};
      continue;
    }
    tile.part_token = header.part_tokens;
    header.part_tokens += tile.tokens * (tile.end_split - tile.first_split);
    for (int32_t split = tile.first_split; split < tile.end_split; ++split) {
      items[header.items++] = {t, split, split + 1};
    }
  }
  std::stable_sort(items, items + header.items,
                   [tiles](const PlanItem& a, const PlanItem& b) { return cost(tiles, a) > cost(tiles, b); });
  std::memcpy(plan, &header, sizeof header);
  return EB_OK;
}
