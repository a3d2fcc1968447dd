// One pass of a Llama decoder over a few tokens, on the threads of a CPU, in float32.
//
// A pass reads each weight once and does little with it, so it is bound by memory as long as nothing else is in
// the way: no operator is dispatched, what is written stays in a near cache, and threads meet five times a layer.
// Weights lie in blocks of 16 columns ([in, 16], padded with zeros), as float32 or as bfloat16 in pairs of columns
// j and j + 8 (low half, high half) that are widened in registers.
//
// Each number is computed in the same order whatever else is in the pass, so a token's logits are the same bits
// whether it comes alone, after others of its pass, or split over any number of threads.
//
// Shapes: B sequences, T tokens, N = B T rows, D width, F feed-forward width, H heads, Hkv key-value heads,
// G = H / Hkv, Hd head dim, S positions of the cache, V vocab. D and F are multiples of 8, Hd of 16, S of 32.
//
// Sources: the architecture as in llama.py; blocking of products after Goto and van de Geijn (2008); attention
// over tiles of keys after Dao et al. 2205.14135, all scores of a row held.

#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace specctl {

// ---- What Python hands over (layout.py has the same, field by field) ----

struct Matrix {
    const void *weight;  // [ceil(out / 16), in, 16]
    const float *bias;   // [out] or null
    int64_t in, out;
    int64_t is_half;  // bfloat16 pairs
};

struct Layer {
    const float *attention_norm, *feed_forward_norm;  // [D]
    const float *q_norm, *k_norm;                     // [Hd] or null
    Matrix qkv, out, gate_up, down;                   // gate_up: a block of gate, the same block of up, and so on
};

struct Model {
    int64_t num_layers, width, num_heads, num_kv_heads, head_dim, feed_forward, vocab_size;
    float epsilon, score_scale;
    const Layer *layers;
    const void *embedding;  // [V, D], or null where lm_head is the embedding too
    int64_t embedding_is_half;
    const float *norm;    // [D]
    const float *rotary;  // [context, 2, Hd / 2]: cosines, sines
    Matrix lm_head;
};

struct Pass {
    const int64_t *ids;  // [B, T]
    int64_t batch, length, start, num_logits, threads;
    float *cache;  // [L, 2, B, Hkv, S, Hd]; keys in blocks of 32 positions, [S / 32, Hd, 32]
    int64_t positions;
    float *hidden;  // [B, num_logits, D]
    float *logits;  // [B, num_logits, V]
};

// Tokens to draw one after the other. B = 1 and num_logits = 1; `logits` has a row for each, which becomes what it was
// drawn from, or at temperature 0 one row that all of them use and none needs afterwards.
struct Draws {
    int64_t count;
    double temperature;      // 0 is greedy
    const double *uniforms;  // [count], in [0, 1)
    int64_t *ids;            // [count]
    float *mass;             // [count]: the probability of each, NaN where its row of logits was not finite
};

