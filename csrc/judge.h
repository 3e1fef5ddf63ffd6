// Drafts judged by rows of logits: what a sequence brings, and what is decided.
#pragma once
#include "blend.h"
#include "ops.h"

enum Purpose { TARGET = 0, DRAFT = 1, ACCEPT = 2, RECOVER = 3 };  // see cospec.draws.Purpose

// How the law of a sequence follows from its logits; a temperature of 0 is a point mass on the likeliest token.
struct Shape {
    double temperature, top_p, min_p;
    int64_t top_k;
};

// What a request asks for, the same in every round.
struct Asked {
    int64_t rule;
    uint64_t seed;
    Shape shape;
};

// One sequence: its rows of logits and a draft, whose tokens stand at `place` of those of all, its parents behind them.
struct Case {
    int64_t first, row, count;  // rows [first, row) need only be numbers; [row, row + count) are judged by
    int64_t place, nodes;
    const double* q;  // [nodes, vocabulary], or null for point masses
    uint64_t base;
    Asked asked;
};

// `path` nodes are accepted and `token` comes after them; -1 where no row says which.
struct Verdict {
    int64_t path, token, bonus, broken;
};

// Judge every case by its rows of logits. nodes: tokens and parents of all drafts. found: the verdicts, then the paths, each
// where the case's tokens stand. Rows that are no numbers count only where the verdict rests on them.
API void cospec_judge(const Source* source, const Case* cases, long count, const int64_t* nodes, int64_t* found);
