// Where a tile's keys and values lie in the cache, and their way into the processor's caches ahead of time.
#ifndef ENGINEBAY_ATTENTION_ROWS_H
#define ENGINEBAY_ATTENTION_ROWS_H

#include "attention.h"
#include "simd_common.h"

namespace enginebay {
namespace {

inline int64_t smaller64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int smaller(int64_t a, int64_t b) { return static_cast<int>(smaller64(a, b)); }
inline int larger(int64_t a, int64_t b) { return static_cast<int>(larger64(a, b)); }

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

// Rows of keys of the cache positions of one tile, of a job's first key head; the others follow row_elements
// apart, values value_offset behind.
template <class T>
struct TileRows {
  const T* keys[kTile];
  int first, count;  // positions outside [first, count) borrow the first's row, and are masked

  // Positions [start, start + count) of a sequence.
  void locate(const AttentionCall& call, int sequence, int first_head, int64_t start, int from, int to) {
    const eb_paged_attention_desc& desc = *call.desc;
    const AttentionShape& shape = call.shape;
    const int32_t* table = call.args->block_table + int64_t{sequence} * desc.table_width;
    const T* cache = static_cast<const T*>(call.args->cache) + first_head * shape.row_elements;
    first = from, count = to;
    int64_t block = (start + from) / desc.block_size;
    int offset = static_cast<int>((start + from) % desc.block_size);
    for (int j = from; j < to; ++block, offset = 0) {
      const T* row = cache + table[block] * shape.block_stride + offset * shape.token_stride;
      const int end = smaller(to, j + int64_t{desc.block_size} - offset);
      for (; j < end; ++j, row += shape.token_stride) keys[j] = row;
    }
    for (int j = 0; j < from; ++j) keys[j] = keys[from];
    for (int j = to; j < kTile; ++j) keys[j] = keys[from];
  }
};

// Asks for the rows of a tile that comes next, some at a time: memory answers while the present tile is
// computed. A burst of requests would stall, and the innermost cache is too small for two tiles.
template <class T>
class Ahead {
 public:
  // `tile` may be null: nothing comes next.
  Ahead(const TileRows<T>* tile, const AttentionShape& shape, int head)
      : tile_(tile),
        keys_(tile == nullptr ? 0 : tile->first),
        values_(keys_),
        end_(tile == nullptr || shape.value_offset == 0 ? keys_ : tile->count),
        end_keys_(tile == nullptr ? 0 : tile->count),
        offset_(head * shape.row_elements),
        value_offset_(offset_ + shape.value_offset),
        bytes_(static_cast<int>(shape.row_elements * sizeof(T))) {}

  void fetch_keys(int rows) { fetch(&keys_, smaller(end_keys_, int64_t{keys_} + rows), offset_); }
  void fetch_values(int rows) { fetch(&values_, smaller(end_, int64_t{values_} + rows), value_offset_); }

 private:
  void fetch(int* next, int end, int64_t offset) const {
    constexpr int kLine = 64;
    for (; *next < end; ++*next) {
      const char* row = reinterpret_cast<const char*>(tile_->keys[*next] + offset);
      for (int i = 0; i < bytes_; i += kLine) __builtin_prefetch(row + i, 0, 2);
    }
  }

  const TileRows<T>* tile_;
  int keys_, values_, end_, end_keys_;
  int64_t offset_, value_offset_;
  int bytes_;
};

}  // namespace
}  // namespace enginebay
#endif