namespace {

constexpr int64_t kBlock = 16;        // columns of a block
constexpr int64_t kKeys = 32;         // positions of a block of keys
constexpr int64_t kKeyTile = 256;     // positions that stay in a near cache while all queries pass over them
constexpr int64_t kRows = 6;          // rows of a product at a time: as many as registers hold
constexpr int64_t kTilesWidened = 3;  // so many tiles of rows are worth widening bfloat16 weights once for all
constexpr int64_t kStretch = 384;     // rows of a block that stay in the nearest cache
constexpr int64_t kQueries = 16;      // queries of one unit of attention, at most
constexpr int64_t kBlocksAtOnce = 4;  // blocks that are multiplied with at a time, at most

// ---- Vectors of eight ----

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

inline Floats load(const float *from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats all(float value) { return Floats{} + value; }

inline float sum(Floats x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where either is NaN

// exp(x) to two units in the last place; 0 below -87 (1e-38), and above 88 as at 88. NaN stays.
inline Floats exponential(Floats argument) {
    const Floats lowest = all(-87.0f), highest = all(88.0f), nothing = {};
    Floats x = argument < lowest ? lowest : argument;
    x = x > highest ? highest : x;
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Floats whole = (x * 1.44269504f + shift) - shift;
    Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats series = all(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &power, sizeof scale);
    return argument < lowest ? nothing : series * scale;
}

// ---- Products ----

template <bool half> inline void widen(const void *weight, int64_t row, Floats &low, Floats &high) {
    if constexpr (half) {
        Ints pairs, lows, highs;
        std::memcpy(&pairs, static_cast<const int32_t *>(weight) + row * 8, sizeof pairs);
        lows = pairs << 16;
        highs = pairs & static_cast<int32_t>(0xffff0000);
        std::memcpy(&low, &lows, sizeof low);
        std::memcpy(&high, &highs, sizeof high);
    } else {
        low = load(static_cast<const float *>(weight) + row * kBlock);
        high = load(static_cast<const float *>(weight) + row * kBlock + 8);
    }
}

// What to fetch while multiplying: four lines with every four rows, `step` bytes on each time. Memory that is read from
// four places at once comes almost twice as fast as from one.
struct Ahead {
    const char *from;
    int64_t lines[4];  // bytes from there
    int64_t step;
};

// `rows` rows of x times a stretch of `length` rows (a multiple of 4) of `blocks` blocks, into out, or added to it.
template <int rows, int blocks, bool half>
void multiply(const float *x, int64_t x_stride, const char *weight, int64_t block_bytes, int64_t length, bool adds,
              const Ahead *ahead, float *out, int64_t out_stride) {
    Floats sums[rows][2 * blocks] = {};
    if (adds)
        for (int row = 0; row < rows; ++row)
            for (int part = 0; part < 2 * blocks; ++part) sums[row][part] = load(out + row * out_stride + 8 * part);
    const char *fetched = ahead == nullptr ? nullptr : ahead->from;
    for (int64_t four = 0; four < length; four += 4) {
        if (rows > 1) {  // a single row leaves the processor enough time to run ahead by itself
            for (int line = 0; line < 4; ++line) __builtin_prefetch(fetched + ahead->lines[line]);
            fetched += ahead->step;
        }
#pragma GCC unroll 4
        for (int64_t i = four; i < four + 4; ++i) {
#pragma GCC unroll 4
            for (int block = 0; block < blocks; ++block) {
                Floats low, high;
                widen<half>(weight + block * block_bytes, i, low, high);
#pragma GCC unroll 6
                for (int row = 0; row < rows; ++row) {
                    const float factor = x[row * x_stride + i];
                    sums[row][2 * block] += factor * low;
                    sums[row][2 * block + 1] += factor * high;
                }
            }
        }
    }
    for (int row = 0; row < rows; ++row)
        for (int part = 0; part < 2 * blocks; ++part) store(out + row * out_stride + 8 * part, sums[row][part]);
}

template <bool half>
void multiply_rows(int64_t rows, const float *x, int64_t x_stride, const char *weight, int64_t length, bool adds,
                   const Ahead *ahead, float *out, int64_t out_stride) {
    const auto with = [&](auto function) { function(x, x_stride, weight, 0, length, adds, ahead, out, out_stride); };
    switch (rows) {
        case 2: return with(multiply<2, 1, half>);
        case 3: return with(multiply<3, 1, half>);
        case 4: return with(multiply<4, 1, half>);
        case 5: return with(multiply<5, 1, half>);
        case 6: return with(multiply<6, 1, half>);
        default: return with(multiply<1, 1, half>);
    }
}

// x [1, in] times `count` (at most 4) neighbouring blocks, into out [count * 16]: as many sums in flight as hide how long
// an addition takes.
template <bool half>
void multiply_one(const float *x, int64_t in, const char *weight, int64_t block_bytes, int64_t count, float *out) {
    if (count == 4) return multiply<1, 4, half>(x, in, weight, block_bytes, in, false, nullptr, out, 0);
    if (count == 1) return multiply<1, 1, half>(x, in, weight, block_bytes, in, false, nullptr, out, 0);
    multiply<1, 2, half>(x, in, weight, block_bytes, in, false, nullptr, out, 0);
    if (count == 3) multiply<1, 1, half>(x, in, weight + 2 * block_bytes, 0, in, false, nullptr, out + 2 * kBlock, 0);
}

// x [rows, in] times `count` (at most 4) neighbouring blocks, into out [rows, out_stride]. next: what is likely to be
// multiplied with after them.
template <bool half>
void multiply_blocks(const float *x, int64_t rows, int64_t in, const char *weight, int64_t count, const char *next,
                     float *out, int64_t out_stride) {
    constexpr int64_t row_bytes = kBlock * (half ? 2 : 4);
    const int64_t block_bytes = in * row_bytes, tiles = (rows + kRows - 1) / kRows;
    if (rows == 1) return multiply_one<half>(x, in, weight, block_bytes, count, out);
    Ahead ahead;
    for (int64_t line = 0; line < 4; ++line) ahead.lines[line] = line % count * block_bytes + line / count * 64;
    ahead.step = 4 * row_bytes / (count * tiles);
    const bool widens = half && tiles >= kTilesWidened;
    alignas(64) float widened[kStretch * kBlock];
    // All rows go over a stretch of the blocks while it is near, and fetch the next one in the meantime.
    for (int64_t from = 0; from < in; from += kStretch) {
        const int64_t length = std::min(in - from, kStretch);
        ahead.from = from + length < in ? weight + (from + length) * row_bytes : next;
        for (int64_t block = 0; block < count; ++block) {
            const char *columns = weight + block * block_bytes + from * row_bytes;
            for (int64_t i = 0; widens && i < length; ++i) {
                Floats low, high;
                widen<half>(columns, i, low, high);
                store(widened + i * kBlock, low);
                store(widened + i * kBlock + 8, high);
            }
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
                const float *factors = x + row * in + from;
                float *to = out + row * out_stride + block * kBlock;
                if (widens)
                    multiply_rows<false>(end - row, factors, in, reinterpret_cast<const char *>(widened), length,
                                         from > 0, &ahead, to, out_stride);
                else
                    multiply_rows<half>(end - row, factors, in, columns, length, from > 0, &ahead, to, out_stride);
                ahead.from += length / 4 * ahead.step;
            }
        }
    }
}

// x [rows, in] times `count` blocks from `first` on, plus the bias, into out [rows, count * 16].
void product(const Matrix &matrix, int64_t first, int64_t count, int64_t threads, const float *x, int64_t rows,
             float *out) {
    const int64_t in = matrix.in, stride = count * kBlock, bytes = in * kBlock * (matrix.is_half ? 2 : 4);
    const int64_t last = (matrix.out - 1) / kBlock;
    for (int64_t done = 0; done < count; done += kBlocksAtOnce) {
        const int64_t taken = std::min(kBlocksAtOnce, count - done), block = first + done;
        // Units are taken in turn, so this thread's next one is likely to be as many on as there are threads.
        const int64_t next = std::min(last, done + taken < count ? block + taken : first + threads * count);
        const char *weight = static_cast<const char *>(matrix.weight);
        const auto multiply = matrix.is_half ? multiply_blocks<true> : multiply_blocks<false>;
        multiply(x, rows, in, weight + block * bytes, taken, weight + next * bytes, out + done * kBlock, stride);
    }
    if (matrix.bias == nullptr) return;
    const float *bias = matrix.bias + first * kBlock;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < std::min(stride, matrix.out - first * kBlock); ++i) out[row * stride + i] += bias[i];
}

// ---- Norms and rotations ----

void normalise(const float *x, const float *weight, int64_t width, float epsilon, float *out) {
    Floats squares = {};
    for (int64_t i = 0; i < width; i += 8) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
    for (int64_t i = 0; i < width; i += 8) store(out + i, load(x + i) * scale * load(weight + i));
}

// Turns the pairs (i, i + Hd / 2) of a head. rotary: Hd / 2 cosines, Hd / 2 sines.
void rotate(float *head, const float *rotary, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += 8) {
        const Floats first = load(head + i), second = load(head + half + i);
        const Floats cosine = load(rotary + i), sine = load(rotary + half + i);
        store(head + i, first * cosine - second * sine);
        store(head + half + i, second * cosine + first * sine);
    }
}

