// The arithmetic of PagedAttention for one vector type V (simd_*.h) and one cache element type T.
#ifndef ENGINEBAY_ATTENTION_KERNEL_H
#define ENGINEBAY_ATTENTION_KERNEL_H

#include <optional>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "attention_micro.h"
#include "attention_rows.h"
#include "attention_tiers.h"
#include "simd_common.h"

namespace enginebay {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// Running softmax sums of some rows: weights are relative to e^maximum.
struct Sums {
  float* values;   // [rows, padded_dim]
  float* maximum;  // [rows]
  float* total;    // [rows]
};

// total += part, bit for bit the identity where either is empty (maximum -inf, zeros).
template <class V>
inline void merge_row(int dim, float* total_values, float* total_maximum, float* total_weight,
                      const float* part_values, float part_maximum, float part_weight) {
  const float top = *total_maximum > part_maximum ? *total_maximum : part_maximum;
  const float base = top == kMinusInfinity ? 0.0f : top;
  float factors[V::kWidth] = {*total_maximum - base, part_maximum - base};
  V::store(factors, exponential<V>(V::load(factors)));
  const auto keep = V::set1(factors[0]), take = V::set1(factors[1]);
  for (int d = 0; d < dim; d += V::kWidth) {
    const auto scaled = V::mul(take, V::load(part_values + d));
    V::store(total_values + d, V::fma(keep, V::load(total_values + d), scaled));
  }
  *total_weight = *total_weight * factors[0] + part_weight * factors[1];
  *total_maximum = top;
}

// One tile of queries and one key head, to be driven over splits and tiles of the cache in their order.
template <class V, class T>
class TileAttention {
 public:
  // `shared` is memory that heads of a job may share, `own` this head's: floats, see attention.h.
  TileAttention(const AttentionCall& call, const PlanTile& tile, int kv_head, float* shared, float* own)
      : call_(call),
        desc_(*call.desc),
        shape_(call.shape),
        tile_(tile),
        kv_head_(kv_head),
        dim_(desc_.head_dim),
        padded_(shape_.padded_dim),
        group_(shape_.group),
        rows_(tile.tokens * group_) {
    const auto take = [](float*& memory, int64_t count) {
      float* start = memory;
      memory += count;
      return start;
    };
    const int64_t sums = int64_t{rows_} * padded_;
    keys_ = take(shared, int64_t{kTile} * padded_);
    values_ = take(shared, int64_t{kTile} * padded_);
    weights_ = take(own, int64_t{kTile} * rows_);
    part_ = {take(own, sums), take(own, rows_), take(own, rows_)};
    total_ = {take(own, sums), take(own, rows_), take(own, rows_)};
    factor_ = take(own, rows_);
    kv_len_ = call.args->kv_len[tile.sequence];
    first_position_ = first_position(call, tile);
  }

  void begin() {
    if (alone() && !whole()) clear(total_);
  }
  void begin_split() { clear(part_); }
  void end_split(int split) {
    if (whole()) return;
    if (!alone()) return store_part(split);
    for (int row = 0; row < rows_; ++row) {
      merge_row<V>(padded_, total_.values + int64_t{row} * padded_, total_.maximum + row, total_.total + row,
                   part_.values + int64_t{row} * padded_, part_.maximum[row], part_.total[row]);
    }
  }
  void end() {
    if (alone()) finish(whole() ? part_ : total_);
  }

  void merge() {
    clear(total_);
    for (int split = tile_.first_split; split < tile_.end_split; ++split) {
      for (int row = 0; row < rows_; ++row) {
        const float* part = part_of(split, row);
        merge_row<V>(padded_, total_.values + int64_t{row} * padded_, total_.maximum + row,
                     total_.total + row, part, part[padded_], part[padded_ + 1]);
      }
    }
    finish(total_);
  }

