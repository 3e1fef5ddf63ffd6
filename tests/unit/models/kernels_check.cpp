// Runs every kernel of the library on this machine, in each of its instruction sets, with one and two threads.
//
// Exits with 1 when a result is far from a plain sum in double precision, or differs by a bit between instruction sets,
// threads or numbers of rows. Products of bf16 on AMX have their own order, which is checked against the bits of a
// plain loop. Prints a digest of all results but these, which is the same on every machine.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <vector>

#include "model/llama_forward.h"
#include "ops/kernels.h"

using namespace cospec;

extern "C" {
const char* cospec_isa();
int cospec_set_isa(const char* name);
void cospec_set_threads(int threads);
long cospec_packed_bytes(int format, long outputs, long inputs);
void cospec_pack(int format, const void* from, long outputs, long inputs, void* to);
Linear* cospec_linear_new(int format, const void* weight, const float* scale, const float* bias, const int32_t* order,
    long outputs, long inputs);
void cospec_linear(const Linear* linear, const float* x, long rows, float* y);
void cospec_attention(const AttentionParams* params);
void cospec_rms_norm(const float* x, const float* weight, float eps, long rows, long n, float* y);
void cospec_argmax(const float* x, long rows, long n, int64_t* result);
void cospec_softmax(const float* logits, long rows, long vocab, const double* temperatures, double* out);
void cospec_exponential_sample(const double* weights, long rows, long vocab, const uint64_t* streams, int64_t* sampled);
LlamaModel* cospec_llama_new(const LlamaConfig* config);
void cospec_llama_forward(LlamaModel* model, const InputBatch* batch, float* logits);
}

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

static uint64_t digest = 14695981039346656037u;
static uint64_t noise = 1;

static void fail(const char* what) {
    printf("%s: %s\n", cospec_isa(), what);
    exit(1);
}

static void note(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ ((const unsigned char*)data)[i]) * 1099511628211u;
}

// Multiples of 1/256 in [-1, 1), which bf16 holds without loss.
static float draw() {
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(noise >> 56) - 128) / 128;
}
static Floats drawn(size_t n, float factor = 1, float shift = 0) {
    Floats x(n);
    for (float& value : x) value = draw() * factor + shift;
    return x;
}

static void near(const Floats& found, const Doubles& wanted, double tolerance, const char* what) {
    for (size_t i = 0; i < found.size(); i++)
        if (!(fabs(found[i] - wanted[i]) <= tolerance * (1 + fabs(wanted[i])))) fail(what);
}