// ---- Attention ----

// Scores of `queries` queries against one block of keys [Hd, 32].
template <int queries> void score(const float *const *q, const float *keys, int64_t head_dim, float *const *out) {
    Floats sums[queries][4] = {};
    for (int64_t i = 0; i < head_dim; ++i) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const Floats key = load(keys + i * kKeys + 8 * part);
#pragma GCC unroll 2
            for (int query = 0; query < queries; ++query) sums[query][part] += q[query][i] * key;
        }
    }
    for (int query = 0; query < queries; ++query)
        for (int part = 0; part < 4; ++part) store(out[query] + 8 * part, sums[query][part]);
}

// Scores [end], padded to whole blocks, become weights; their sum comes back.
float exponentiate(float *scores, int64_t end) {
    const int64_t padded = (end + kKeys - 1) / kKeys * kKeys;
    std::fill(scores + end, scores + padded, -INFINITY);
    Floats highest = load(scores), total = {};
    for (int64_t i = 8; i < padded; i += 8) highest = larger(highest, load(scores + i));
    float maximum = highest[0];
    for (int i = 1; i < 8; ++i) maximum = std::max(maximum, highest[i]);
    for (int64_t i = 0; i < padded; i += 8) {
        const Floats weight = exponential(load(scores + i) - maximum);
        store(scores + i, weight);
        if (i + 8 <= end) total += weight;
    }
    float all_of_them = sum(total);
    for (int64_t i = end / 8 * 8; i < end; ++i) all_of_them += scores[i];
    return all_of_them;
}

