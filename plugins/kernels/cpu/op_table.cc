// The ops this library implements, compared with plugins/ops.py by plugins/load.py.
#include "enginebay/abi.h"

extern "C" EB_API const char* eb_op_table(void) {
  return "PagedAttention=1;QuantLinear=1;QuantLinearF8Inputs=2;Embedding=1;AddRMSNorm=1;GatedActivation=1;"
         "LayerTail=1;QuantMoE=1;"
         "SpecVerify=1;Sample=1;CacheConvert=1";
}
