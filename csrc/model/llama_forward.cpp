#include "model/llama_forward.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include <atomic>
#include <vector>

#include "model/experts.h"
#include "model/forward_buffers.h"
#include "model/input_batch.h"
#include "ops/block_formats.h"
#include "ops/dispatch.h"
#include "ops/ops.h"
#include "ops/sampling.h"

namespace cospec {

struct LlamaModel {
    LlamaConfig config;
    std::vector<LlamaLayer> layers;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards the scratch memory
    Scratch scratch, step_logits, attention_states;
    ExpertChoices choices;
    InputBatchBuilder batch_builder;
};

namespace {

// The work of one thread. All threads take the same steps and compute their part of each.
struct Forward {
    const LlamaConfig& s;
    const InputBatch& b;
    const Buffers& buf;
    const ForwardIO& io;
    ExpertChoices& choices;
    const Team& team;
    const Kernels& k;

    // This thread's part of a product. Products of one step need no barrier between them.
    void product_part(const Linear* l, const float* x, long rows, float* y, long columns, Epilogue epilogue) const {
        float* scratch = thread_scratch().reserve(k.linear_scratch(rows, l->inputs));
        k.linear({l, x, l->inputs, rows, y, columns, columns, epilogue}, team, scratch);
    }

    void product(const Linear* l, const float* x, long rows, float* y, long columns, Epilogue epilogue) const {
        product_part(l, x, rows, y, columns, epilogue);
        team.barrier();
    }

    // Products of the same input, side by side in the rows of y.
    void project(const LlamaLayer& layer, const float* x, float* y, long y_row) const {
        for (const Linear* l : {layer.q, layer.k, layer.v}) {
            if (!l) continue;
            float* scratch = thread_scratch().reserve(k.linear_scratch(b.num_rows, l->inputs));
            k.linear({l, x, l->inputs, b.num_rows, y, y_row, l->outputs, STORE}, team, scratch);
            y += l->outputs;
        }
        team.barrier();
    }

    const float* norm(const float* x, const float* weight, long rows) const {
        if (!weight) return x;
        const bool redundant = rows <= REDUNDANT_NORM_ROWS;
        float* y = buf.normed + (redundant ? team.id * rows * s.hidden : 0);
        for (long r = redundant ? 0 : team.begin(rows); r < (redundant ? rows : team.end(rows)); r++)
            k.rms_norm(x + r * s.hidden, weight, s.eps, s.hidden, y + r * s.hidden);
        if (!redundant) team.barrier();
        return y;
    }

    // x += the product, summed over the shards, or its norm times the residual factor.
    void add(const Linear* l, const float* in, const float* weight, long rows, float* x) const {
        if (!has_branches(s) && !io.sum) return product(l, in, rows, x, s.hidden, ADD);
        product(l, in, rows, buf.branch, s.hidden, STORE);
        if (io.sum) {
            if (team.id == 0) io.sum(buf.branch, rows * s.hidden);
            team.barrier();
        }
        add_branch(weight, rows, x);
    }

    // x += buf.branch, or its norm times the residual factor.
    void add_branch(const float* weight, long rows, float* x) const {
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            float* y = buf.branch + r * s.hidden;
            if (weight) k.rms_norm(y, weight, s.eps, s.hidden, y);
            for (long i = 0; i < s.hidden; i++) x[r * s.hidden + i] += s.residual_factor * y[i];
        }
        team.barrier();
    }

    void activate(const Linear* l, const float* in, long rows) const {
        if (!s.gelu) return product(l, in, rows, buf.intermediate, s.intermediate, SWIGLU);
        product(l, in, rows, buf.gate_up, l->outputs, STORE);
        for (long u = team.begin(rows * s.intermediate); u < team.end(rows * s.intermediate); u++) {
            const long row = u / s.intermediate, column = u % s.intermediate;
            const float* pair = buf.gate_up + row * l->outputs + column / 32 * 64 + column % 32;
            const float g = pair[0], inner = 0.79788456080286535588f * (g + 0.044715f * g * g * g);
            buf.intermediate[u] = 0.5f * g * (1.0f + tanhf(inner)) * pair[32];
        }
        team.barrier();
    }

