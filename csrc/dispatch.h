// Which kernels run on this processor.
#pragma once
#include "kernels.h"

const Kernels& kernels();
