// SwiGLU, the loss head's softmax, products of weight gradients and causal attention on a CPU, in float32 and in bf16;
// `cpu_kernels.py` builds this file, and documents the functions' arguments.
//
// The threads are those of torch's OpenMP; no other OpenMP is linked.
//
// The factors of a product are read in words of 32 bits: one float32, or two bf16 that are neighbors along the axis of
// the sum. The words of `a` may have any strides; `b` is packed, one row of words for each step of the sum.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};
using Size = int64_t;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float& to, float x) { to = x; }

// The 16 bits of the nearest bf16, ties to even; NaN stays NaN.
inline uint32_t bf16_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline uint32_t bf16_bits(bf16 x) { return x.bits; }

inline void store(bf16& to, float x) { to.bits = uint16_t(bf16_bits(x)); }

// exp in float32, to 0.9 of a unit in the last place (1.2 without fused multiply-add): 2^n * e^r with |r| <= ln(2) / 2.
// Below -87 it is 0; NaN stays NaN. The polynomial for e^r has degree 6 and the smallest relative error, 3e-9 (found by
// Lawson's iteration); Taylor's polynomial has an error of 1.2e-7, low on one side of 0 and high on the other.
inline float exponential(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    float n = std::nearbyint(clamped * 1.44269504f);
    float r = clamped - n * 0.693145752f;
    r -= n * 1.42860677e-6f;
    float e = 0.0013814536f;
    e = e * r + 0.008368745f;
    e = e * r + 0.041668393f;
    e = e * r + 0.16666521f;
    e = e * r + 0.49999994f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    int32_t exponent = (int32_t(n < -126.0f ? -126.0f : n) + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, 4);
    return x < -87.0f ? 0.0f : e * power;
}

// -- products of small matrices

// The width of the CPU's vectors, and the size of a tile: its sums fill the registers that the factors leave free.
#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 6, TILE_LANES = 4;
#else
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 6, TILE_LANES = 2;
#endif
using Word = uint32_t __attribute__((may_alias, aligned(2)));
using Words = uint32_t __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(4)));
using Lanes = float __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(4)));

constexpr Size LANES = sizeof(Lanes) / sizeof(float);
template <typename T>
constexpr Size DEPTH = sizeof(Word) / sizeof(T);  // values of a word

constexpr Size up_to_multiple(Size number, Size divisor) { return (number + divisor - 1) / divisor * divisor; }

template <typename T>
constexpr Size in_words(Size values) {
    return (values + DEPTH<T> - 1) / DEPTH<T>;
}

template <typename T>
inline Lanes plus_product(Lanes sum, Words a, Words b) {
    if constexpr (std::is_same_v<T, float>) return sum + Lanes(a) * Lanes(b);
#ifdef __AVX512BF16__
    else return Lanes(_mm512_dpbf16_ps(__m512(sum), __m512bh(a), __m512bh(b)));
#else
    const Words later = Words{} + 0xffff0000u;
    return sum + Lanes(a << 16) * Lanes(b << 16) + Lanes(a & later) * Lanes(b & later);
#endif
}

// The left factor of a product; `row` and `step` are strides in bytes, to the next row and to the next step of the sum.
struct Left {
    const char* words;
    Size row, step;

    Word at(Size r, Size s) const { return *reinterpret_cast<const Word*>(words + r * row + s * step); }
    Left from(Size r, Size s) const { return {words + r * row + s * step, row, step}; }
};

// A matrix whose rows are the product's rows; the sum runs along each row.
template <typename T>
Left along_rows(const T* x, Size stride) {
    return {reinterpret_cast<const char*>(x), stride * Size(sizeof(T)), sizeof(Word)};
}

// A packed matrix whose columns are the product's rows; each row of words is a step of the sum.
inline Left across_rows(const void* words, Size columns) {
    return {static_cast<const char*>(words), sizeof(Word), columns * Size(sizeof(Word))};
}

