// SpecVerify and Sample: a sequence a task, in float64, with the random numbers the CUDA library draws.
#include "enginebay/spec_verify.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "../philox.h"
#include "float16.h"
#include "parallel.h"
#include "status.h"

namespace enginebay {
namespace {

struct Logits {
  void* data;
  eb_dtype dtype;
  int64_t vocab;

  float get(int64_t row, int64_t token) const {
    const int64_t at = row * vocab + token;
    switch (dtype) {
      case EB_F16:
        return fp16_to_float(static_cast<const uint16_t*>(data)[at]);
      case EB_BF16:
        return bf16_to_float(static_cast<const uint16_t*>(data)[at]);
      default:
        return static_cast<const float*>(data)[at];
    }
  }
  void set(int64_t row, int64_t token, float value) const {
    const int64_t at = row * vocab + token;
    switch (dtype) {
      case EB_F16:
        static_cast<uint16_t*>(data)[at] = float_to_fp16(value);
        break;
      case EB_BF16:
        static_cast<uint16_t*>(data)[at] = float_to_bf16(value);
        break;
      default:
        static_cast<float*>(data)[at] = value;
    }
  }
};

struct Sampling {
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0;
  uint64_t seed = 0;
  int64_t position = 0;

  Sampling(const eb_spec_verify_args& a, int64_t b) {
    if (a.temperature != nullptr) temperature = a.temperature[b];
    if (a.top_k != nullptr) top_k = a.top_k[b];
    if (a.top_p != nullptr) top_p = a.top_p[b];
    if (a.min_p != nullptr) min_p = std::min(a.min_p[b], 1.f);
    if (a.seeds != nullptr) seed = a.seeds[b];
    if (a.positions != nullptr) position = a.positions[b];
  }
};

// One row: its best token, and its distribution where it is sampled from.
class Row {
 public:
  Row(const Logits& logits, int64_t row) : values_(static_cast<size_t>(logits.vocab)) {
    for (size_t i = 0; i < values_.size(); ++i) {
      const float v = values_[i] = logits.get(row, static_cast<int64_t>(i));
      if (!(v < std::numeric_limits<float>::infinity())) bad_ = true;
      if (v > -std::numeric_limits<float>::infinity() &&
          (best_ < 0 || v > values_[static_cast<size_t>(best_)]))
        best_ = static_cast<int32_t>(i);
    }
    if (bad_) best_ = -1;
  }

  int32_t best() const { return best_; }

  // p after temperature, top-k, top-p and min-p. Only where best() is a token and the temperature is above 0.
  std::vector<double> distribution(const Sampling& s) const {
    std::vector<int32_t> order;
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i] > -std::numeric_limits<float>::infinity()) order.push_back(static_cast<int32_t>(i));
    const auto better = [&](int32_t a, int32_t b) {
      const float x = values_[static_cast<size_t>(a)], y = values_[static_cast<size_t>(b)];
      return x > y || (x == y && a < b);
    };
    size_t kept = order.size();
    if (s.top_k > 0) kept = std::min(kept, static_cast<size_t>(s.top_k));
    if (s.top_p < 1)
      std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                        better);
    else if (kept < order.size())
      std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), better);
    const double top = values_[static_cast<size_t>(best_)];
    const auto weight = [&](int32_t id) {
      return std::exp((values_[static_cast<size_t>(id)] - top) / s.temperature);
    };
    if (s.top_p < 1) {
      double all = 0, sum = 0;
      for (size_t i = 0; i < kept; ++i) all += weight(order[i]);
      size_t enough = 0;
      while (enough < kept && (enough == 0 || sum < s.top_p * all)) sum += weight(order[enough++]);
      kept = enough;
    }
    std::vector<double> p(values_.size(), 0.0);
    double total = 0;
    for (size_t i = 0; i < kept; ++i) {
      const double w = weight(order[i]);
      if (w < s.min_p) continue;
      p[static_cast<size_t>(order[i])] = w;
      total += w;
    }
    for (double& v : p) v /= total;
    return p;
  }

 private:
  std::vector<float> values_;
  int32_t best_ = -1;
  bool bad_ = false;
};

