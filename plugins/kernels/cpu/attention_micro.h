// The inner loops of PagedAttention: q . k and weights . v over a tile of positions.
//
// Both ways to score add in one order: along d in steps of the vector's width, then over its lanes by halves.
// So a row's scores are the same bits whether it came alone (straight) or with others (transposed keys).
#ifndef ENGINEBAY_ATTENTION_MICRO_H
#define ENGINEBAY_ATTENTION_MICRO_H

#include "attention.h"
#include "attention_rows.h"
#include "simd_common.h"

namespace enginebay {
namespace {

constexpr int kGroupRows = 4;  // rows that share a load of keys or values
constexpr int kRowsAhead = 8;  // rows of the next tile that are asked for at a time

// Keys whose sums with kRows queries fit in registers.
template <class V, int kRows>
constexpr int keys_together() {
  int keys = V::kWidth;
  while (keys > 1 && keys * kRows > V::kSums) keys /= 2;
  return keys;
}

// scores[r]: query r against kWidth rows of keys, each converted once for all queries.
template <class V, class T, int kRows, bool kPartial>
inline void score_straight(const float* const* queries, const T* const* key_rows, int dim,
                           typename V::F* scores) {
  constexpr int W = V::kWidth, kKeys = keys_together<V, kRows>();
  typename V::F all[kRows][W];
  for (int first = 0; first < W; first += kKeys) {
    typename V::F sums[kRows][kKeys];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kKeys; ++i) sums[r][i] = V::zero();
    }
    for (int d = 0; d < dim; d += W) {
      typename V::F query[kRows];
      for (int r = 0; r < kRows; ++r) query[r] = V::load(queries[r] + d);
      for (int i = 0; i < kKeys; ++i) {
        const auto key = load_row<V, kPartial>(key_rows[first + i], d, dim);
        for (int r = 0; r < kRows; ++r) sums[r][i] = V::fma(query[r], key, sums[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kKeys; ++i) all[r][first + i] = sums[r][i];
    }
  }
  for (int r = 0; r < kRows; ++r) scores[r] = V::sum_each(all[r]);
}

template <class V, class T, bool kPartial>
inline void score_straight(const float* const* queries, int rows, const T* const* key_rows, int dim,
                           typename V::F* scores) {
  static_assert(kGroupRows == 4);
  switch (rows) {
    case 1:
      return score_straight<V, T, 1, kPartial>(queries, key_rows, dim, scores);
    case 2:
      return score_straight<V, T, 2, kPartial>(queries, key_rows, dim, scores);
    case 3:
      return score_straight<V, T, 3, kPartial>(queries, key_rows, dim, scores);
    default:
      return score_straight<V, T, 4, kPartial>(queries, key_rows, dim, scores);
  }
}

template <class V>
struct Quad {
  typename V::F row[kGroupRows];
};

// Sums over every kStride-th lane from `lane` on, keys transposed: keys[d][position].
template <class V, int kStride>
__attribute__((always_inline)) inline Quad<V> lane_sums(const float* const (&queries)[kGroupRows],
                                                        const float* keys, int padded_dim, int lane) {
  Quad<V> sums;
  if constexpr (kStride == V::kWidth) {
    for (int r = 0; r < kGroupRows; ++r) sums.row[r] = V::zero();
    for (int d = lane; d < padded_dim; d += V::kWidth) {
      const auto k = V::load(keys + int64_t{d} * kTile);
      for (int r = 0; r < kGroupRows; ++r) sums.row[r] = V::fma(V::set1(queries[r][d]), k, sums.row[r]);
    }
  } else {
    sums = lane_sums<V, 2 * kStride>(queries, keys, padded_dim, lane);
    const Quad<V> others = lane_sums<V, 2 * kStride>(queries, keys, padded_dim, lane + kStride);
    for (int r = 0; r < kGroupRows; ++r) sums.row[r] = V::add(sums.row[r], others.row[r]);
  }
  return sums;
}

// Four queries against kWidth positions.
template <class V>
inline Quad<V> score_transposed(const float* const (&queries)[kGroupRows], const float* keys,
                                int padded_dim) {
  return lane_sums<V, 1>(queries, keys, padded_dim, 0);
}

// sums[r] = sums[r] * factors[r] + weights[r][from..to) . values[from..to), for 1 to kGroupRows rows.
struct Accumulation {
  float* sums;           // [rows, padded_dim]
  const float* weights;  // [rows, kTile]
  const float* factors;  // [rows]
  int rows, dim, padded_dim, from, to;
};

// Columns d to d + kCols vectors; kPartial: the row ends within the only one.
template <class V, class T, class Next, int kRows, int kCols, bool kPartial>
inline void accumulate_columns(const Accumulation& work, const T* const* value_rows, int d, Next* ahead) {
  constexpr int W = V::kWidth;
  typename V::F sums[kRows][kCols];
  float* const out = work.sums + d;
  const float* const weights = work.weights;
  const int dim = work.dim, to = work.to;
  for (int r = 0; r < kRows; ++r) {
    const auto factor = V::set1(work.factors[r]);
    for (int c = 0; c < kCols; ++c) {
      sums[r][c] = V::mul(factor, V::load(out + int64_t{r} * work.padded_dim + c * W));
    }
  }
  for (int j = work.from; j < to; ++j) {
    if (j % kRowsAhead == 0) ahead->fetch_values(kRowsAhead);
    typename V::F value[kCols];
    for (int c = 0; c < kCols; ++c) value[c] = load_row<V, kPartial>(value_rows[j], d + c * W, dim);
    for (int r = 0; r < kRows; ++r) {
      const auto weight = V::set1(weights[r * kTile + j]);
      for (int c = 0; c < kCols; ++c) sums[r][c] = V::fma(weight, value[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) V::store(out + int64_t{r} * work.padded_dim + c * W, sums[r][c]);
  }
}

template <class V, class T, class Next, int kRows>
inline void accumulate_some(const Accumulation& work, const T* const* value_rows, Next* ahead) {
  constexpr int kStep = V::kColumns * V::kWidth;
  int d = 0;
  for (; d + kStep <= work.dim; d += kStep) {
    accumulate_columns<V, T, Next, kRows, V::kColumns, false>(work, value_rows, d, ahead);
  }
  for (; d + V::kWidth <= work.dim; d += V::kWidth) {
    accumulate_columns<V, T, Next, kRows, 1, false>(work, value_rows, d, ahead);
  }
  if (d < work.dim) accumulate_columns<V, T, Next, kRows, 1, true>(work, value_rows, d, ahead);
}

template <class V, class T, class Next>
inline void accumulate_rows(const Accumulation& work, const T* const* value_rows, Next* ahead) {
  static_assert(kGroupRows == 4);
  switch (work.rows) {
    case 1:
      return accumulate_some<V, T, Next, 1>(work, value_rows, ahead);
    case 2:
      return accumulate_some<V, T, Next, 2>(work, value_rows, ahead);
    case 3:
      return accumulate_some<V, T, Next, 3>(work, value_rows, ahead);
    default:
      return accumulate_some<V, T, Next, 4>(work, value_rows, ahead);
  }
}

}  // namespace
}  // namespace enginebay
#endif
