// The joint rows of several models' logits, in double precision.
#include "blend.h"

#include <math.h>

#include <vector>

#include "draws.h"
#include "ops.h"

namespace {

void mix(const Source& s, long row, double* out, double* spare) {
    softmax(s.row(0, row), s.vocab, 1.0, out);
    for (long i = 0; i < s.vocab; i++) out[i] *= s.weights[0];
    for (long m = 1; m < s.members; m++) {
        softmax(s.row(m, row), s.vocab, 1.0, spare);
        for (long i = 0; i < s.vocab; i++) out[i] += s.weights[m] * spare[i];
    }
    logarithm(out, s.vocab);
}

template <class T> T most_of(const T* x, long count) {
    T most = x[0];
    for (long i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

void add(const Source& s, long row, double* out, double* spare) {
    const float* first = s.row(0, row);
    for (long i = 0; i < s.vocab; i++) out[i] = s.weights[0] * first[i];
    for (long m = 1; m < s.members; m++) {
        const float* other = s.row(m, row);
        for (long i = 0; i < s.vocab; i++) out[i] += s.weights[m] * other[i];
    }
    if (s.least > -INFINITY) {
        const double least = most_of(first, s.vocab) + s.least;
        for (long i = 0; i < s.vocab; i++) out[i] = first[i] < least ? -INFINITY : out[i];
    }
    double largest = softmax(out, s.vocab, 1.0, spare);  // of its likeliest token
    logarithm(&largest, 1);
    const double sum = most_of(out, s.vocab) - largest;
    for (long i = 0; i < s.vocab; i++) out[i] -= sum;
}

}  // namespace

void blend_row(const Source& source, long row, double* out, double* spare) {
    source.form == MIXTURE ? mix(source, row, out, spare) : add(source, row, out, spare);
}

// To [rows, vocab].
API void cospec_blend(const Source* source, long rows, double* out) {
    in_parallel(team_for(rows), [&](const Team& team) {
        std::vector<double> spare(source->vocab);
        for (long row = team.begin(rows); row < team.end(rows); row++)
            blend_row(*source, row, out + row * source->vocab, spare.data());
    });
}