  // Cache positions [start, start + tile.count), of key head `head` of those that tile's rows begin with.
  void attend_tile(const TileRows<T>& tile, int64_t start, int head, Ahead<T> ahead) {
    const int count = tile.count;
    const bool transposed = rows_ >= kRowsToTranspose;
    if constexpr (kExpands<T>) {
      expand(tile, head, false, transposed ? values_ : keys_, key_rows_);
    } else {
      for (int j = 0; j < kTile; ++j) key_rows_[j] = tile.key(j, head), value_rows_[j] = tile.value(j, head);
    }
    if (transposed) transpose_keys(tile.first, count);
    const bool converted = kExpands<T> || (transposed && !std::is_same_v<T, float>);
    if (converted) expand(tile, head, true, values_, float_rows_);
    for (int row = 0; row < rows_; row += kGroupRows) {
      const int rows = smaller(rows_ - row, kGroupRows);
      const int from = larger(first_visible_of(row) - start, 0);
      const int to = smaller(visible_end(row + rows - 1) - start, count);
      if (from >= to) continue;  // no row of the group sees this tile
      score(row, rows, from, to, transposed, &ahead);
      for (int r = row; r < row + rows; ++r) {
        weigh(r, larger(first_visible_of(r) - start, 0), smaller(visible_end(r) - start, count), from, to);
      }
      accumulate(row, rows, from, to, converted, &ahead);
    }
    ahead.fetch_keys(kTile);
    ahead.fetch_values(kTile);
  }

 private:
  static constexpr int kVectors = kTile / V::kWidth;
  using Element = std::conditional_t<kExpands<T>, float, T>;  // what the inner loops read

  bool alone() const { return tile_.part_token < 0; }
  // The only split's sums are the total: merged into nothing they would keep their bits.
  bool whole() const { return alone() && tile_.first_split + 1 == tile_.end_split; }
  // Row r is head r % group of token r / group.
  const float* query(int row) const {
    const int64_t token = tile_.first_token + row / group_;
    return call_.queries + (token * desc_.num_heads + kv_head_ * group_ + row % group_) * padded_;
  }
  int64_t position(int row) const { return first_position_ + row / group_; }
  int64_t visible_end(int row) const { return desc_.causal ? position(row) + 1 : kv_len_; }
  int64_t first_visible_of(int row) const { return first_visible(desc_, position(row)); }

  void clear(const Sums& sums) {
    std::memset(sums.values, 0, static_cast<size_t>(rows_) * padded_ * sizeof(float));
    std::memset(sums.total, 0, static_cast<size_t>(rows_) * sizeof(float));
    for (int row = 0; row < rows_; ++row) sums.maximum[row] = kMinusInfinity;
  }

  float* part_of(int split, int row) {
    const int64_t token = tile_.part_token + int64_t{split - tile_.first_split} * tile_.tokens + row / group_;
    return call_.parts + (token * desc_.num_heads + kv_head_ * group_ + row % group_) * (padded_ + 2);
  }
  void store_part(int split) {
    for (int row = 0; row < rows_; ++row) {
      float* part = part_of(split, row);
      std::memcpy(part, part_.values + int64_t{row} * padded_, padded_ * sizeof(float));
      part[padded_] = part_.maximum[row];
      part[padded_ + 1] = part_.total[row];
    }
  }

  // keys_[d][j], zeros from dim_ to padded_.
  void transpose_keys(int first, int count) {
    constexpr int W = V::kWidth;
    for (int j = first / W * W; j < count; j += W) {
      for (int d = 0; d < padded_; d += W) {
        typename V::F rows[W];
        for (int i = 0; i < W; ++i) {
          rows[i] = d < dim_ ? load_row<V, true>(key_rows_[j + i], d, dim_) : V::zero();
        }
        V::transpose(rows);
        for (int i = 0; i < W; ++i) V::store(keys_ + int64_t{d + i} * kTile + j, rows[i]);
      }
    }
  }

  // Keys or values as floats, once for all rows of the tile.
  void expand(const TileRows<T>& tile, int head, bool values, float* room, const float** rows) {
    for (int j = tile.first; j < tile.count; ++j) {
      float* const row = room + int64_t{j} * padded_;
      tile.template expand<V>(j, head, values, dim_, row);
      rows[j] = row;
    }
    for (int j = 0; j < tile.first; ++j) rows[j] = rows[tile.first];
    for (int j = tile.count; j < kTile; ++j) rows[j] = rows[tile.first];
  }

