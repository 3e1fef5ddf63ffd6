// Selects the kernels for this processor.
#pragma once
#include "ops/kernels.h"

namespace cospec {

const Kernels& kernels();

}  // namespace cospec
