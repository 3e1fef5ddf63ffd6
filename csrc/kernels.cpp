// The kernels, compiled once for each instruction set with COSPEC_ISA naming it.
#include "kernels.h"
#include "attention_kernel.h"
#include "draws_kernel.h"
#include "linear_kernel.h"
#include "rows_kernel.h"

#define JOIN(a, b) a##b
#define TABLE(isa) JOIN(kernels_, isa)
#define TEXT(isa) #isa
#define NAME(isa) TEXT(isa)

extern const Kernels TABLE(COSPEC_ISA) = {
    NAME(COSPEC_ISA), linear, linear_scratch, attend, attend_scratch, rms_norm, rotate, widen, argmax,
    softmax<float>, softmax<double>, logarithm, weighted, race, first_uniform, surplus,
};