  // weights_[row][j] = q . k of the vectors of positions that overlap [from, to).
  void score(int row, int rows, int from, int to, bool transposed, Ahead<T>* ahead) {
    constexpr int W = V::kWidth;
    const float* queries[kGroupRows];
    for (int r = 0; r < kGroupRows; ++r) queries[r] = query(row + smaller(r, rows - 1));
    for (int j = from / W * W; j < to; j += W) {
      float* weights = weights_ + int64_t{row} * kTile + j;
      ahead->fetch_keys(W);
      Quad<V> scores;
      if (transposed) {
        scores = score_transposed<V>(queries, keys_ + j, padded_);
      } else if (dim_ % W == 0) {
        score_straight<V, Element, false>(queries, rows, key_rows_ + j, dim_, scores.row);
      } else {
        score_straight<V, Element, true>(queries, rows, key_rows_ + j, dim_, scores.row);
      }
      for (int r = 0; r < rows; ++r) V::store(weights + int64_t{r} * kTile, scores.row[r]);
    }
  }

  // Scores of [from, to) to softmax weights; [group_from, group_to) is what accumulate will read.
  void weigh(int row, int from, int to, int group_from, int group_to) {
    constexpr int W = V::kWidth;
    float* weights = weights_ + int64_t{row} * kTile;
    factor_[row] = 1.0f;
    const int first = group_from / W, last = (group_to + W - 1) / W;
    typename V::F scores[kVectors];
    auto top = V::set1(kMinusInfinity);
    for (int v = first; v < last; ++v) {
      auto x = V::load(weights + v * W);
      if (desc_.softcap > 0.0f) {
        const auto cap = V::set1(desc_.softcap);
        x = V::mul(cap, hyperbolic_tangent<V>(V::div(x, cap)));
      }
      if (v * W < from || v * W + W > to) x = V::keep_lanes(x, from - v * W, to - v * W, kMinusInfinity);
      scores[v] = x;
      top = V::max(x, top);
    }
    const float tile_top = V::largest(top);
    const float maximum = part_.maximum[row] > tile_top ? part_.maximum[row] : tile_top;
    const float base = maximum == kMinusInfinity ? 0.0f : maximum;
    auto sum = V::zero();
    for (int v = first; v < last; ++v) {
      const auto weight = exponential<V>(V::sub(scores[v], V::set1(base)));
      V::store(weights + v * W, weight);
      sum = V::add(sum, weight);
    }
    if (part_.maximum[row] != maximum) {  // else the factor is e^0, 1
      float factor[V::kWidth];
      V::store(factor, exponential<V>(V::set1(part_.maximum[row] - base)));
      factor_[row] = factor[0];
      part_.maximum[row] = maximum;
    }
    part_.total[row] = part_.total[row] * factor_[row] + V::sum(sum);
  }

  // part += weights . values; what a row does not see has weight 0.
  void accumulate(int row, int rows, int from, int to, bool converted, Ahead<T>* ahead) {
    const Accumulation work{part_.values + int64_t{row} * padded_,
                            weights_ + int64_t{row} * kTile,
                            factor_ + row,
                            rows,
                            dim_,
                            padded_,
                            from,
                            to};
    if (kExpands<T> || converted) {
      accumulate_rows<V>(work, float_rows_, ahead);
    } else {
      accumulate_rows<V>(work, value_rows_, ahead);
    }
  }