// Adds weights [count] times values [count, Hd] to out [Hd], `vectors` eights of it.
template <int vectors>
void add_values(const float *weights, const float *values, int64_t count, int64_t head_dim, float *out) {
    Floats sums[vectors];
    for (int i = 0; i < vectors; ++i) sums[i] = load(out + 8 * i);
    for (int64_t position = 0; position < count; ++position)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; ++i) sums[i] += weights[position] * load(values + position * head_dim + 8 * i);
    for (int i = 0; i < vectors; ++i) store(out + 8 * i, sums[i]);
}

// ---- A pass ----

class Decoding {
  public:
    Decoding(const Model &model, const Pass &pass, std::vector<float> &shared) : model_(model), pass_(pass) {
        rows_ = pass.batch * pass.length;
        const int64_t qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
        const int64_t attended = model.num_heads * model.head_dim;
        shared.resize(rows_ * (model.width + qkv + attended + model.feed_forward));
        x_ = shared.data();
        qkv_ = x_ + rows_ * model.width;
        attended_ = qkv_ + rows_ * qkv;
        gated_ = attended_ + rows_ * attended;
        for (int64_t row = 0; row < rows_; ++row) embed(pass.ids[row], x_ + row * model.width);
    }

    static int num_phases(const Model &model) { return static_cast<int>(5 * model.num_layers + 1); }

    void operator()(Worker &worker) const {
        for (int64_t index = 0; index < model_.num_layers; ++index) {
            if (worker.is_over()) return;
            const Layer &layer = model_.layers[index];
            project(worker, layer, index);
            attend(worker, index);
            add_product(worker, layer.out, attended_);
            gate(worker, layer);
            add_product(worker, layer.down, gated_);
        }
        finish(worker);
    }

  private:
    void embed(int64_t id, float *out) const {
        const int64_t width = model_.width;
        if (model_.embedding != nullptr) {
            const auto *narrow = static_cast<const uint16_t *>(model_.embedding) + id * width;
            const auto *wide = static_cast<const float *>(model_.embedding) + id * width;
            for (int64_t i = 0; i < width; ++i) out[i] = model_.embedding_is_half ? widened(narrow[i]) : wide[i];
            return;
        }
        const Matrix &table = model_.lm_head;
        const int64_t column = id % kBlock, first = id / kBlock * width;
        for (int64_t i = first; i < first + width; ++i) {
            const auto *narrow = static_cast<const uint16_t *>(table.weight) + i * kBlock;  // pairs of j and j + 8
            const auto *wide = static_cast<const float *>(table.weight) + i * kBlock;
            *out++ = table.is_half ? widened(narrow[2 * (column % 8) + column / 8]) : wide[column];
        }
    }

