// Where the rows of logits that a law is made of come from: from one model, or from several whose rows are joined.
#pragma once
#include <stdint.h>

enum Form {
    OWN = 0,      // the first member's logits as they are
    MIXTURE = 1,  // log sum_m weights[m] softmax(logits[m])
    LINEAR = 2    // log softmax(sum_m weights[m] logits[m])
};

struct Source {
    const float* const* logits;  // `members` times [rows, vocab]
    const double* weights;       // of each member
    int64_t members, vocab, form;
    double least;  // of LINEAR: tokens that the first member finds further below its likeliest one are ruled out
    const float* row(long member, long row) const { return logits[member] + row * vocab; }
};

// One row of a blend in double precision, [vocab]; one that is no numbers stays so. `spare` is as long.
void blend_row(const Source& source, long row, double* out, double* spare);