    // A product of each expert with its rows; experts without rows are not read.
    void expert_products(
        const Linear* const* experts, const float* x, float* y, long columns, Epilogue epilogue) const {
        for (long e = 0; e < s.num_experts; e++) {
            const long first = choices.starts[e], rows = choices.starts[e + 1] - first;
            if (rows)
                product_part(experts[e], x + first * experts[e]->inputs, rows, y + first * columns, columns, epilogue);
        }
        team.barrier();
    }

    // buf.branch = the weighted results of each row's experts, summed in descending order of probability.
    void mixture(const LlamaLayer& layer, const float* in, long rows) const {
        product(layer.router, in, rows, buf.router, s.num_experts, STORE);
        if (team.id == 0) choices.choose(buf.router, rows, s.num_experts, s.experts_per_token, s.normalized_experts);
        team.barrier();
        const long places = rows * s.experts_per_token;
        copy_rows_of(in, choices.rows.data(), places, buf.expert_rows);
        team.barrier();
        expert_products(layer.expert_gate_up, buf.expert_rows, buf.expert_intermediate, s.expert_intermediate, SWIGLU);
        expert_products(layer.expert_down, buf.expert_intermediate, buf.expert_results, s.hidden, STORE);
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            float* y = buf.branch + r * s.hidden;
            memset(y, 0, sizeof(float) * s.hidden);
            for (long i = r * s.experts_per_token; i < (r + 1) * s.experts_per_token; i++) {
                const float *result = buf.expert_results + choices.places[i] * s.hidden, weight = choices.weights[i];
                for (long j = 0; j < s.hidden; j++) y[j] += weight * result[j];
            }
        }
        team.barrier();
    }

    void feed_forward(const LlamaLayer& layer, const float* in, long rows, float* x) const {
        if (layer.router) {
            mixture(layer, in, rows);
            return add_branch(layer.after_mlp, rows, x);
        }
        activate(layer.gate_up, in, rows);
        add(layer.down, buf.intermediate, layer.after_mlp, rows, x);
    }

    void finish_logits(float* logits, long rows) const {
        if (s.logit_factor == 1.0f && s.logit_softcap == 0.0f) return;
        const long count = rows * s.head->outputs;
        for (long i = team.begin(count); i < team.end(count); i++) {
            const float y = logits[i] * s.logit_factor;
            logits[i] = s.logit_softcap == 0.0f ? y : s.logit_softcap * tanhf(y / s.logit_softcap);
        }
        team.barrier();
    }

    void embed(float* x, int64_t id) const {
        const long table_row = file_row_bytes(s.embedding_format, s.hidden);
        if (table_row)
            dequantize_row(s.embedding_format, (const uint8_t*)s.embedding + id * table_row, s.hidden, x);
        else if (s.embedding_format == BF16)
            k.bf16_to_float((const uint16_t*)s.embedding + id * s.hidden, s.hidden, x);
        else if (s.embedding_format == FP16)
            k.fp16_to_float((const uint16_t*)s.embedding + id * s.hidden, s.hidden, x);
        else
            memcpy(x, (const float*)s.embedding + id * s.hidden, sizeof(float) * s.hidden);
        if (s.embedding_factor != 1.0f)
            for (long i = 0; i < s.hidden; i++) x[i] *= s.embedding_factor;
    }

    // The states before the first layer, and the rotary embedding of each row.
    void begin() const {
        const long turns = s.num_tables * s.rotated / 2;
        for (long r = team.begin(b.num_rows); r < team.end(b.num_rows); r++) {
            float* x = buf.x + r * s.hidden;
            if (io.stage_input)
                memcpy(x, io.stage_input + r * s.hidden, sizeof(float) * s.hidden);
            else
                embed(x, b.ids[r]);
            for (long i = 0; i < turns; i++) {
                const float angle = (float)b.positions[r] * s.inverse_frequencies[i];
                buf.cos[r * turns + i] = cosf(angle) * s.rotary_scale;
                buf.sin[r * turns + i] = sinf(angle) * s.rotary_scale;
            }
        }
        team.barrier();
    }