template <typename T, int ROWS, int VECTORS>
inline void multiply_tile(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, bool add) {
    Lanes sums[ROWS][VECTORS];  // in registers, if all of the loops over it are unrolled
    const auto of_c = [=](int r, int v) { return reinterpret_cast<Lanes*>(c + r * c_stride + v * LANES); };
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = Lanes{};
    for (Size step = 0; step < steps; step++) {
        Words columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) columns[v] = *reinterpret_cast<const Words*>(b + step * b_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const Words row = Words{} + a.at(r, step);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sums[r][v] = plus_product<T>(sums[r][v], row, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *of_c(r, v) = add ? *of_c(r, v) + sums[r][v] : sums[r][v];
}

template <typename T, int VECTORS>
inline void multiply_columns(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, Size rows,
                             bool add) {
    Size row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        multiply_tile<T, TILE_ROWS, VECTORS>(a.from(row, 0), b, b_stride, steps, c + row * c_stride, c_stride, add);
    for (; row < rows; row++)
        multiply_tile<T, 1, VECTORS>(a.from(row, 0), b, b_stride, steps, c + row * c_stride, c_stride, add);
}

// c [rows, columns] = a b, or c += a b if `add`; columns is a multiple of LANES.
template <typename T>
void multiply(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, Size rows, Size columns,
              bool add) {
    Size column = 0;
    for (; column + TILE_LANES * LANES <= columns; column += TILE_LANES * LANES)
        multiply_columns<T, TILE_LANES>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
    for (; column < columns; column += LANES)
        multiply_columns<T, 1>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
}

// Pack x [rows, size] for a sum over `size`: `out` is [size in words, columns]; columns beyond `rows` are 0.
template <typename T>
void pack_transposed(const T* x, Size stride, Size rows, Size size, uint32_t* out, Size columns) {
    const Size steps = in_words<T>(size);
    const Left words = along_rows(x, stride);
    for (Size row = 0; row < rows; row++)
        for (Size step = 0; step < steps; step++) out[step * columns + row] = words.at(row, step);
    for (Size step = 0; step < steps; step++) std::fill(out + step * columns + rows, out + (step + 1) * columns, 0);
}

// Pack x [rows, size] for a sum over `rows`: `out` is [rows in words, columns]; values beyond `rows` and `size` are 0.
// The values are rounded to T.
template <typename T, typename From>
void pack(const From* x, Size stride, Size rows, Size size, uint32_t* out, Size columns) {
    for (Size row = 0; row < rows; row += DEPTH<T>, out += columns) {
        const From* first = x + row * stride;
        if constexpr (DEPTH<T> == 1) {
            std::memcpy(out, first, size * sizeof(Word));
        } else {
            const From* second = row + 1 < rows ? first + stride : first;
            const uint32_t kept = row + 1 < rows ? 0xffffffff : 0xffff;
#pragma omp simd
            for (Size i = 0; i < size; i++) out[i] = (bf16_bits(first[i]) | bf16_bits(second[i]) << 16) & kept;
        }
        std::fill(out + size, out + columns, 0);
    }
}

// Most steps of one sum in float32. Longer sums are split and their parts added up, as a large sum loses small terms
// (relative errors of weight gradients over 16,384 tokens were 1.5e-6, and are 3e-7).
constexpr Size STEPS_OF_A_SUM = 256;

// sum [rows, columns] += transposed grad [tokens, rows] times x [tokens, columns]; columns is a multiple of LANES.
//
// x is packed once, in panels as wide as a tile. Each thread packs a block of grad's columns, which stays in the core's
// cache together with a panel. `sum` is read and written once for STEPS_OF_A_SUM steps.
template <typename T>
void add_product(const T* grad, Size grad_stride, const T* x, Size x_stride, float* sum, Size sum_stride, Size tokens,
                 Size rows, Size columns) {
    constexpr Size PANEL = TILE_LANES * LANES, BLOCK = 16 * TILE_ROWS;
    const Size steps = in_words<T>(tokens), panels = up_to_multiple(columns, PANEL) / PANEL;
    std::vector<uint32_t> packed(panels * steps * PANEL);
#pragma omp parallel
    {
        std::vector<uint32_t> packed_grad(steps * BLOCK);
#pragma omp for schedule(dynamic)
        for (Size panel = 0; panel < panels; panel++)
            pack<T>(x + panel * PANEL, x_stride, tokens, std::min(PANEL, columns - panel * PANEL),
                    packed.data() + panel * steps * PANEL, PANEL);
#pragma omp for schedule(dynamic)
        for (Size first = 0; first < rows; first += BLOCK) {
            const Size count = std::min(BLOCK, rows - first);
            pack<T>(grad + first, grad_stride, tokens, count, packed_grad.data(), BLOCK);
            for (Size panel = 0; panel < panels; panel++)
                for (Size step = 0; step < steps; step += STEPS_OF_A_SUM)
                    multiply<T>(across_rows(packed_grad.data(), BLOCK).from(0, step),
                                packed.data() + (panel * steps + step) * PANEL, PANEL,
                                std::min(STEPS_OF_A_SUM, steps - step), sum + first * sum_stride + panel * PANEL,
                                sum_stride, count, std::min(PANEL, columns - panel * PANEL), true);
        }
    }
}

// -- SwiGLU

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename T>
void swiglu(const T* gate_up, T* out, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * width, *up = gate + width;
        T* to = out + row * width;
#pragma omp simd
        for (Size i = 0; i < width; i++) {
            float g = to_float(gate[i]);
            store(to[i], g * sigmoid(g) * to_float(up[i]));
        }
    }
}

template <typename T>
void swiglu_backward(const T* gate_up, const T* grad, T* grad_gate_up, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * width, *up = gate + width, *from = grad + row * width;
        T *grad_gate = grad_gate_up + row * 2 * width, *grad_up = grad_gate + width;
#pragma omp simd
        for (Size i = 0; i < width; i++) {
            float g = to_float(gate[i]), d = to_float(from[i]), s = sigmoid(g);
            store(grad_up[i], d * g * s);
            store(grad_gate[i], d * to_float(up[i]) * s * (1.0f + g * (1.0f - s)));
        }
    }
}

