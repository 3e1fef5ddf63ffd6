// The candidate tokens of a drafter at one position: its token, the second choice, and the probability of each.
#pragma once
#include <vector>

#include "ops/sampling.h"

namespace cospec {

// Read the candidates from one row of logits. tokens and probs: [2]; a token is -1 where there is none.
// A sampled second choice has a probability of at least `min_second_prob`. `q` holds one number per token of the
// vocabulary and is overwritten.
void top_candidates(const float* row, double temperature, const RandomStream& stream, double min_second_prob,
    std::vector<double>& q, int64_t* tokens, double* probs);

}  // namespace cospec
