// Which integer kernels a product runs on.
#ifndef ENGINEBAY_QUANT_LINEAR_CHOICE_H
#define ENGINEBAY_QUANT_LINEAR_CHOICE_H

#include "quant_linear_kernels.h"

namespace enginebay {

// The integer kernels for `rows` rows of x. Every kernel this processor can run gives the same answer, so
// they are chosen by speed: at the first product of a format and block in a process, each is tried on a small
// random product of 1, 16 and 64 rows, some 2 ms in all. One whose answer differs from the AVX2 kernels' is
// not used; the widest one wins unless another is faster by a tenth. ENGINEBAY_ISA forces one instead.
eb_status choose_integer(const eb_context* context, const QuantLinearLayout& layout, int64_t rows,
                         const IntegerKernels** kernels);

}  // namespace enginebay
#endif