// -- softmax

// Write exp(values - largest), and return their sum in double: a float32 sum loses far smaller terms (2e-5 of the sum
// over 150,000 columns). Only four terms at a time are added in float32, one of each quarter of the values.
template <typename T>
inline double exponentials_of(const T* values, float largest, float* to, Size count) {
    const auto write = [=](Size i) { return to[i] = exponential(to_float(values[i]) - largest); };
    const Size quarter = count / 4;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Size i = 0; i < quarter; i++)
        sum += double((write(i) + write(i + quarter)) + (write(i + 2 * quarter) + write(i + 3 * quarter)));
    for (Size i = 4 * quarter; i < count; i++) sum += double(write(i));
    return sum;
}

// Overwrite bf16 logits with their softmax, float32 logits with their exponentials, which are not divided by their sum.
template <typename T>
void softmax(T* logits, float* greatest, float* sums, Size rows, Size width) {
#pragma omp parallel
    {
        std::vector<float> scratch(width);  // stays in the core's cache
        float* exponentials = scratch.data();
#pragma omp for schedule(static)
        for (Size row = 0; row < rows; row++) {
            T* values = logits + row * width;
            float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
            for (Size i = 0; i < width; i++) largest = to_float(values[i]) > largest ? to_float(values[i]) : largest;
            const double sum = exponentials_of(values, largest, exponentials, width);
            const float share = std::is_same_v<T, float> ? 1.0f : float(1 / sum);
#pragma omp simd
            for (Size i = 0; i < width; i++) store(values[i], exponentials[i] * share);
            greatest[row] = largest;
            sums[row] = float(sum);
        }
    }
}

// -- causal attention, forward and backward
//
// A thread takes one head of one sample, and computes a block of queries with a block of keys at a time, whose scores
// stay in the core's cache. Blocks in which no query sees a key are skipped. Sums are in float32; in bf16, factors of
// products are rounded to bf16.

constexpr Size QUERIES = 96, MOST_KEYS = 256;  // of a block: multiples of TILE_ROWS, and of TILE_LANES * LANES

// The arguments of a call. query, key, value, out and grad are [b, n, s, d]; `strides` has their strides of batch, then
// those of head and of position. `made` and the gradients are written, [s, b, n, d]; log_sums is [b, n, s].
template <typename T>
struct Call {
    const T *query, *key, *value, *out, *grad;
    float* log_sums;
    T *made, *grad_query, *grad_key, *grad_value;
    const Size* strides;
    Size batch, heads, length, size;
    float scale;