    // Normalize and rotate queries and keys, and write keys and values to their pages.
    void write_kv(const LlamaLayer& layer, const AttentionParams& params) const {
        const long heads = s.heads + s.kv_heads, half = s.rotated / 2, turns = s.num_tables * half;
        if (s.wide_norms) {
            for (long r = team.begin(b.num_rows); r < team.end(b.num_rows); r++) {
                float *q = buf.qkv + r * params.q_row, *key = q + s.heads * s.dim;
                k.rms_norm(q, layer.q_norm, s.eps, s.heads * s.dim, q);
                k.rms_norm(key, layer.k_norm, s.eps, s.kv_heads * s.dim, key);
            }
            team.barrier();
        }
        for (long u = team.begin(b.num_rows * heads); u < team.end(b.num_rows * heads); u++) {
            const long row = u / heads, head = u % heads;
            float* x = buf.qkv + row * params.q_row + head * s.dim;
            const float* weight = head < s.heads ? layer.q_norm : layer.k_norm;
            if (weight && !s.wide_norms) k.rms_norm(x, weight, s.eps, s.dim, x);
            const long turn = row * turns + layer.rotary * half;
            if (layer.rotary >= 0) k.apply_rotary(x, buf.cos + turn, buf.sin + turn, s.rotated);
            if (head >= s.heads) write_cache(params, b.row_sequence[row], head - s.heads, row, row + 1);
        }
        team.barrier();
    }

    // After the last attention only the rows that get logits go on.
    void gather_logit_rows() const {
        const long width = s.heads * s.dim;
        for (long r = team.begin(b.num_logit_rows); r < team.end(b.num_logit_rows); r++) {
            memcpy(buf.gathered + r * s.hidden, buf.x + b.logit_rows[r] * s.hidden, sizeof(float) * s.hidden);
            memcpy(buf.qkv + r * width, buf.attended + b.logit_rows[r] * width, sizeof(float) * width);
        }
        team.barrier();
    }

    void copy_rows_of(const float* from, const int32_t* numbers, long rows, float* to) const {
        for (long r = team.begin(rows); r < team.end(rows); r++)
            memcpy(to + r * s.hidden, from + numbers[r] * s.hidden, sizeof(float) * s.hidden);
    }

    void copy_rows(const float* from, long rows, float* to) const {
        for (long r = team.begin(rows); r < team.end(rows); r++)
            memcpy(to + r * s.hidden, from + r * s.hidden, sizeof(float) * s.hidden);
    }

    void run(const LlamaLayer* layers, std::atomic<long>* tasks) const {
        begin();
        for (long i = 0; i < s.num_layers; i++) {
            const LlamaLayer& layer = layers[i];
            const AttentionParams params = attention_params(s, b, buf, i, layer.window);
            const bool last = !io.stage_output && i == s.num_layers - 1;
            project(layer, norm(buf.x, layer.attention_norm, b.num_rows), buf.qkv, params.q_row);
            write_kv(layer, params);
            if (last && b.num_logit_rows == 0) return;
            run_attention(params, team, tasks[i], buf.states);
            team.barrier();
            if (last) gather_logit_rows();
            float* x = last ? buf.gathered : buf.x;
            const long rows = last ? b.num_logit_rows : b.num_rows;
            add(layer.output, last ? buf.qkv : buf.attended, layer.after_attention, rows, x);
            feed_forward(layer, norm(x, layer.mlp_norm, rows), rows, x);
        }
        if (io.stage_output) return copy_rows(buf.x, b.num_rows, io.stage_output);
        if (!io.logits) return;
        const float* last = norm(buf.gathered, s.final_norm, b.num_logit_rows);
        if (io.states) copy_rows(last, b.num_logit_rows, io.states);
        product(s.head, last, b.num_logit_rows, io.logits, s.head->outputs, STORE);
        finish_logits(io.logits, b.num_logit_rows);
    }
};

}  // namespace

