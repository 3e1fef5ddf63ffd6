#include "llama.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include <atomic>
#include <vector>

#include "dispatch.h"
#include "draws.h"
#include "ops.h"
#include "packing.h"

struct Llama {
    LlamaSpec spec;
    std::vector<LlamaLayer> layers;
    pthread_mutex_t use = PTHREAD_MUTEX_INITIALIZER;  // of the scratch
    Scratch scratch, step_logits;
    Packing packing;
};

namespace {

constexpr long FEW = 16;  // so few rows are normalised by every thread for itself, which saves a barrier

struct Buffers {
    float *x, *kept, *normed, *qkv, *attended, *inner, *cos, *sin;
};

Buffers lay_out(Scratch& scratch, const LlamaSpec& s, long rows, int threads) {
    const long head_rows = s.heads + 2 * s.kv_heads, half = s.dim / 2;
    const long sizes[] = {
        rows * s.hidden, rows * s.hidden, rows * s.hidden * (rows <= FEW ? threads : 1), rows * head_rows * s.dim,
        rows * s.heads * s.dim, rows * s.inner, rows * half, rows * half,
    };
    long total = 0, at[8];
    for (int i = 0; i < 8; i++) at[i] = total, total += (sizes[i] + 31) / 32 * 32;
    float* p = scratch.reserve(total);
    return {p + at[0], p + at[1], p + at[2], p + at[3], p + at[4], p + at[5], p + at[6], p + at[7]};
}

AttentionJob attention_job(const LlamaSpec& s, const Batch& b, const Buffers& buf, long layer, long window) {
    const long row = (s.heads + 2 * s.kv_heads) * s.dim;
    AttentionJob job = {};
    job.q = buf.qkv;
    job.k = job.q + s.heads * s.dim;
    job.v = job.k + s.kv_heads * s.dim;
    job.q_row = job.k_row = job.v_row = row;
    job.q_head = job.k_head = job.v_head = s.dim;
    job.k_pages = b.k_pages[layer];
    job.v_pages = b.v_pages[layer];
    job.out = buf.attended;
    job.heads = s.heads, job.kv_heads = s.kv_heads, job.dim = s.dim;
    job.page_size = b.page_size, job.table_width = b.table_width;
    job.scale = s.scale, job.window = window;
    job.positions = b.positions, job.visible = b.visible, job.mask = b.mask;
    job.tables = b.tables, job.starts = b.starts, job.write_at = b.write_at;
    job.segments = b.segments;
    return job;
}

// What one thread does. Every thread goes through the same steps and takes its share of each.
struct Forward {
    const LlamaSpec& s;
    const Batch& b;
    const Buffers& buf;
    const Team& team;
    const Kernels& k;

    void product(const Linear* l, const float* x, long rows, float* y, long columns, Ending ending) const {
        float* scratch = own_scratch().reserve(k.linear_scratch(rows, l->inputs));
        k.linear({l, x, l->inputs, rows, y, columns, columns, ending}, team.id, team.size, scratch);
        team.barrier();
    }

    const float* norm(const float* x, const float* weight, long rows) const {
        const bool own = rows <= FEW;
        float* y = buf.normed + (own ? team.id * rows * s.hidden : 0);
        for (long r = own ? 0 : team.begin(rows); r < (own ? rows : team.end(rows)); r++)
            k.rms_norm(x + r * s.hidden, weight, s.eps, s.hidden, y + r * s.hidden);
        if (!own) team.barrier();
        return y;
    }

    void embed() const {
        const long half = s.dim / 2;
        for (long r = team.begin(b.rows); r < team.end(b.rows); r++) {
            float* x = buf.x + r * s.hidden;
            if (s.embedding_kind == BF16)
                k.widen((const uint16_t*)s.embedding + b.ids[r] * s.hidden, s.hidden, x);
            else
                memcpy(x, (const float*)s.embedding + b.ids[r] * s.hidden, sizeof(float) * s.hidden);
            for (long i = 0; i < half; i++) {
                const float angle = (float)b.positions[r] * s.inverse_frequencies[i];
                buf.cos[r * half + i] = cosf(angle) * s.rotary_scale;
                buf.sin[r * half + i] = sinf(angle) * s.rotary_scale;
            }
        }
        team.barrier();
    }

