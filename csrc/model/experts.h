// Mixtures of experts: which experts each row takes, and the rows of each expert.
#pragma once
#include <stdint.h>

#include <vector>

namespace cospec {

// Choices of R rows, K experts each. An *assignment* is a row and one of its experts. Assignments of an expert lie one
// after another, in ascending order of rows, so that the weights of an expert are read once for all of its rows.
struct ExpertChoices {
    std::vector<float> weights;    // [R, K], in descending order of probability
    std::vector<int32_t> experts;  // [R, K]
    std::vector<int32_t> places;   // [R, K]: the place of each assignment among all
    std::vector<int32_t> rows;     // [R * K]: the row of each place
    std::vector<int32_t> starts;   // [num_experts + 1]: the first place of each expert

    // logits: [rows, num_experts]. A row takes the experts with the largest probabilities, the lower ones on ties.
    // normalized: the weights of a row are divided by their sum.
    void choose(const float* logits, long rows, long num_experts, long per_row, bool normalized);
};

}  // namespace cospec