// The layers are copied. Their weights are not, and must outlive the model.
API LlamaModel* cospec_llama_new(const LlamaConfig* config) {
    LlamaModel* model = new LlamaModel;
    model->config = *config;
    model->layers.assign(config->layers, config->layers + config->num_layers);
    model->config.layers = model->layers.data();
    return model;
}

API void cospec_llama_free(LlamaModel* model) { delete model; }

namespace {

void forward(LlamaModel* model, const InputBatch& batch, const ForwardIO& io) {
    const int threads = num_threads();
    Buffers buffers = buffers_for(model->scratch, model->config, batch.num_rows, threads, io.sum != nullptr);
    const AttentionParams params = attention_params(model->config, batch, buffers, 0, 0);
    buffers.states = model->attention_states.reserve(attention_states(params, threads));
    std::vector<std::atomic<long>> tasks(model->layers.size());
    in_parallel(threads, [&](const Team& team) {
        Forward{model->config, batch, buffers, io, model->choices, team, kernels()}.run(
            model->layers.data(), tasks.data());
    });
}

// Choose the next token of every sequence from its row of logits.
void select_tokens(const Rollout& r, long num_sequences, long vocab, long step) {
    in_parallel(r.q || r.confidence ? threads_for(num_sequences) : 1, [&](const Team& team) {
        std::vector<double> scratch(r.confidence ? vocab : 0);
        for (long s = team.begin(num_sequences); s < team.end(num_sequences); s++) {
            const float* row = r.logits + step * r.logits_stride + s * vocab;
            long token = kernels().argmax(row, vocab);
            double top_prob = 0.0;
            if (token >= 0 && r.temperatures[s] > 0) {
                double* q = r.q + (s * r.max_depth + step) * vocab;
                RandomStream stream;
                memcpy(&stream, r.streams + 6 * s, sizeof stream);
                stream.counter[2] += step;
                top_prob = softmax(row, vocab, r.temperatures[s], q);
                token = exponential_sample(q, vocab, stream);
            } else if (token >= 0 && r.confidence) {
                top_prob = softmax(row, vocab, 1.0, scratch.data());
            }
            r.tokens[s * r.max_depth + step] = token;
            if (r.confidence) r.confidence[s * r.max_depth + step] = top_prob;
        }
    });
}

}  // namespace

// logits: [num_logit_rows, vocab_size]
API void cospec_llama_forward(LlamaModel* model, const InputBatch* batch, float* logits) {
    pthread_mutex_lock(&model->lock);
    forward(model, *batch, {logits});
    pthread_mutex_unlock(&model->lock);
}

// Like cospec_llama_forward, with the hidden states that the head reads: [num_logit_rows, hidden].
API void cospec_llama_hidden_states(LlamaModel* model, const InputBatch* batch, float* logits, float* states) {
    pthread_mutex_lock(&model->lock);
    forward(model, *batch, {logits, states});
    pthread_mutex_unlock(&model->lock);
}

// Like cospec_llama_forward, for a batch that is built here. Returns 0 and does nothing where the batch is invalid.
API int cospec_llama_score(LlamaModel* model, const KVCacheView* cache, const BatchView* view, float* logits) {
    InputBatch batch;
    pthread_mutex_lock(&model->lock);
    const bool valid = model->batch_builder.build(*view, *cache, 0, &batch);
    if (valid) forward(model, batch, {logits});
    pthread_mutex_unlock(&model->lock);
    return valid;
}