  // Sinks join the total weight last; then the output is the weighted mean.
  void finish(const Sums& sums) {
    for (int row = 0; row < rows_; ++row) {
      const int head = kv_head_ * group_ + row % group_;
      float* values = sums.values + int64_t{row} * padded_;
      if (call_.args->sinks != nullptr) {
        static constexpr float kNothing[kMaxHeadDim] = {};
        merge_row<V>(padded_, values, sums.maximum + row, sums.total + row, kNothing, call_.args->sinks[head],
                     1.0f);
      }
      const int64_t token = tile_.first_token + row / group_;
      const int width = shape_.value_dim;
      float* out = static_cast<float*>(call_.args->attention) + (token * desc_.num_heads + head) * width;
      const auto total = V::set1(sums.total[row]);
      const CacheScales& scales = call_.scales;
      const float* fold = scales.values == nullptr ? nullptr : scales.values + kv_head_ * scales.head_stride;
      for (int d = 0; d < width; d += V::kWidth) {
        auto mean = V::div(V::add(V::load(values + d), V::zero()), total);  // -0, as merging does, to 0
        if (fold != nullptr) {
          mean = V::mul(mean, scales.step > 0 ? load_first<V>(fold + d, width - d) : V::set1(*fold));
        }
        store_first<V>(out + d, mean, width - d);
      }
    }
  }

  const AttentionCall& call_;
  const eb_paged_attention_desc& desc_;
  const AttentionShape& shape_;
  const PlanTile& tile_;
  const int kv_head_, dim_, padded_, group_, rows_;
  int64_t kv_len_, first_position_;
  float *keys_, *values_, *weights_, *factor_;
  Sums part_, total_;
  const Element* key_rows_[kTile];
  const Element* value_rows_[kTile];
  const float* float_rows_[kTile];  // rows of values_
};

// Locates the tile of positions from `start` on of a job that ends before `end`.
template <class T>
void locate(const AttentionCall& call, const AttentionJob& job, int64_t start, int64_t end,
            TileRows<T>* rows) {
  const PlanTile& tile = *job.tile;
  const int64_t first = first_visible(*call.desc, first_position(call, tile)) - start;
  rows->locate(call, tile.sequence, job.first_head, start, larger(first, 0), smaller(end - start, kTile));
}

// A job. Few rows are bound by memory: their heads, neighbours in the cache, take turns at every tile of
// positions, and the next tile is asked for meanwhile. Many rows are bound by arithmetic: one head after the
// other, keys transposed.
template <class V, class T>
void attend_heads(const AttentionCall& call, const AttentionJob& job, const AttentionJob* following,
                  float* scratch) {
  using Head = TileAttention<V, T>;
  const int rows = job.tile->tokens * call.shape.group;
  const int together = rows < kRowsToTranspose ? kHeadsTogether : 1;
  float* const own = scratch + attention_shared_floats(call.shape);
  TileRows<T> tiles[2];
  for (int done = 0; done < job.heads; done += together) {
    const AttentionJob turn{job.tile, job.first_head + done, smaller(job.heads - done, together),
                            job.first_split, job.end_split};
    std::optional<Head> group[kHeadsTogether];
    for (int i = 0; i < turn.heads; ++i) {
      float* const mine = own + i * attention_own_floats(call.shape, rows);
      group[i].emplace(call, *turn.tile, turn.first_head + i, scratch, mine);
      group[i]->begin();
    }
    const Span all = span(call, turn);
    TileRows<T>*now = &tiles[0], *next = &tiles[1];
    locate(call, turn, all.begin, all.end, now);
    for (int split = turn.first_split; split < turn.end_split; ++split) {
      for (int i = 0; i < turn.heads; ++i) group[i]->begin_split();
      const int64_t end = smaller64((int64_t{split} + 1) * kSplit, all.end);
      for (int64_t start = larger64(int64_t{split} * kSplit, all.begin); start < end; start += kTile) {
        int heads_ahead = 0;
        if (start + kTile < all.end) {
          locate(call, turn, start + kTile, all.end, next);
          heads_ahead = together > 1 ? turn.heads : 0;
        } else if (following != nullptr && together > 1) {
          const Span then = span(call, *following);
          locate(call, *following, then.begin, then.end, next);
          heads_ahead = following->heads;
        }
        for (int i = 0; i < turn.heads; ++i) {
          group[i]->attend_tile(*now, start, i,
                                {i < heads_ahead ? next : nullptr, i, call.shape.value_offset > 0});
        }
        std::swap(now, next);
      }
      for (int i = 0; i < turn.heads; ++i) group[i]->end_split(split);
    }
    for (int i = 0; i < turn.heads; ++i) group[i]->end();
  }
}

}  // namespace
}  // namespace enginebay
#endif