int32_t draw(const std::vector<double>& p, const Sampling& s, int row) {
  int32_t chosen = -1;
  double least = std::numeric_limits<double>::infinity();
  Random4 random{};
  for (size_t i = 0; i < p.size(); ++i) {
    if (i % 4 == 0) random = token_random(s.seed, s.position, row, static_cast<int>(i));
    if (!(p[i] > 0)) continue;
    const double cost = -std::log1p(-static_cast<double>(open_unit(random.value[i % 4]))) / p[i];
    if (cost < least) {
      least = cost;
      chosen = static_cast<int32_t>(i);
    }
  }
  return chosen;
}

// Takes a refused draft out of p: (p - q)+ renormalised. What is left as zeros only says that p equals q: p
// stays.
void refuse(std::vector<double>& p, int32_t token, const float* q) {
  std::vector<double> rest = p;
  if (q == nullptr) {
    if (token >= 0 && static_cast<size_t>(token) < rest.size()) rest[static_cast<size_t>(token)] = 0;
  } else {
    for (size_t i = 0; i < rest.size(); ++i) rest[i] = std::max(rest[i] - static_cast<double>(q[i]), 0.0);
  }
  const double total = std::accumulate(rest.begin(), rest.end(), 0.0);
  if (!(total > 0)) return;
  for (double& v : rest) v /= total;
  p = std::move(rest);
}

void penalise(const eb_spec_verify_args& a, const Logits& logits, int64_t row, int64_t b) {
  if (a.penalty_start == nullptr) return;
  const float repetition = a.repetition != nullptr ? a.repetition[b] : 1.f;
  const float presence = a.presence != nullptr ? a.presence[b] : 0.f;
  const float frequency = a.frequency != nullptr ? a.frequency[b] : 0.f;
  for (int32_t i = a.penalty_start[row]; i < a.penalty_start[row + 1]; ++i) {
    const int32_t token = a.penalty_tokens[i], count = a.penalty_counts[i];
    if (token < 0 || token >= logits.vocab) continue;
    float v = logits.get(row, token);
    v = v > 0.f ? v / repetition : v * repetition;
    if (count > 0) v -= presence + frequency * static_cast<float>(count);
    logits.set(row, token, v);
  }
}

void verify(const eb_spec_verify_args& a, const Logits& logits, int32_t max_depth, int64_t b) {
  const int64_t first = a.row_start != nullptr ? a.row_start[b] : b;
  const int nodes = a.row_start != nullptr ? static_cast<int>(a.row_start[b + 1] - first) : 1;
  const Sampling s(a, b);
  for (int node = 0; node < nodes; ++node) penalise(a, logits, first + node, b);
  int at = 0, accepted = 0;
  int32_t next_token = -1;
  while (nodes > 0) {
    const Row row(logits, first + at);
    next_token = row.best();
    if (row.best() < 0) break;
    std::vector<double> p;
    if (s.temperature > 0) p = row.distribution(s);
    int chosen = -1;
    for (int child = at + 1; child < nodes && chosen < 0 && accepted < max_depth; ++child) {
      const int parent = a.parents != nullptr ? a.parents[first + child] : child - 1;
      if (parent != at) continue;
      const int32_t token = a.draft_tokens[first + child];
      if (!(s.temperature > 0)) {
        if (token == row.best()) chosen = child;
        continue;
      }
      const bool known = token >= 0 && token < logits.vocab;
      const float* q = a.draft_probs != nullptr ? a.draft_probs + (first + child) * logits.vocab : nullptr;
      const double target = known ? p[static_cast<size_t>(token)] : 0;
      const double draft = q == nullptr ? 1.0 : known ? static_cast<double>(q[token]) : 0.0;
      if (target > 0 && accept_random(s.seed, s.position, child) * draft < target)
        chosen = child;
      else
        refuse(p, token, q);
    }
    if (chosen < 0) {
      if (s.temperature > 0) next_token = draw(p, s, at);
      break;
    }
    if (a.path != nullptr) a.path[b * max_depth + accepted] = chosen;
    at = chosen;
    ++accepted;
  }
  if (a.path != nullptr) std::fill(a.path + b * max_depth + accepted, a.path + (b + 1) * max_depth, -1);
  if (a.accepted != nullptr) a.accepted[b] = accepted;
  a.next_token[b] = next_token;
}