    // Normalise and rotate queries and keys, and put keys and values in their pages.
    void place(const LlamaLayer& layer, const AttentionJob& job) const {
        const long heads = s.heads + s.kv_heads;
        for (long u = team.begin(b.rows * heads); u < team.end(b.rows * heads); u++) {
            const long row = u / heads, head = u % heads;
            float* x = buf.qkv + row * job.q_row + head * s.dim;
            const float* weight = head < s.heads ? layer.q_norm : layer.k_norm;
            if (weight) k.rms_norm(x, weight, s.eps, s.dim, x);
            k.rotate(x, buf.cos + row * s.dim / 2, buf.sin + row * s.dim / 2, s.dim);
            if (head >= s.heads) write_cache(job, b.row_segment[row], head - s.heads, row, row + 1);
        }
        team.barrier();
    }

    // After the last attention only the rows that get logits go on.
    void keep_wanted() const {
        const long width = s.heads * s.dim;
        for (long r = team.begin(b.wanted_rows); r < team.end(b.wanted_rows); r++) {
            memcpy(buf.kept + r * s.hidden, buf.x + b.wanted[r] * s.hidden, sizeof(float) * s.hidden);
            memcpy(buf.qkv + r * width, buf.attended + b.wanted[r] * width, sizeof(float) * width);
        }
        team.barrier();
    }

    // states: [wanted_rows, hidden], what the head reads; or null.
    void run(const LlamaLayer* layers, std::atomic<long>* tasks, float* logits, float* states) const {
        embed();
        for (long i = 0; i < s.layers; i++) {
            const LlamaLayer& layer = layers[i];
            const AttentionJob job = attention_job(s, b, buf, i, layer.window);
            const bool last = i == s.layers - 1;
            product(layer.qkv, norm(buf.x, layer.input_norm, b.rows), b.rows, buf.qkv, job.q_row, SET);
            place(layer, job);
            if (last && b.wanted_rows == 0) return;
            attend_all(job, tasks[i]);
            team.barrier();
            if (last) keep_wanted();
            float* x = last ? buf.kept : buf.x;
            const long rows = last ? b.wanted_rows : b.rows;
            product(layer.output, last ? buf.qkv : buf.attended, rows, x, s.hidden, ADD);
            product(layer.gate_up, norm(x, layer.mlp_norm, rows), rows, buf.inner, s.inner, GATE);
            product(layer.down, buf.inner, rows, x, s.hidden, ADD);
        }
        const float* last = norm(buf.kept, s.final_norm, b.wanted_rows);
        for (long r = team.begin(b.wanted_rows); states && r < team.end(b.wanted_rows); r++)
            memcpy(states + r * s.hidden, last + r * s.hidden, sizeof(float) * s.hidden);
        product(s.head, last, b.wanted_rows, logits, s.head->outputs, SET);
    }
};

}  // namespace

// The layers are copied; weights that they point to are not, and must outlive the model.
API Llama* cospec_llama_new(const LlamaSpec* spec) {
    Llama* model = new Llama;
    model->spec = *spec;
    model->layers.assign(spec->layer, spec->layer + spec->layers);
    return model;
}

API void cospec_llama_free(Llama* model) { delete model; }