    static float widened(uint16_t half) {
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    float *keys(int64_t layer, int64_t sequence, int64_t head) const { return cached(2 * layer, sequence, head); }
    float *values(int64_t layer, int64_t sequence, int64_t head) const { return cached(2 * layer + 1, sequence, head); }

    float *cached(int64_t part, int64_t sequence, int64_t head) const {
        const int64_t heads = (part * pass_.batch + sequence) * model_.num_kv_heads + head;
        return pass_.cache + heads * pass_.positions * model_.head_dim;
    }

    // Every row through a norm, into the worker's own memory.
    float *normalised(Worker &worker, const float *weight) const {
        float *out = worker.memory(0, rows_ * model_.width);
        for (int64_t row = 0; row < rows_; ++row)
            normalise(x_ + row * model_.width, weight, model_.width, model_.epsilon, out + row * model_.width);
        return out;
    }

    // How many blocks make a unit, so that every thread finds some.
    int64_t blocks_of_unit(int64_t blocks) const {
        return std::clamp<int64_t>(blocks / (2 * pass_.threads), 1, kBlocksAtOnce);
    }

    // q, k and v, a head at a time: k and v go to the cache, q is scaled and stays.
    void project(Worker &worker, const Layer &layer, int64_t index) const {
        const int64_t head_dim = model_.head_dim, blocks = head_dim / kBlock, heads = model_.num_heads;
        const int64_t kv_heads = model_.num_kv_heads, stride = (heads + 2 * kv_heads) * head_dim;
        const float *x = nullptr;
        worker.share(
            heads + 2 * kv_heads, [&] { x = normalised(worker, layer.attention_norm); },
            [&](int64_t head) {
                float *out = worker.memory(1, rows_ * head_dim);
                product(layer.qkv, head * blocks, blocks, pass_.threads, x, rows_, out);
                const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
                const float *norm = is_q ? layer.q_norm : is_k ? layer.k_norm : nullptr;
                for (int64_t row = 0; row < rows_; ++row) {
                    float *vector = out + row * head_dim;
                    const int64_t sequence = row / pass_.length, position = pass_.start + row % pass_.length;
                    if (norm != nullptr) normalise(vector, norm, head_dim, model_.epsilon, vector);
                    if (is_q || is_k) rotate(vector, model_.rotary + position * head_dim, head_dim);
                    if (is_q) {
                        float *q = qkv_ + row * stride + head * head_dim;
                        for (int64_t i = 0; i < head_dim; i += 8) store(q + i, load(vector + i) * model_.score_scale);
                    } else if (is_k) {
                        float *block = keys(index, sequence, head - heads) + position / kKeys * kKeys * head_dim;
                        for (int64_t i = 0; i < head_dim; ++i) block[i * kKeys + position % kKeys] = vector[i];
                    } else {
                        float *v = values(index, sequence, head - heads - kv_heads) + position * head_dim;
                        std::memcpy(v, vector, head_dim * sizeof(float));
                    }
                }
            });
    }

    // Each unit: some of the queries that share a head of keys and values.
    void attend(Worker &worker, int64_t index) const {
        const int64_t groups = model_.num_heads / model_.num_kv_heads, queries = pass_.length * groups;
        const int64_t kv_units = pass_.batch * model_.num_kv_heads;
        const int64_t for_threads = (pass_.threads + kv_units - 1) / kv_units;
        const int64_t chunks = std::min(queries, std::max((queries + kQueries - 1) / kQueries, for_threads));
        worker.share(kv_units * chunks, [] {}, [&](int64_t unit) {
            const int64_t chunk = unit % chunks, kv_unit = unit / chunks;
            attend_some(worker, index, kv_unit / model_.num_kv_heads, kv_unit % model_.num_kv_heads,
                        chunk * queries / chunks, (chunk + 1) * queries / chunks);
        });
    }

    void attend_some(Worker &worker, int64_t index, int64_t sequence, int64_t kv_head, int64_t first,
                     int64_t last) const {
        const int64_t head_dim = model_.head_dim, groups = model_.num_heads / model_.num_kv_heads;
        const int64_t stride = (model_.num_heads + 2 * model_.num_kv_heads) * head_dim, count = last - first;
        const float *k = keys(index, sequence, kv_head), *v = values(index, sequence, kv_head);
        const float *q[kQueries];
        float *scores[kQueries], *out[kQueries];
        int64_t ends[kQueries];
        const int64_t longest = pass_.start + (last - 1) / groups + 1;
        const int64_t padded = (longest + kKeys - 1) / kKeys * kKeys;
        float *memory = worker.memory(1, count * padded);
        for (int64_t i = 0; i < count; ++i) {  // queries in the order of their tokens, so ends never fall
            const int64_t token = (first + i) / groups, head = kv_head * groups + (first + i) % groups;
            const int64_t row = sequence * pass_.length + token;
            q[i] = qkv_ + row * stride + head * head_dim;
            out[i] = attended_ + (row * model_.num_heads + head) * head_dim;
            scores[i] = memory + i * padded;
            ends[i] = pass_.start + token + 1;
        }
        for (int64_t tile = 0; tile < longest; tile += kKeyTile) {
            const int64_t tile_end = std::min(tile + kKeyTile, padded);
            int64_t i = 0;
            while (i < count && ends[i] <= tile) ++i;  // those that look at nothing from here on
            for (; i < count; i += 2) {
                const float *pair_q[2] = {q[i], i + 1 < count ? q[i + 1] : nullptr};
                for (int64_t block = tile; block < tile_end; block += kKeys) {
                    float *pair_out[2] = {scores[i] + block, i + 1 < count ? scores[i + 1] + block : nullptr};
                    if (i + 1 < count) score<2>(pair_q, k + block * head_dim, head_dim, pair_out);
                    else score<1>(pair_q, k + block * head_dim, head_dim, pair_out);
                }
            }
        }
        float totals[kQueries];
        for (int64_t i = 0; i < count; ++i) {
            totals[i] = exponentiate(scores[i], ends[i]);
            std::fill(out[i], out[i] + head_dim, 0.0f);
        }
        for (int64_t tile = 0; tile < longest; tile += kKeyTile) {
            for (int64_t i = 0; i < count; ++i) {
                const int64_t positions = std::min(ends[i] - tile, kKeyTile);
                if (positions <= 0) continue;
                int64_t part = 0;
                for (; part + 64 <= head_dim; part += 64)
                    add_values<8>(scores[i] + tile, v + tile * head_dim + part, positions, head_dim, out[i] + part);
                for (; part < head_dim; part += 16)
                    add_values<2>(scores[i] + tile, v + tile * head_dim + part, positions, head_dim, out[i] + part);
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            const float scale = 1.0f / totals[i];
            for (int64_t j = 0; j < head_dim; j += 8) store(out[i] + j, load(out[i] + j) * scale);
        }
    }

    // x += from [N, in] times a matrix.
    void add_product(Worker &worker, const Matrix &matrix, const float *from) const {
        const int64_t blocks = matrix.out / kBlock + (matrix.out % kBlock != 0), size = blocks_of_unit(blocks);
        worker.share((blocks + size - 1) / size, [] {}, [&](int64_t unit) {
            const int64_t first = unit * size, count = std::min(size, blocks - first), stride = count * kBlock;
            float *out = worker.memory(1, rows_ * stride);
            product(matrix, first, count, pass_.threads, from, rows_, out);
            for (int64_t row = 0; row < rows_; ++row) {
                float *x = x_ + row * model_.width + first * kBlock;
                const int64_t width = std::min(stride, model_.width - first * kBlock);
                for (int64_t i = 0; i < width; i += 8) store(x + i, load(x + i) + load(out + row * stride + i));
            }
        });
    }

    // SiLU(gate) * up.
    void gate(Worker &worker, const Layer &layer) const {
        const int64_t pairs = model_.feed_forward / kBlock + (model_.feed_forward % kBlock != 0);
        const int64_t size = std::max<int64_t>(1, blocks_of_unit(2 * pairs) / 2);
        const float *x = nullptr;
        worker.share(
            (pairs + size - 1) / size, [&] { x = normalised(worker, layer.feed_forward_norm); },
            [&](int64_t unit) {
                const int64_t first = unit * size, count = std::min(size, pairs - first), stride = 2 * count * kBlock;
                float *out = worker.memory(1, rows_ * stride);
                product(layer.gate_up, 2 * first, 2 * count, pass_.threads, x, rows_, out);
                for (int64_t row = 0; row < rows_; ++row)
                    for (int64_t pair = 0; pair < count; ++pair) {
                        const float *both = out + row * stride + 2 * pair * kBlock;
                        const int64_t column = (first + pair) * kBlock;
                        float *to = gated_ + row * model_.feed_forward + column;
                        for (int64_t i = 0; i < std::min(kBlock, model_.feed_forward - column); i += 8) {
                            const Floats value = load(both + i), lowest = all(-88.0f), nothing = {};
                            const Floats activated = value / (1.0f + exponential(-value));
                            store(to + i, (value < lowest ? nothing : activated) * load(both + kBlock + i));
                        }
                    }
            });
    }

    // The last rows of each sequence through the final norm and lm_head.
    void finish(Worker &worker) const {
        const Matrix &matrix = model_.lm_head;
        const int64_t blocks = matrix.out / kBlock + (matrix.out % kBlock != 0), size = blocks_of_unit(blocks);
        const int64_t width = model_.width, rows = pass_.batch * pass_.num_logits;
        float *x = nullptr;
        worker.share(
            (blocks + size - 1) / size,
            [&] {
                x = worker.memory(0, rows * width);
                for (int64_t row = 0; row < rows; ++row) {
                    const int64_t sequence = row / pass_.num_logits, back = pass_.num_logits - row % pass_.num_logits;
                    const float *from = x_ + ((sequence + 1) * pass_.length - back) * width;
                    normalise(from, model_.norm, width, model_.epsilon, x + row * width);
                }
            },
            [&](int64_t unit) {
                if (unit == 0) std::memcpy(pass_.hidden, x, rows * width * sizeof(float));
                const int64_t first = unit * size, count = std::min(size, blocks - first), stride = count * kBlock;
                float *out = worker.memory(1, rows * stride);
                product(matrix, first, count, pass_.threads, x, rows, out);
                const int64_t columns = std::min(stride, matrix.out - first * kBlock);
                for (int64_t row = 0; row < rows; ++row)
                    std::memcpy(pass_.logits + row * matrix.out + first * kBlock, out + row * stride,
                                columns * sizeof(float));
            });
    }

    Model model_;  // copies: helpers may look at them when the pass is over
    Pass pass_;
    int64_t rows_;
    float *x_, *qkv_, *attended_, *gated_;  // [N, D], [N, (H + 2 Hkv) Hd] of which q is used, [N, H Hd], [N, F]
};

// ---- Drawing ----

// The id of the largest logit of a row [V], the lowest of equals; -1 where one is NaN or the largest is infinite.
int64_t likeliest(const float *row, int64_t vocab_size) {
    int64_t best = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < vocab_size; ++i) {
        if (row[i] > row[best]) best = i;
        is_finite &= row[i] < INFINITY;  // not where it is NaN either
    }
    return is_finite && row[best] > -INFINITY ? best : -1;
}

// A temperature above 0 and nothing else: logits [V] become probabilities, as in sampling.py, or NaN everywhere.
void to_probabilities(float *row, int64_t vocab_size, double temperature) {
    const int64_t best = likeliest(row, vocab_size);
    if (best < 0) return std::fill(row, row + vocab_size, NAN);
    const float maximum = row[best];
    const float divisor = std::max(static_cast<float>(temperature), std::numeric_limits<float>::min());
    Floats totals = {};
    int64_t i = 0;
    for (; i + 8 <= vocab_size; i += 8) {
        const Floats weight = exponential((load(row + i) - maximum) / divisor);
        store(row + i, weight);
        totals += weight;
    }
    float total = sum(totals);
    for (; i < vocab_size; ++i) total += row[i] = exponential(all((row[i] - maximum) / divisor))[0];
    for (i = 0; i + 8 <= vocab_size; i += 8) store(row + i, load(row + i) / total);
    for (; i < vocab_size; ++i) row[i] /= total;
}

// The first id whose cumulative weight exceeds u times the total, as in chance.py: sums in double, in the ids' order.
int64_t inverse_cdf(const float *weights, int64_t vocab_size, double uniform) {
    double total = 0;
    for (int64_t i = 0; i < vocab_size; ++i) total += weights[i];
    const double threshold = std::min(uniform, 1 - 0x1p-53) * total;  // rounds to less than the total
    double cumulative = 0;
    for (int64_t i = 0; i < vocab_size - 1; ++i)
        if ((cumulative += weights[i]) > threshold) return i;
    return vocab_size - 1;
}

bool is_known(const Model &model, int64_t id) { return id >= 0 && id < model.vocab_size; }

// What all passes of a process share; they take turns. Never destroyed, since its threads outlive everything. A forked
// child begins with one of its own: the parent's threads are not there, and its locks may be held by them for good.
struct Shared {
    std::mutex one_at_a_time;
    Pool pool;
    std::vector<float> memory;
};

Shared *&shared() {
    static Shared *current = [] {
        pthread_atfork(nullptr, nullptr, [] { shared() = new Shared; });
        return new Shared;
    }();
    return current;
}

void run(const Model &model, const Pass &pass) {
    Shared &own = *shared();
    std::lock_guard<std::mutex> hold(own.one_at_a_time);
    own.pool.run(static_cast<int>(pass.threads), Decoding::num_phases(model), Decoding(model, pass, own.memory));
}

}  // namespace
}  // namespace specctl