eb_status check(const eb_context* context, const eb_spec_verify_desc* d, int64_t sequences, int64_t rows) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (d == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: the descriptor is null");
  if (d->vocab <= 0 || d->max_depth < 0)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: vocab %d must be positive, max_depth %d not negative", d->vocab, d->max_depth);
  if (d->dtype != EB_F32 && d->dtype != EB_F16 && d->dtype != EB_BF16)
    return fail(context, EB_UNSUPPORTED, "SpecVerify: logits %s; it has float32, float16 and bfloat16",
                dtype_name(d->dtype));
  if (sequences < 0 || rows < sequences)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: %lld sequences, %lld rows; at least one a sequence",
                static_cast<long long>(sequences), static_cast<long long>(rows));
  return EB_OK;
}

// Row and node numbers are read by index: one outside would read elsewhere.
eb_status check_trees(const eb_context* context, const eb_spec_verify_args& a) {
  if (a.row_start == nullptr) return EB_OK;
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int32_t begin = a.row_start[b], end = a.row_start[b + 1];
    if (begin < 0 || begin >= end || end > a.rows)
      return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: sequence %lld has rows %d to %d of %lld",
                  static_cast<long long>(b), begin, end, static_cast<long long>(a.rows));
  }
  return EB_OK;
}

}  // namespace
}  // namespace enginebay

using namespace enginebay;  // NOLINT: the C entry points below

extern "C" eb_status eb_spec_verify_workspace_size(const eb_context* context, const eb_spec_verify_desc* desc,
                                                   int64_t sequences, int64_t rows, size_t* workspace_bytes) {
  EB_RETURN_IF_ERROR(check(context, desc, sequences, rows));
  if (workspace_bytes == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: workspace_bytes is null");
  *workspace_bytes = 0;
  return EB_OK;
}

extern "C" eb_status eb_spec_verify_run(const eb_context* context, const eb_spec_verify_desc* desc,
                                        const eb_spec_verify_args* args, void*, size_t) {
  EB_RETURN_IF_ERROR(check_context(context));
  if (args == nullptr) return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: the arguments are null");
  EB_RETURN_IF_ERROR(check(context, desc, args->sequences, args->rows));
  if (args->sequences == 0) return EB_OK;
  if (args->logits == nullptr || args->next_token == nullptr)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: logits or next_token is null");
  if (args->row_start == nullptr && args->rows != args->sequences)
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: %lld rows of %lld sequences without row_start",
                static_cast<long long>(args->rows), static_cast<long long>(args->sequences));
  if (args->row_start != nullptr && (args->draft_tokens == nullptr || args->accepted == nullptr))
    return fail(context, EB_INVALID_ARGUMENT, "SpecVerify: row_start without draft_tokens or accepted");
  const int penalties = (args->penalty_start != nullptr) + (args->penalty_tokens != nullptr) +
                        (args->penalty_counts != nullptr);
  if (penalties != 0 && penalties != 3)
    return fail(context, EB_INVALID_ARGUMENT,
                "SpecVerify: penalty_start, penalty_tokens and penalty_counts go together");
  EB_RETURN_IF_ERROR(check_trees(context, *args));
  const Logits logits{args->logits, desc->dtype, desc->vocab};
  std::atomic<bool> out_of_memory{false};
  parallel_for(context, static_cast<size_t>(args->sequences), [&](size_t b) {
    try {
      verify(*args, logits, desc->max_depth, static_cast<int64_t>(b));
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  });
  if (out_of_memory)
    return fail(context, EB_INTERNAL, "SpecVerify: out of memory for a row of %d logits", desc->vocab);
  return EB_OK;
}
