// Which experts a token goes to, and with what weights.
#ifndef ENGINEBAY_MOE_ROUTE_H
#define ENGINEBAY_MOE_ROUTE_H

#include "enginebay/moe.h"

namespace enginebay {

// One token: `logits` and `bias` (or NULL) are [num_experts], `experts` and `weights` [top_k], best first.
// `scratch` holds 3 * num_experts floats. A NaN among the logits, or anything that makes a weight NaN, gives
// NaN weights and experts within range.
void route_token(const eb_moe_desc& desc, const float* logits, const float* bias, float* scratch,
                 int32_t* experts, float* weights);

}  // namespace enginebay
#endif
