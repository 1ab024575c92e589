#include "moe_route.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace enginebay {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kNothing = 1e-20f;  // keeps a sum of underflown scores from being divided by

// values[i] = e^(values[i] - max) / sum
void softmax(float* values, int count) {
  const float largest = *std::max_element(values, values + count);
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    values[i] = std::exp(values[i] - largest);
    sum += values[i];
  }
  for (int i = 0; i < count; ++i) values[i] /= sum;
}

// Whether index i comes before j when larger values come first and equal ones by index.
bool before(const float* values, int i, int j) {
  return values[i] > values[j] || (values[i] == values[j] && i < j);
}

// The first in that order of those after `previous`; previous -1: of all.
int next_best(const float* values, int count, int previous) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (previous >= 0 && !before(values, previous, i)) continue;
    if (best < 0 || before(values, i, best)) best = i;
  }
  return best;
}

// Sum of the two best of a group, or the best alone.
float group_rank(const float* ranked, int size, bool two) {
  float first = kMinusInfinity, second = kMinusInfinity;
  for (int i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, ranked[i]));
    first = std::max(first, ranked[i]);
  }
  return two && size > 1 ? first + second : first;
}

// Experts outside the best groups get -infinity. `ranks` holds num_groups floats.
void keep_best_groups(const eb_moe_desc& desc, bool two, float* ranked, float* ranks) {
  const int size = desc.num_experts / desc.num_groups;
  for (int g = 0; g < desc.num_groups; ++g) ranks[g] = group_rank(ranked + g * size, size, two);
  for (int g = 0; g < desc.num_groups; ++g) {
    int better = 0;
    for (int other = 0; other < desc.num_groups; ++other) better += before(ranks, other, g);
    if (better >= desc.top_groups) std::fill_n(ranked + g * size, size, kMinusInfinity);
  }
}

}  // namespace

void route_token(const eb_moe_desc& desc, const float* logits, const float* bias, float* scratch,
                 int32_t* experts, float* weights) {
  const int count = desc.num_experts;
  float* scores = scratch;
  float* ranked = scratch + count;
  bool valid = true;
  for (int e = 0; e < count; ++e) {
    scores[e] = desc.scoring == EB_SCORE_SIGMOID ? 1.0f / (1.0f + std::exp(-logits[e])) : logits[e];
    valid = valid && logits[e] == logits[e];
  }
  if (desc.scoring == EB_SCORE_SOFTMAX) softmax(scores, count);
  for (int e = 0; e < count; ++e) ranked[e] = bias == nullptr ? scores[e] : scores[e] + bias[e];
  for (int e = 0; e < count; ++e) valid = valid && ranked[e] == ranked[e];
  if (valid && desc.num_groups > 1) keep_best_groups(desc, bias != nullptr, ranked, scratch + 2 * count);
  int chosen = -1;
  float sum = 0.0f;
  for (int k = 0; k < desc.top_k; ++k) {
    chosen = valid ? next_best(ranked, count, chosen) : k;
    experts[k] = chosen;
    weights[k] = valid ? scores[chosen] : std::numeric_limits<float>::quiet_NaN();
    sum += weights[k];
  }
  if (desc.scoring == EB_SCORE_SOFTMAX_TOPK) softmax(weights, desc.top_k);
  if (desc.renormalize != 0) {
    for (int k = 0; k < desc.top_k; ++k) weights[k] /= sum + kNothing;
  }
  for (int k = 0; k < desc.top_k; ++k) weights[k] *= desc.routed_scale;
}

}  // namespace enginebay