    Call for_head(Size number) const {
        const Size b = number / heads, n = number % heads, offset = number * size;
        const auto start = [&](Size which) { return b * strides[which] + n * strides[5 + which]; };
        Call head = *this;
        head.query += start(0), head.key += start(1), head.value += start(2);
        head.out += start(3), head.grad += start(4);
        head.log_sums += number * length;
        head.made += offset, head.grad_query += offset, head.grad_key += offset, head.grad_value += offset;
        return head;
    }
    Size stride(Size which) const { return strides[10 + which]; }
    Size made_stride() const { return batch * heads * size; }
    Size width() const { return up_to_multiple(size, LANES); }
    Size steps() const { return in_words<T>(size); }
    // The keys of a block, and the scores of a block; both are smaller for a short sequence.
    Size keys() const { return std::min(MOST_KEYS, up_to_multiple(length, TILE_LANES * LANES)); }
    Size block() const { return up_to_multiple(std::min(QUERIES, length), DEPTH<T>) * keys(); }
};

// The number of keys that the query at a position sees, of the `seen` keys from `first` on.
inline Size visible(Size position, Size first, Size seen) { return std::clamp(position + 1 - first, Size(0), seen); }

template <typename T>
void write_rows(const std::vector<float>& sums, Size rows, Size width, T* to, Size stride, Size size) {
    for (Size row = 0; row < rows; row++)
#pragma omp simd
        for (Size i = 0; i < size; i++) store(to[row * stride + i], sums[row * width + i]);
}

template <typename T>
class Forward {
  public:
    explicit Forward(const Call<T>& call)
        : width(call.width()), block_keys(call.keys()), keys(up_to_multiple(call.length, block_keys) * call.steps()),
          values(in_words<T>(call.length) * width), scores(call.block()), sums(QUERIES * width), most(QUERIES),
          total(QUERIES), weights(call.block()) {}

    void operator()(const Call<T>& head) {
        for (Size first = 0; first < head.length; first += block_keys)
            pack_transposed(head.key + first * head.stride(1), head.stride(1),
                            std::min(block_keys, head.length - first), head.size, keys.data() + first * head.steps(),
                            block_keys);
        pack<T>(head.value, head.stride(2), head.length, head.size, values.data(), width);
        for (Size begin = 0; begin < head.length; begin += QUERIES) {
            const Size end = std::min(begin + QUERIES, head.length);
            for (Size first = 0; first < end; first += block_keys) attend(head, begin, end, first);
            for (Size row = 0; row < end - begin; row++) {
                for (Size i = 0; i < width; i++) sums[row * width + i] *= float(1 / total[row]);
                head.log_sums[begin + row] = float(most[row] + std::log(total[row]));
            }
            write_rows(sums, end - begin, width, head.made + begin * head.made_stride(), head.made_stride(), head.size);
        }
    }

  private:
    // Add the block of keys from `first` on to the running softmax of the queries [begin, end).
    void attend(const Call<T>& head, Size begin, Size end, Size first) {
        const Size rows = end - begin, seen = std::min(end - first, block_keys), columns = up_to_multiple(seen, LANES);
        multiply<T>(along_rows(head.query + begin * head.stride(0), head.stride(0)),
                    keys.data() + first * head.steps(), block_keys, head.steps(), scores.data(), block_keys, rows,
                    columns, false);
        for (Size row = 0; row < rows; row++) {
            const Size num_visible = visible(begin + row, first, seen);
            const float *score = scores.data() + row * block_keys, scale = head.scale;
            T* weight = weights.data() + row * block_keys;
            float greatest = first ? most[row] : -INFINITY, sum = 0;
#pragma omp simd reduction(max : greatest)
            for (Size i = 0; i < num_visible; i++) greatest = score[i] * scale > greatest ? score[i] * scale : greatest;
#pragma omp simd reduction(+ : sum)
            for (Size i = 0; i < num_visible; i++) {
                const float e = exponential(score[i] * scale - greatest);
                sum += e;
                store(weight[i], e);
            }
            std::fill(weight + num_visible, weight + columns, T{});
            double before = 0;
            if (first) {
                const float kept = exponential(most[row] - greatest);
                before = total[row] * kept;
                for (Size i = 0; i < width; i++) sums[row * width + i] *= kept;
            }
            total[row] = before + sum;
            most[row] = greatest;
        }
        multiply<T>(along_rows(weights.data(), block_keys), values.data() + first / DEPTH<T> * width, width,
                    in_words<T>(seen), sums.data(), width, rows, width, first > 0);
    }