namespace {

void forward(Llama* model, const Batch& batch, float* logits, float* states = nullptr) {
    const int threads = pool_threads();
    const Buffers buffers = lay_out(model->scratch, model->spec, batch.rows, threads);
    std::vector<std::atomic<long>> tasks(model->layers.size());
    in_parallel(threads, [&](const Team& team) {
        Forward{model->spec, batch, buffers, team, kernels()}.run(model->layers.data(), tasks.data(), logits, states);
    });
}

// The next token of every segment from its row of logits.
void choose(const Rollout& r, long segments, long vocab, long step) {
    in_parallel(r.q || r.confidence ? team_for(segments) : 1, [&](const Team& team) {
        std::vector<double> spare(r.confidence ? vocab : 0);
        for (long s = team.begin(segments); s < team.end(segments); s++) {
            const float* row = r.logits + step * r.step_logits + s * vocab;
            long token = kernels().argmax(row, vocab);
            double most = 0.0;
            if (token >= 0 && r.temperatures[s] > 0) {
                double* q = r.q + (s * r.depth + step) * vocab;
                Stream stream;
                memcpy(&stream, r.streams + 6 * s, sizeof stream);
                stream.counter[2] += step;
                most = softmax(row, vocab, r.temperatures[s], q);
                token = race(q, vocab, stream);
            } else if (token >= 0 && r.confidence) {
                most = softmax(row, vocab, 1.0, spare.data());
            }
            r.tokens[s * r.depth + step] = token;
            if (r.confidence) r.confidence[s * r.depth + step] = most;
        }
    });
}

}  // namespace

// logits: [wanted_rows, vocabulary]
API void cospec_llama(Llama* model, const Batch* batch, float* logits) {
    pthread_mutex_lock(&model->use);
    forward(model, *batch, logits);
    pthread_mutex_unlock(&model->use);
}

// Like cospec_llama, with the hidden states that the logits were read from: [wanted_rows, hidden].
API void cospec_llama_states(Llama* model, const Batch* batch, float* logits, float* states) {
    pthread_mutex_lock(&model->use);
    forward(model, *batch, logits, states);
    pthread_mutex_unlock(&model->use);
}

// Like cospec_llama, for a batch that is laid out here. 0, with nothing done, where something is amiss with it.
API int cospec_llama_score(Llama* model, const Cache* cache, const Given* given, float* logits) {
    Batch batch;
    pthread_mutex_lock(&model->use);
    const bool fine = model->packing.lay_out(*given, *cache, 0, &batch);
    if (fine) forward(model, batch, logits);
    pthread_mutex_unlock(&model->use);
    return fine;
}

namespace {

void roll_out(Llama* model, const Batch& first, Rollout rollout) {
    const long n = first.segments, vocab = model->spec.head->outputs;
    if (!rollout.logits) rollout.logits = model->step_logits.reserve(n * vocab);
    forward(model, first, rollout.logits);
    choose(rollout, n, vocab, 0);
    std::vector<int64_t> ids(n), positions(n), mask(n, 0), wanted(n);
    std::vector<int32_t> segment(n), visible(n), starts(n + 1), write_at(n);
    for (long s = 0; s < n; s++) {
        positions[s] = first.positions[first.wanted[s]];
        wanted[s] = segment[s] = starts[s] = s;
    }
    starts[n] = n;
    Batch next = first;
    next.ids = ids.data(), next.positions = positions.data(), next.row_segment = segment.data();
    next.visible = visible.data(), next.mask = mask.data(), next.starts = starts.data();
    next.write_at = write_at.data(), next.wanted = wanted.data();
    long active = n;  // the longest come first, so those that go on are always the first ones
    for (long step = 1; step < rollout.depth; step++) {
        while (rollout.depths[active - 1] <= step) active--;
        next.rows = next.wanted_rows = next.segments = active;
        for (long s = 0; s < active; s++) {
            const int64_t token = rollout.tokens[s * rollout.depth + step - 1];
            ids[s] = token < 0 ? 0 : token;
            write_at[s] = ++positions[s];
            visible[s] = positions[s] + 1;
        }
        forward(model, next, rollout.logits + step * rollout.step_logits);
        choose(rollout, active, vocab, step);
    }
}

}  // namespace

// Score the batch, one wanted row per segment and the last of it, then choose and feed tokens one by one, as many as each
// segment wants. The last one is not fed. The pages must reach as far as the tokens do. 0, with nothing done, where
// something is amiss with the batch.
API int cospec_llama_rollout(Llama* model, const Cache* cache, const Given* given, const Rollout* rollout) {
    Batch batch;
    pthread_mutex_lock(&model->use);
    const bool fine = model->packing.lay_out(*given, *cache, rollout->depth - 1, &batch);
    if (fine) roll_out(model, batch, *rollout);
    pthread_mutex_unlock(&model->use);
    return fine;
}
