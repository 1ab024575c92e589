// Where a tile's keys and values lie in the cache, and their way into the processor's caches ahead of time.
#ifndef ENGINEBAY_ATTENTION_ROWS_H
#define ENGINEBAY_ATTENTION_ROWS_H

#include <type_traits>

#include "attention.h"
#include "simd_common.h"

namespace enginebay {
namespace {

inline int64_t smaller64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int smaller(int64_t a, int64_t b) { return static_cast<int>(smaller64(a, b)); }
inline int larger(int64_t a, int64_t b) { return static_cast<int>(larger64(a, b)); }

// Stands for the element type of a cache of several pools (attention_tiers.h).
struct Tiered {};

// Cache position of a tile's first token.
inline int64_t first_position(const AttentionCall& call, const PlanTile& tile) {
  return int64_t{call.args->kv_len[tile.sequence]} - call.args->query_start[tile.sequence + 1] +
         tile.first_token;
}

// Positions of a job that some row sees, the first rounded down to a tile.
struct Span {
  int64_t begin, end;
};
inline Span span(const AttentionCall& call, const AttentionJob& job) {
  const PlanTile& tile = *job.tile;
  const int64_t position = first_position(call, tile);
  const int64_t first = first_visible(*call.desc, position) / kTile * kTile;
  const int64_t last = call.desc->causal ? position + tile.tokens : call.args->kv_len[tile.sequence];
  return {larger64(int64_t{job.first_split} * kSplit, first),
          smaller64(int64_t{job.end_split} * kSplit, last)};
}

// Whether rows of T become floats before the inner loops read them: what takes long to convert.
template <class T>
constexpr bool kExpands = std::is_same_v<T, Int4> || std::is_same_v<T, Tiered>;

// Rows of keys of the cache positions of one tile, of a job's first key head; the others follow row_elements
// apart, values value_offset behind.
template <class T>
class TileRows {
 public:
  int first, count;  // positions outside [first, count) borrow the first's row, and are masked

  // Positions [start + from, start + to) of a sequence.
  void locate(const AttentionCall& call, int sequence, int first_head, int64_t start, int from, int to) {
    const eb_paged_attention_desc& desc = *call.desc;
    const AttentionShape& shape = call.shape;
    const int32_t* table = call.args->block_table + int64_t{sequence} * desc.table_width;
    const T* cache = static_cast<const T*>(call.args->cache) + first_head * shape.row_elements;
    first = from, count = to, first_head_ = first_head, offsets_ = &call.offsets;
    row_elements_ = shape.row_elements, value_offset_ = shape.value_offset;
    int64_t block = (start + from) / desc.block_size;
    int offset = static_cast<int>((start + from) % desc.block_size);
    for (int j = from; j < to; ++block, offset = 0) {
      const T* row = cache + table[block] * shape.block_stride + offset * shape.token_stride;
      const int end = smaller(to, j + int64_t{desc.block_size} - offset);
      for (; j < end; ++j, row += shape.token_stride) keys_[j] = row;
    }
    for (int j = 0; j < from; ++j) keys_[j] = keys_[from];
    for (int j = to; j < kTile; ++j) keys_[j] = keys_[from];
  }

  const T* key(int j, int head) const { return keys_[j] + head * row_elements_; }
  const T* value(int j, int head) const { return key(j, head) + value_offset_; }
  int64_t row_bytes(int) const { return row_elements_ * static_cast<int64_t>(sizeof(T)); }
  template <class V>
  void expand(int j, int head, bool values, int dim, float* to) const {
    const T* const row = values ? value(j, head) : key(j, head);
    if constexpr (std::is_same_v<T, Int4>) {
      const float* const all = values ? offsets_->values : offsets_->keys;
      if (all != nullptr) {
        return expand_row<V>(row, dim, all + (first_head_ + head) * offsets_->head_stride, to);
      }
    }
    expand_row<V>(row, dim, to);
  }

 private:
  const CacheScales* offsets_;
  int first_head_;
  const T* keys_[kTile];
  int64_t row_elements_, value_offset_;
};

// Asks for the rows of a tile that comes next, some at a time: memory answers while the present tile is
// computed. A burst of requests would stall, and the innermost cache is too small for two tiles.
template <class T>
class Ahead {
 public:
  // `tile` may be null: nothing comes next. Values that are their keys' elements are not asked for twice.
  Ahead(const TileRows<T>* tile, int head, bool separate_values)
      : tile_(tile),
        head_(head),
        keys_(tile == nullptr ? 0 : tile->first),
        values_(keys_),
        end_(tile == nullptr ? 0 : tile->count),
        end_values_(separate_values ? end_ : values_) {}

  void fetch_keys(int rows) {
    for (const int end = smaller(end_, int64_t{keys_} + rows); keys_ < end; ++keys_) {
      request(tile_->key(keys_, head_), tile_->row_bytes(keys_));
    }
  }
  void fetch_values(int rows) {
    for (const int end = smaller(end_values_, int64_t{values_} + rows); values_ < end; ++values_) {
      request(tile_->value(values_, head_), tile_->row_bytes(values_));
    }
  }

 private:
  static void request(const void* row, int64_t bytes) {
    constexpr int kLine = 64;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
  }

  const TileRows<T>* tile_;
  int head_, keys_, values_, end_, end_values_;
};

}  // namespace
}  // namespace enginebay
#endif