    const Size width, block_keys;
    std::vector<uint32_t> keys, values;
    std::vector<float> scores, sums, most;
    std::vector<double> total;
    std::vector<T> weights;
};

template <typename T>
class Backward {
  public:
    explicit Backward(const Call<T>& call)
        : width(call.width()), block_keys(call.keys()), keys(block_keys * call.steps()), values(keys.size()),
          key_rows(in_words<T>(block_keys) * width), query_rows(in_words<T>(call.length) * width),
          grad_rows(query_rows.size()), weights(call.block()), slopes(weights.size()), averages(call.length),
          grad_query(call.length * width), grad_key(block_keys * width), grad_value(grad_key.size()) {
        if (DEPTH<T> > 1) {  // float32 is multiplied as it is
            weight_words.resize(weights.size() / DEPTH<T>), slope_words.resize(weight_words.size());
            rounded_slopes.resize(weights.size());
        }
    }

    void operator()(const Call<T>& head) {
        pack<T>(head.query, head.stride(0), head.length, head.size, query_rows.data(), width);
        pack<T>(head.grad, head.stride(4), head.length, head.size, grad_rows.data(), width);
        for (Size row = 0; row < head.length; row++) {
            const T *out = head.out + row * head.stride(3), *grad = head.grad + row * head.stride(4);
            float average = 0;
#pragma omp simd reduction(+ : average)
            for (Size i = 0; i < head.size; i++) average += to_float(out[i]) * to_float(grad[i]);
            averages[row] = average;
        }
        std::fill(grad_query.begin(), grad_query.end(), 0.0f);
        const Size stride = head.made_stride();
        for (Size first = 0; first < head.length; first += block_keys) {
            const Size count = std::min(block_keys, head.length - first);
            const T *key = head.key + first * head.stride(1), *value = head.value + first * head.stride(2);
            pack_transposed(key, head.stride(1), count, head.size, keys.data(), block_keys);
            pack_transposed(value, head.stride(2), count, head.size, values.data(), block_keys);
            pack<T>(key, head.stride(1), count, head.size, key_rows.data(), width);
            std::fill(grad_key.begin(), grad_key.end(), 0.0f);
            std::fill(grad_value.begin(), grad_value.end(), 0.0f);
            for (Size begin = first / QUERIES * QUERIES; begin < head.length; begin += QUERIES)
                attend(head, begin, std::min(begin + QUERIES, head.length), first, count);
            write_rows(grad_key, count, width, head.grad_key + first * stride, stride, head.size);
            write_rows(grad_value, count, width, head.grad_value + first * stride, stride, head.size);
        }
        write_rows(grad_query, head.length, width, head.grad_query, stride, head.size);
    }

  private:
    // Add to all gradients what the queries [begin, end) and the `count` keys from `first` on contribute.
    void attend(const Call<T>& head, Size begin, Size end, Size first, Size count) {
        const Size rows = end - begin, seen = std::min(end - first, count), columns = up_to_multiple(seen, LANES);
        multiply<T>(along_rows(head.query + begin * head.stride(0), head.stride(0)), keys.data(), block_keys,
                    head.steps(), weights.data(), block_keys, rows, columns, false);
        multiply<T>(along_rows(head.grad + begin * head.stride(4), head.stride(4)), values.data(), block_keys,
                    head.steps(), slopes.data(), block_keys, rows, columns, false);
        for (Size row = 0; row < rows; row++) {
            const Size num_visible = visible(begin + row, first, seen);
            float *weight = weights.data() + row * block_keys, *slope = slopes.data() + row * block_keys;
            const float log_sum = head.log_sums[begin + row], average = averages[begin + row], scale = head.scale;
#pragma omp simd
            for (Size i = 0; i < num_visible; i++) {
                weight[i] = exponential(weight[i] * scale - log_sum);
                slope[i] = weight[i] * (slope[i] - average) * scale;
            }
            std::fill(weight + num_visible, weight + columns, 0.0f);
            std::fill(slope + num_visible, slope + columns, 0.0f);
        }
        const Size steps = in_words<T>(rows), done = begin / DEPTH<T> * width;
        multiply<T>(by_keys(weights, weight_words, rows, columns), grad_rows.data() + done, width, steps,
                    grad_value.data(), width, seen, width, true);
        multiply<T>(by_keys(slopes, slope_words, rows, columns), query_rows.data() + done, width, steps,
                    grad_key.data(), width, seen, width, true);
        multiply<T>(by_queries(rows, columns), key_rows.data(), width, in_words<T>(seen),
                    grad_query.data() + begin * width, width, rows, width, true);
    }

