// What happens to a token before it attends: norm and RoPE of its queries and keys, and the cache write.
#ifndef ENGINEBAY_ATTENTION_PREPARE_H
#define ENGINEBAY_ATTENTION_PREPARE_H

#include <cmath>
#include <type_traits>

#include "attention.h"
#include "cache_read.h"
#include "cache_write.h"
#include "simd_common.h"

namespace enginebay {
namespace {

// x / rms(x) * weight over one head.
template <class V>
inline void normalise_head(float* x, const float* weight, int dim, float epsilon) {
  auto squares = V::zero();
  for (int d = 0; d < dim; d += V::kWidth) {
    const auto value = load_first<V>(x + d, dim - d);
    squares = V::fma(value, value, squares);
  }
  const float factor = 1.0f / std::sqrt(V::sum(squares) / static_cast<float>(dim) + epsilon);
  for (int d = 0; d < dim; ++d) x[d] = x[d] * factor * weight[d];
}

inline void rotate_head(float* x, const float* cosines, const float* sines, int half, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
  } else {
    float* const y = x + half;
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = y[i];
      x[i] = a * cosines[i] - b * sines[i];
      y[i] = b * cosines[i] + a * sines[i];
    }
  }
}

template <class V, class T>
void prepare_tokens(const AttentionCall& call, int64_t first, int64_t last) {
  const eb_paged_attention_desc& desc = *call.desc;
  const eb_paged_attention_args& args = *call.args;
  const AttentionShape& shape = call.shape;
  const CacheScales& scales = call.scales;
  const CacheScales& written = std::is_same_v<T, Int4> ? call.offsets : scales;
  const int dim = desc.head_dim, half = desc.rotary_dim / 2;
  const bool interleaved = desc.rope_interleaved != 0;
  for (int64_t token = first; token < last; ++token) {
    const float* row = static_cast<const float*>(args.qkv) + token * shape.qkv_width;
    const int64_t at = half > 0 ? int64_t{args.position_ids[token]} * half : 0;
    const float *cosines = args.rope_cos + at, *sines = args.rope_sin + at;
    float* query = call.queries + token * desc.num_heads * shape.padded_dim;
    for (int head = 0; head < desc.num_heads; ++head, row += dim, query += shape.padded_dim) {
      std::memcpy(query, row, dim * sizeof(float));
      if (args.q_norm != nullptr) normalise_head<V>(query, args.q_norm, dim, desc.norm_epsilon);
      if (half > 0) rotate_head(query + shape.rotary_offset, cosines, sines, half, interleaved);
      const float* fold = scales_of(scales.keys, scales, head / shape.group);
      for (int d = 0; d < dim; ++d) query[d] *= desc.scale;
      // The cached keys are codes: their scales go into the query.
      for (int d = 0; fold != nullptr && d < dim; ++d) query[d] *= fold[d * scales.step];
      for (int d = dim; d < shape.padded_dim; ++d) query[d] = 0.0f;
    }
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    T* cached = static_cast<T*>(args.cache) + slot / desc.block_size * shape.block_stride +
                slot % desc.block_size * shape.token_stride;
    float key[kMaxHeadDim];
    for (int head = 0; head < desc.num_kv_heads; ++head, row += dim) {
      std::memcpy(key, row, dim * sizeof(float));
      if (args.k_norm != nullptr) normalise_head<V>(key, args.k_norm, dim, desc.norm_epsilon);
      if (half > 0) rotate_head(key + shape.rotary_offset, cosines, sines, half, interleaved);
      write_row(key, cached + head * shape.row_elements, dim, scales_of(written.keys, written, head),
                written.step);
    }
    if (shape.value_offset == 0) continue;
    for (int head = 0; head < desc.num_kv_heads; ++head, row += dim) {
      write_row(row, cached + shape.value_offset + head * shape.row_elements, dim,
                scales_of(written.values, written, head), written.step);
    }
  }
}

}  // namespace
}  // namespace enginebay
#endif
