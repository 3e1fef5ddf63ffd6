// What a drafter says at a position: its token, the next best one, and how sure it is of either.
#pragma once
#include <vector>

#include "draws.h"

// tokens and chances: [2]; -1 where there is none. `q` is spare room for the vocabulary.
void guess(const float* row, double temperature, const Stream& stream, std::vector<double>& q, int64_t* tokens,
           double* chances);