    // A block [queries, keys] as the left factor of a sum over queries; below, the slopes for a sum over keys.
    Left by_keys(const std::vector<float>& block, std::vector<uint32_t>& words, Size rows, Size columns) {
        if (DEPTH<T> == 1) return across_rows(block.data(), block_keys);
        pack<T>(block.data(), block_keys, rows, columns, words.data(), block_keys);
        return across_rows(words.data(), block_keys);
    }
    Left by_queries(Size rows, Size columns) {
        if constexpr (DEPTH<T> == 1) {
            return along_rows(slopes.data(), block_keys);
        } else {
            write_rows(slopes, rows, block_keys, rounded_slopes.data(), block_keys, columns);
            return along_rows(rounded_slopes.data(), block_keys);
        }
    }

    const Size width, block_keys;
    std::vector<uint32_t> keys, values, key_rows, query_rows, grad_rows, weight_words, slope_words;
    std::vector<float> weights, slopes, averages, grad_query, grad_key, grad_value;
    std::vector<T> rounded_slopes;
};

template <template <typename> class Pass, typename T>
void every_head(const Call<T>& call) {
#pragma omp parallel
    {
        Pass<T> pass(call);
#pragma omp for schedule(dynamic)
        for (Size number = 0; number < call.batch * call.heads; number++) pass(call.for_head(number));
    }
}

}  // namespace

// -- what Python calls, for each type

#define KERNELS(T, type)                                                                                              \
    void add_product_##type(const T* grad, Size grad_stride, const T* x, Size x_stride, float* sum, Size sum_stride,  \
                            Size tokens, Size rows, Size columns) {                                                   \
        add_product(grad, grad_stride, x, x_stride, sum, sum_stride, tokens, rows, columns);                          \
    }                                                                                                                 \
    void swiglu_##type(const T* x, T* out, Size rows, Size width) { swiglu(x, out, rows, width); }                    \
    void swiglu_backward_##type(const T* x, const T* grad, T* grad_x, Size rows, Size width) {                        \
        swiglu_backward(x, grad, grad_x, rows, width);                                                                \
    }                                                                                                                 \
    void softmax_##type(T* logits, float* greatest, float* sums, Size rows, Size width) {                             \
        softmax(logits, greatest, sums, rows, width);                                                                 \
    }                                                                                                                 \
    void causal_attention_##type(const T* query, const T* key, const T* value, T* out, float* log_sums,               \
                                 const Size* strides, Size batch, Size heads, Size length, Size size, float scale) {  \
        /* a forward does not use the gradients: `out` only fills their places */                                     \
        every_head<Forward>(Call<T>{query, key, value, out, out, log_sums, out, out, out, out, strides, batch, heads, \
                                    length, size, scale});                                                            \
    }                                                                                                                 \
    void causal_attention_backward_##type(const T* query, const T* key, const T* value, const T* out, const T* grad,  \
                                          float* log_sums, T* grad_query, T* grad_key, T* grad_value,                 \
                                          const Size* strides, Size batch, Size heads, Size length, Size size,        \
                                          float scale) {                                                              \
        every_head<Backward>(Call<T>{query, key, value, out, grad, log_sums, grad_query, grad_query, grad_key,        \
                                     grad_value, strides, batch, heads, length, size, scale});                        \
    }

extern "C" {
KERNELS(float, float32)
KERNELS(bf16, bfloat16)
}