// Like cospec_llama_score, for a part of the model.
API int cospec_llama_stage(LlamaModel* model, const KVCacheView* cache, const BatchView* view, const StageIO* io) {
    InputBatch batch;
    pthread_mutex_lock(&model->lock);
    const bool valid = model->batch_builder.build(*view, *cache, 0, &batch);
    if (valid) forward(model, batch, {io->logits, nullptr, io->input, io->output, io->sum});
    pthread_mutex_unlock(&model->lock);
    return valid;
}

namespace {

// Count the hits of each sequence's rows but the last. Move the last rows of logits [num_logit_rows, vocab] together.
void take_last_rows(const InputBatch& batch, const Rollout& rollout, long vocab, float* logits) {
    for (long s = 0, row = 0; s < batch.num_sequences; s++, row++) {
        const long last = batch.starts[s + 1] - 1;
        long hits = 0;
        for (; batch.logit_rows[row] < last; row++)
            hits += kernels().argmax(logits + row * vocab, vocab) == batch.ids[batch.logit_rows[row] + 1];
        if (rollout.hits) rollout.hits[s] = hits;
        memmove(logits + s * vocab, logits + row * vocab, vocab * sizeof(float));
    }
}

void rollout_steps(LlamaModel* model, const InputBatch& first, Rollout rollout) {
    const long n = first.num_sequences, vocab = model->config.head->outputs;
    const bool last_rows_only = first.num_logit_rows == n;
    float* logits = rollout.logits;
    if (!logits || !last_rows_only) logits = model->step_logits.reserve(first.num_logit_rows * vocab);
    forward(model, first, {logits});
    if (!last_rows_only) {
        take_last_rows(first, rollout, vocab, logits);
        if (rollout.logits) memcpy(rollout.logits, logits, n * vocab * sizeof(float));
    }
    if (!rollout.logits) rollout.logits = logits;
    select_tokens(rollout, n, vocab, 0);
    std::vector<int64_t> ids(n), positions(n), mask(n, 0), logit_rows(n);
    std::vector<int32_t> sequence(n), visible(n), starts(n + 1), write_at(n);
    for (long s = 0; s < n; s++) {
        positions[s] = first.positions[first.starts[s + 1] - 1];
        logit_rows[s] = sequence[s] = starts[s] = s;
    }
    starts[n] = n;
    InputBatch next = first;
    next.ids = ids.data(), next.positions = positions.data(), next.row_sequence = sequence.data();
    next.visible = visible.data(), next.mask = mask.data(), next.starts = starts.data();
    next.write_at = write_at.data(), next.logit_rows = logit_rows.data();
    long active = n;  // the longest rollouts come first, so the active ones are always the first ones
    for (long step = 1; step < rollout.max_depth; step++) {
        while (active && rollout.depths[active - 1] <= step) active--;
        if (!active) return;
        next.num_rows = next.num_logit_rows = next.num_sequences = active;
        for (long s = 0; s < active; s++) {
            const int64_t token = rollout.tokens[s * rollout.max_depth + step - 1];
            ids[s] = token < 0 ? 0 : token;
            write_at[s] = ++positions[s];
            visible[s] = positions[s] + 1;
        }
        forward(model, next, {rollout.logits + step * rollout.logits_stride});
        select_tokens(rollout, active, vocab, step);
    }
}

}  // namespace

// Score the batch, then choose and feed tokens one by one, up to the depth of each sequence.
// Each sequence has a logit row for its last token, and rows before for hits alone. The last chosen token is not fed.
// The pages must have room for all fed tokens. Returns 0 and does nothing where the batch is invalid.
API int cospec_llama_rollout(
    LlamaModel* model, const KVCacheView* cache, const BatchView* view, const Rollout* rollout) {
    InputBatch batch;
    pthread_mutex_lock(&model->lock);
    const bool valid = model->batch_builder.build(*view, *cache, rollout->max_depth - 1, &batch);
    if (valid) rollout_steps(model, batch, *rollout);
    pthread_mutex_unlock(&model->lock);
    return valid;
}

}  // namespace cospec