// Call `run` on every instruction set with one and two threads. All must give the same bits, which are returned.
static Floats everywhere(size_t size, const std::function<void(float*)>& run, const char* what, bool amx = true) {
    Floats first;
    for (const char* isa :
        {"base", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"})
        for (int threads = 1; threads <= 2; threads++) {
            if ((!amx && !strcmp(isa, "amx_bf16")) || !cospec_set_isa(isa)) continue;
            cospec_set_threads(threads);
            Floats found(size, -77);
            run(found.data());
            if (first.empty()) first = found;
            if (memcmp(first.data(), found.data(), size * sizeof(float))) fail(what);
        }
    note(first.data(), size * sizeof(float));
    return first;
}

struct Matrix {  // a weight in one of the formats, and its value
    Linear* packed;
    Doubles value, bias;
    long outputs, inputs;
    int format;
    Doubles times(const double* x) const {
        Doubles y(bias);
        for (long o = 0; o < outputs; o++)
            for (long k = 0; k < inputs; k++) y[o] += value[o * inputs + k] * (format == BF16 ? to_bf16(x[k]) : x[k]);
        return y;
    }
    static double to_bf16(double x) {  // to nearest, ties to even: eight bits of a fraction
        int exponent;
        const double fraction = frexp(x, &exponent);
        return ldexp(nearbyint(ldexp(fraction, 8)), exponent - 8);
    }
};

// A packed weight, whose memory is never freed.
static Linear* packed_linear(
    int format, const void* data, const float* scale, const float* bias, long outputs, long inputs) {
    void* packed = nullptr;
    if (posix_memalign(&packed, 64, cospec_packed_bytes(format, outputs, inputs))) fail("no memory");
    cospec_pack(format, data, outputs, inputs, packed);
    return cospec_linear_new(format, packed, scale, bias, nullptr, outputs, inputs);
}

static Matrix matrix(int format, long outputs, long inputs, float factor = 1) {
    const Floats weight = drawn(outputs * inputs, factor), bias = drawn(outputs), scale = drawn(outputs, 0.25f, 0.5f);
    Matrix m = {nullptr, Doubles(outputs * inputs), Doubles(bias.begin(), bias.end()), outputs, inputs, format};
    std::vector<uint16_t> halves;
    std::vector<int8_t> bytes;
    for (long i = 0; i < outputs * inputs; i++) {
        uint32_t bits;
        memcpy(&bits, &weight[i], 4);
        halves.push_back(format == FP16 ? float_to_half(weight[i]) : bits >> 16);
        bytes.push_back((int8_t)(weight[i] * 127));
        m.value[i] = format == INT8 ? bytes[i] * (double)scale[i / inputs] : (double)weight[i];
    }
    const void* data = format == FP32   ? (const void*)weight.data()
                       : format == INT8 ? (void*)bytes.data()
                                        : (void*)halves.data();
    m.packed = packed_linear(format, data, format == INT8 ? scale.data() : nullptr, bias.data(), outputs, inputs);
    return m;
}

// Products of bf16 on AMX: the even and the odd ones of 32 inputs are a chain each.
static void amx_products(const Matrix& m, const Floats& x, long most) {
    if (!cospec_set_isa("amx_bf16")) return;
    Floats wanted(most * m.outputs);
    for (long r = 0; r < most; r++)
        for (long o = 0; o < m.outputs; o++) {
            float total = 0;
            for (long k = 0; k < m.inputs; k += 32) {
                float chains[2] = {0, 0};
                for (long i = k; i < k + 32 && i < m.inputs; i++)
                    chains[i % 2] = fmaf(
                        (float)Matrix::to_bf16(x[r * m.inputs + i]), (float)m.value[o * m.inputs + i], chains[i % 2]);
                total += chains[0] + chains[1];
            }
            wanted[r * m.outputs + o] = total + (float)m.bias[o];
        }
    for (int threads = 1; threads <= 2; threads++)
        for (long rows = most; rows; rows--) {
            cospec_set_threads(threads);
            Floats found(rows * m.outputs, -77);
            cospec_linear(m.packed, x.data(), rows, found.data());
            if (memcmp(found.data(), wanted.data(), found.size() * sizeof(float))) fail("bf16 product of tiles");
        }
}

static void products() {
    const long shapes[][2] = {{1, 1}, {33, 7}, {64, 16}, {70, 129}, {200, 65}, {129, 300}};
    for (int format = FP32; format <= INT8; format++)
        for (const auto& shape : shapes) {
            const Matrix m = matrix(format, shape[0], shape[1]);
            const long most = 40;
            const Floats x = drawn(most * m.inputs,
                format == BF16 ? 1.01f : 1);  // mostly not representable in bf16, otherwise sums are exact
            Floats all;
            for (long rows : {40, 1, 2, 3, 4, 5, 6, 7, 12, 13, 25}) {
                const Floats y = everywhere(
                    rows * m.outputs, [&](float* to) { cospec_linear(m.packed, x.data(), rows, to); }, "product",
                    format != BF16);
                if (all.empty()) all = y;
                if (memcmp(y.data(), all.data(), y.size() * sizeof(float))) fail("product of other rows");
            }
            if (format == BF16) amx_products(m, x, most);
            for (long r = 0; r < most; r++) {
                const Doubles row(x.begin() + r * m.inputs, x.begin() + (r + 1) * m.inputs);
                const Floats y(all.begin() + r * m.outputs, all.begin() + (r + 1) * m.outputs);
                near(y, m.times(row.data()), 1e-5, "product is wrong");
            }
        }
}

// Weights in blocks: equal bits everywhere and for every number of rows; with Q8_0, near the product of the values.
static void block_products() {
    const long outputs = 70, inputs = 512, most = 20, row_bytes = inputs / 32 * 34;  // no format has longer rows
    std::vector<uint8_t> blocks(outputs * row_bytes);
    for (uint8_t& byte : blocks) byte = (uint8_t)(fabsf(draw()) * 59);  // scales are small float16 numbers
    const Floats x = drawn(most * inputs);
    std::vector<int32_t> order(inputs);
    Floats moved(x);  // the same rows, with input i at order[i]
    for (long i = 0; i < inputs; i++) order[i] = (int32_t)((7 * i + 3) % inputs);
    for (long i = 0; i < most * inputs; i++) moved[i / inputs * inputs + order[i % inputs]] = x[i];
    for (int format = INT8 + 1; format < NUM_WEIGHT_FORMATS; format++) {
        Linear* const packed = packed_linear(format, blocks.data(), nullptr, nullptr, outputs, inputs);
        Floats all;
        for (long rows : {20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13}) {
            const Floats y = everywhere(
                rows * outputs, [&](float* to) { cospec_linear(packed, x.data(), rows, to); }, "product of blocks");
            if (all.empty()) all = y;
            if (memcmp(y.data(), all.data(), y.size() * sizeof(float))) fail("product of blocks and other rows");
        }
        Linear ordered = *packed;
        ordered.order = order.data();
        const Floats y = everywhere(
            most * outputs, [&](float* to) { cospec_linear(&ordered, moved.data(), most, to); }, "ordered product");
        if (memcmp(y.data(), all.data(), y.size() * sizeof(float))) fail("product of blocks in another order");
        if (format != BLOCK_Q8_0) continue;
        for (long i = 0; i < most * outputs; i++) {
            const uint8_t* row = &blocks[i % outputs * row_bytes];
            double wanted = 0, size = 0;
            for (long k = 0; k < inputs; k++) {
                const uint8_t* block = row + k / 32 * 34;
                const int half = block[0] | block[1] << 8, exponent = half >> 10;
                const double scale = exponent ? ldexp(1024 + half % 1024, exponent - 25) : ldexp(half, -24);
                wanted += scale * block[2 + k % 32] * x[i / outputs * inputs + k];
                size += scale * block[2 + k % 32];
            }
            if (!(fabs(all[i] - wanted) <= size / 254 * 1.01)) fail("product of blocks is wrong");  // half a step
        }
    }
}

struct Sequences {  // three: a decoding row, a prompt, and a tree of four nodes after a known token
    static constexpr long page_size = 16, width = 12, rows = 1 + 20 + 5;
    std::vector<int32_t> tables, starts = {0, 1, 21, 26}, write_at, visible, sequence;
    std::vector<int64_t> positions, mask;
    Sequences() {
        for (int i = 0; i < 3 * width; i++) tables.push_back((7 * i + 3) % (3 * width));
        add(0, 130, 1);
        add(1, 0, 20);
        add(2, 60, 1);
        const int parents[] = {-1, -1, 0, 1};
        int64_t bits[4], depth[4];
        for (int i = 0; i < 4; i++) {
            bits[i] = 1 << i | (parents[i] < 0 ? 0 : bits[parents[i]]);
            depth[i] = parents[i] < 0 ? 1 : depth[parents[i]] + 1;
            sequence.push_back(2), write_at.push_back(61 + i), visible.push_back(61);
            positions.push_back(60 + depth[i]), mask.push_back(bits[i]);
        }
    }
    void add(int number, int start, int count) {
        for (int i = start; i < start + count; i++)
            sequence.push_back(number), write_at.push_back(i), visible.push_back(i + 1), positions.push_back(i),
                mask.push_back(0);
    }
    long slot(long s, long entry) const {
        return tables[s * width + entry / page_size] * page_size + entry % page_size;
    }
    // Whether a row attends an entry of its sequence.
    bool attends(long row, long entry, long window) const {
        const long node = entry - visible[row];
        if (node >= 0 && (node > 63 || !(mask[row] >> node & 1))) return false;
        const long s = sequence[row], first = starts[s];
        const int64_t position = entry < write_at[first] ? entry : positions[first + entry - write_at[first]];
        return !window || positions[row] - position < window;
    }
};

// The attention of one row and head over keys and values that `at(entry)` points to, `dim` floats each.
template <class At> static Doubles attention_of(
    const Sequences& s, long row, const double* q, const AttentionParams& params, const At& at) {
    const long last = params.starts[s.sequence[row] + 1] - 1;
    Doubles result(params.dim, 0.0);
    double total = 0;
    for (long e = 0; e <= s.write_at[last]; e++) {
        if (!s.attends(row, e, params.window)) continue;
        const auto [k, v] = at(e);
        double score = 0;
        for (long d = 0; d < params.dim; d++) score += q[d] * k[d];
        score *= params.scale;
        if (params.softcap) score = tanh(score / params.softcap) * params.softcap;
        const double weight = exp(score);
        total += weight;
        for (long d = 0; d < params.dim; d++) result[d] += weight * v[d];
    }
    for (double& value : result) value /= total;
    return result;
}

// The same attention over entries of each format of the cache, which are rounded once.
static void formats(AttentionParams params, const Floats& keys, const Floats& values, const Floats& plain) {
    const Doubles wanted(plain.begin(), plain.end());
#define FORMAT(name, id, Entry)                                                                                 \
    {                                                                                                           \
        const long dim = params.dim, bytes = entry_bytes<Entry>(dim), count = keys.size() / dim;                \
        std::vector<char> k(count * bytes), v(count * bytes);                                                   \
        for (long e = 0; e < count; e++) {                                                                      \
            Entry::write(&keys[e * dim], dim, (Entry::Number*)&k[e * bytes]);                                   \
            Entry::write(&values[e * dim], dim, (Entry::Number*)&v[e * bytes]);                                 \
        }                                                                                                       \
        params.cache_format = id, params.k_pages = k.data(), params.v_pages = v.data();                         \
        const auto run = [&](float* out) { params.out = out, cospec_attention(&params); };                      \
        near(everywhere(plain.size(), run, "attention of " name), wanted, 0.05, "attention is far off: " name); \
    }
    CACHE_FORMATS(FORMAT)
#undef FORMAT
}

static void attentions() {
    const Sequences s;
    const long shapes[][3] = {{32, 4, 2}, {64, 2, 2}, {24, 6, 1}, {8, 3, 3}, {256, 2, 1}};
    for (const auto& shape : shapes)
        for (long window : {0, 2, 70})
            for (float softcap : {0.0f, 3.0f}) {
                const long dim = shape[0], heads = shape[1], shared = shape[2], page = s.page_size * dim;
                const Floats q = drawn(s.rows * heads * dim), k = drawn(s.rows * shared * dim),
                             v = drawn(s.rows * shared * dim);
                Floats keys = drawn(3 * s.width * shared * page), values = drawn(3 * s.width * shared * page);
                AttentionParams params = {};
                params.q = q.data(), params.k = k.data(), params.v = v.data();
                params.q_row = heads * dim, params.k_row = params.v_row = shared * dim,
                params.q_head = params.k_head = params.v_head = dim;
                params.k_pages = keys.data(), params.v_pages = values.data();
                params.heads = heads, params.kv_heads = shared, params.dim = dim, params.page_size = s.page_size;
                params.table_width = s.width, params.scale = 0.3f, params.softcap = softcap, params.window = window;
                params.positions = s.positions.data(), params.visible = s.visible.data(),
                params.tables = s.tables.data();
                params.starts = s.starts.data(), params.write_at = s.write_at.data(), params.mask = s.mask.data(),
                params.num_sequences = 3;
                const Floats found = everywhere(
                    s.rows * heads * dim, [&](float* out) { params.out = out, cospec_attention(&params); },
                    "attention");
                Doubles wanted;
                for (long row = 0; row < s.rows; row++)
                    for (long h = 0; h < heads; h++) {
                        const Doubles query(
                            q.begin() + (row * heads + h) * dim, q.begin() + (row * heads + h + 1) * dim);
                        const auto at = [&](long e) {
                            const long slot = s.slot(s.sequence[row], e), p = slot / s.page_size;
                            const long offset =
                                ((p * shared + h / (heads / shared)) * s.page_size + slot % s.page_size) * dim;
                            return std::pair(&keys[offset], &values[offset]);
                        };
                        const Doubles one = attention_of(s, row, query.data(), params, at);
                        wanted.insert(wanted.end(), one.begin(), one.end());
                    }
                near(found, wanted, 1e-5, "attention is wrong");
                if (!window && softcap == 0) formats(params, keys, values, found);
            }
}

static void normalize(double* x, const float* weight, long n, double eps) {
    double squares = 0;
    for (long i = 0; i < n; i++) squares += x[i] * x[i];
    for (long i = 0; i < n; i++) x[i] *= weight[i] / sqrt(squares / n + eps);
}

static void rows_of_logits() {
    const long rows = 3, n = 1000;
    Floats x = drawn(rows * n, 8);
    x[n + 700] = 30;
    const Floats weight = drawn(n, 0.5f, 1);
    const Floats normed =
        everywhere(rows * n, [&](float* y) { cospec_rms_norm(x.data(), weight.data(), 1e-5f, rows, n, y); }, "norm");
    Doubles wanted(x.begin(), x.end());
    for (long r = 0; r < rows; r++) normalize(&wanted[r * n], weight.data(), n, 1e-5);
    near(normed, wanted, 1e-5, "norm is wrong");
    int64_t top[rows], sampled[rows];
    cospec_argmax(x.data(), rows, n, top);
    if (top[1] != 700) fail("argmax is wrong");
    const Doubles temperatures = {0.5, 1.0, 2.0};
    Doubles probs(rows * n);
    cospec_softmax(x.data(), rows, n, temperatures.data(), probs.data());
    for (long r = 0; r < rows; r++) {
        double total = 0;
        for (long i = 0; i < n; i++) total += exp((x[r * n + i] - x[r * n + top[r]]) / temperatures[r]);
        for (long i = 0; i < n; i++)
            if (fabs(probs[r * n + i] - exp((x[r * n + i] - x[r * n + top[r]]) / temperatures[r]) / total) > 1e-14)
                fail("softmax is wrong");
    }
    const uint64_t streams[6 * rows] = {1, 2, 0, 0, 5, 0, 1, 2, 0, 0, 6, 0, 3, 4, 0, 0, 5, 1};
    cospec_exponential_sample(probs.data(), rows, n, streams, sampled);
    note(top, sizeof top), note(probs.data(), probs.size() * sizeof(double)), note(sampled, sizeof sampled);
}

// Two layers of a small model: products with the epilogues ADD and SWIGLU, rotation, a bf16 embedding, rows without
// logits. No bf16 products: an input between two bf16 numbers may round to the other side in double precision.
static void forwards() {
    const long vocab = 50, hidden = 40, heads = 4, shared = 2, dim = 16, inner = 45, all_heads = heads + 2 * shared;
    const long padded = (inner + 31) / 32 * 32;
    const Sequences s;
    const Floats table = drawn(vocab * hidden), input_norm = drawn(hidden, 0.25f, 1),
                 mlp_norm = drawn(hidden, 0.25f, 1);
    const Floats q_norm = drawn(dim, 0.25f, 1), k_norm = drawn(dim, 0.25f, 1), final_norm = drawn(hidden, 0.25f, 1);
    std::vector<uint16_t> halves;
    for (float value : table) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        halves.push_back(bits >> 16);
    }
    Floats frequencies;
    for (long i = 0; i < dim / 2; i++) frequencies.push_back((float)pow(100.0, -2.0 * i / dim));
    const Matrix head = matrix(FP32, vocab, hidden);
    Matrix qkv[2], output[2], gate_up[2], down[2];
    LlamaLayer layers[2];
    for (int i = 0; i < 2; i++) {
        qkv[i] = matrix(FP32, all_heads * dim, hidden, 0.25f), output[i] = matrix(INT8, hidden, heads * dim, 0.25f);
        gate_up[i] = matrix(INT8, 2 * padded, hidden, 0.25f), down[i] = matrix(FP16, hidden, inner, 0.25f);
        layers[i] = {input_norm.data(), mlp_norm.data(), nullptr, nullptr, q_norm.data(), k_norm.data(), qkv[i].packed,
            nullptr, nullptr, output[i].packed, gate_up[i].packed, down[i].packed, nullptr, nullptr, nullptr, i ? 3 : 0,
            0};
    }
    const LlamaConfig config = {layers, halves.data(), final_norm.data(), head.packed, frequencies.data(), BF16, 2,
        hidden, heads, shared, dim, inner, dim, 1, 0, 0, 0, 0, 0, 0, 1e-5f, 0.25f, 1.0f, 1.0f, 1.0f, 1.0f, 0.0f, 0.0f};
    const size_t entries = 3 * s.width * s.page_size;
    std::vector<int64_t> ids, logit_rows = {0, 19, 20, 21, 22, 23, 24, 25};
    for (long r = 0; r < s.rows; r++) ids.push_back(r * 7 % vocab);
    // The decoding sequence already has entries in the cache. Their values do not matter, but both sides must read
    // them.
    Floats pages[2][2];
    void *k_pages[2], *v_pages[2];
    for (int i = 0; i < 2; i++) {
        for (int side = 0; side < 2; side++) pages[i][side] = drawn(entries * shared * dim);
        k_pages[i] = pages[i][0].data(), v_pages[i] = pages[i][1].data();
    }
    const InputBatch batch = {ids.data(), s.positions.data(), s.sequence.data(), s.visible.data(), s.mask.data(),
        s.tables.data(), s.starts.data(), s.write_at.data(), logit_rows.data(), k_pages, v_pages, s.rows, 3,
        (long)logit_rows.size(), s.page_size, s.width};
    LlamaModel* model = cospec_llama_new(&config);
    // Sines and cosines come from each machine's own library and differ slightly, so they stay out of the digest.
    const uint64_t before = digest;
    const Floats found = everywhere(
        logit_rows.size() * vocab, [&](float* logits) { cospec_llama_forward(model, &batch, logits); }, "forward");
    digest = before;

    std::vector<Doubles> x;
    for (long r = 0; r < s.rows; r++)
        x.emplace_back(table.begin() + ids[r] * hidden, table.begin() + (ids[r] + 1) * hidden);
    const auto offset = [&](long slot, long h) {
        return ((slot / s.page_size * shared + h) * s.page_size + slot % s.page_size) * dim;
    };
    for (int i = 0; i < 2; i++) {
        std::vector<Doubles> projected;
        for (long r = 0; r < s.rows; r++) {
            Doubles normed = x[r];
            normalize(normed.data(), input_norm.data(), hidden, 1e-5);
            projected.push_back(qkv[i].times(normed.data()));
            for (long h = 0; h < heads + shared; h++) {
                double* one = &projected[r][h * dim];
                normalize(one, h < heads ? q_norm.data() : k_norm.data(), dim, 1e-5);
                for (long d = 0; d < dim / 2; d++) {
                    const double angle = (double)s.positions[r] * frequencies[d], a = one[d], b = one[d + dim / 2];
                    one[d] = a * cos(angle) - b * sin(angle), one[d + dim / 2] = b * cos(angle) + a * sin(angle);
                }
            }
        }
        AttentionParams params = {};
        params.dim = dim, params.scale = config.scale, params.window = layers[i].window,
        params.starts = s.starts.data();
        for (long r = 0; r < s.rows; r++) {
            Doubles attended;
            for (long h = 0; h < heads; h++) {
                const auto at = [&](long e) {
                    const long n = s.sequence[r], first = s.starts[n], g = h / (heads / shared);
                    Doubles k(dim), v(dim);
                    if (e < s.write_at[first]) {
                        const long entry_offset = offset(s.slot(n, e), g);
                        k.assign(&pages[i][0][entry_offset], &pages[i][0][entry_offset] + dim),
                            v.assign(&pages[i][1][entry_offset], &pages[i][1][entry_offset] + dim);
                    } else {
                        const double* row = projected[first + e - s.write_at[first]].data();
                        k.assign(row + (heads + g) * dim, row + (heads + g + 1) * dim);
                        v.assign(row + (heads + shared + g) * dim, row + (heads + shared + g + 1) * dim);
                    }
                    return std::pair(k, v);
                };
                const Doubles one = attention_of(s, r, &projected[r][h * dim], params, at);
                attended.insert(attended.end(), one.begin(), one.end());
            }
            const Doubles added = output[i].times(attended.data());
            for (long d = 0; d < hidden; d++) x[r][d] += added[d];
            Doubles normed = x[r], gated(inner);
            normalize(normed.data(), mlp_norm.data(), hidden, 1e-5);
            const Doubles both = gate_up[i].times(normed.data());
            for (long j = 0; j < inner; j++) {
                const double gate = both[j / 32 * 64 + j % 32], input = both[j / 32 * 64 + 32 + j % 32];
                gated[j] = gate / (1 + exp(-gate)) * input;
            }
            const Doubles more = down[i].times(gated.data());
            for (long d = 0; d < hidden; d++) x[r][d] += more[d];
        }
    }
    Doubles wanted;
    for (int64_t r : logit_rows) {
        normalize(x[r].data(), final_norm.data(), hidden, 1e-5);
        const Doubles logits = head.times(x[r].data());
        wanted.insert(wanted.end(), logits.begin(), logits.end());
    }
    near(found, wanted, 1e-4, "forward is wrong");
}

int main() {
    products();
    block_products();
    attentions();
    rows_of_logits();
    forwards();
    printf("%016llx\n", (unsigned long long)digest);
    return 0;
}
