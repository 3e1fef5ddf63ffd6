#include "model/experts.h"

#include <math.h>

namespace cospec {

namespace {

// The softmax of one row. NaN in the logits makes all probabilities NaN.
void softmax_row(const float* logits, long count, float* probabilities) {
    float largest = logits[0], sum = 0.0f;
    for (long e = 1; e < count; e++) largest = logits[e] > largest ? logits[e] : largest;
    for (long e = 0; e < count; e++) sum += probabilities[e] = expf(logits[e] - largest);
    for (long e = 0; e < count; e++) probabilities[e] /= sum;
}

}  // namespace

void ExpertChoices::choose(const float* logits, long num_rows, long num_experts, long per_row, bool normalized) {
    const long count = num_rows * per_row;
    weights.resize(count), experts.resize(count), places.resize(count), rows.resize(count);
    starts.assign(num_experts + 1, 0);
    std::vector<float> left(num_experts);
    for (long r = 0; r < num_rows; r++) {
        softmax_row(logits + r * num_experts, num_experts, left.data());
        float sum = 0.0f;
        for (long k = 0; k < per_row; k++) {
            long best = -1;
            for (long e = 0; e < num_experts; e++)
                if (left[e] != -1.0f && (best < 0 || left[e] > left[best])) best = e;
            experts[r * per_row + k] = (int32_t)best;
            sum += weights[r * per_row + k] = left[best];
            left[best] = -1.0f;  // taken
            starts[best + 1]++;
        }
        for (long k = 0; normalized && k < per_row; k++) weights[r * per_row + k] /= sum;
    }
    for (long e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (long i = 0; i < count; i++) {
        places[i] = next[experts[i]]++;
        rows[places[i]] = (int32_t)(i / per_row);
    }
}

}  // namespace cospec