// Wait until no thread of ours looks at a model any more, so that it may be freed.
extern "C" void specctl_settle() { specctl::shared()->pool.settle(); }

// acceptance.py's token_rule: p [K + 1, V], ids [K], K + 1 uniforms. q is what the ids were drawn from: [K + 1, V], the
// last row zero, or, where each is a point mass (is_dense = 0), [K] at the ids alone: 1, or NaN. Returns how many drafts
// are accepted. closing: the token that ends the round; health: NaN where a ratio or the closing distribution is.
// difference: room for V.
extern "C" int64_t specctl_token_rule(const float *p, const float *q, int64_t is_dense, const int64_t *ids,
                                      const double *uniforms, int64_t count, int64_t vocab_size, int64_t *closing,
                                      float *health, float *difference) {
    int64_t accepted = 0;
    *health = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float ratio = p[i * vocab_size + ids[i]] / q[is_dense ? i * vocab_size + ids[i] : i];
        *health += ratio;
        accepted += accepted == i && uniforms[i] < ratio;
    }
    p += accepted * vocab_size;
    q += is_dense ? accepted * vocab_size : 0;
    const int64_t refused = !is_dense && accepted < count ? ids[accepted] : -1;  // the whole mass of q is there
    float total = 0;
    for (int64_t i = 0; i < vocab_size; ++i) {
        const float rest = i == refused ? 0 : is_dense ? p[i] - q[i] : p[i];
        difference[i] = rest < 0 ? 0 : rest;  // NaN stays
        total += difference[i];
        *health += p[i];
    }
    *closing = specctl::inverse_cdf(total == 0 ? p : difference, vocab_size, uniforms[count]);
    return accepted;
}

// A pass and a draw return the index of the first id that is not in the vocabulary, or -1 when all is done.

extern "C" int64_t specctl_pass(const specctl::Model *model, const specctl::Pass *pass) {
    for (int64_t i = 0; i < pass->batch * pass->length; ++i)
        if (!specctl::is_known(*model, pass->ids[i])) return i;
    specctl::run(*model, *pass);
    return -1;
}

// Passes that feed each other: a token is drawn from each one's last logits, which become its probabilities.
extern "C" int64_t specctl_draw(const specctl::Model *model, const specctl::Pass *first, const specctl::Draws *draws) {
    specctl::Pass pass = *first;
    for (int64_t step = 0; step < draws->count; ++step) {
        const int64_t unknown = specctl_pass(model, &pass);
        if (unknown >= 0) return unknown;
        if (draws->temperature == 0) {
            const int64_t best = specctl::likeliest(pass.logits, model->vocab_size);
            draws->ids[step] = std::max<int64_t>(best, 0);
            draws->mass[step] = best < 0 ? NAN : 1.0f;
        } else {
            specctl::to_probabilities(pass.logits, model->vocab_size, draws->temperature);
            draws->ids[step] = specctl::inverse_cdf(pass.logits, model->vocab_size, draws->uniforms[step]);
            draws->mass[step] = pass.logits[draws->ids[step]];
            pass.logits += model->vocab_size;
        }
        pass.start += pass.length;
        pass.length = 1;
        pass.ids = draws->ids + step;
    }
    return -1;
}
