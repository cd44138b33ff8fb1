// The loss head's softmax and causal attention on a CPU, in float32 and in bf16; `cpu_kernels.py` builds this file, and
// documents the functions' arguments. The threads are those of torch's OpenMP; no other OpenMP is linked.
//
// The factors of a product are read in words of 32 bits: one float32, or two bf16 that are neighbors along the axis of
// the sum. The rows of `a` are words along that axis; `b` is packed, one row of words for each step of the sum.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
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

// The left factor of a product: its first word, and the bytes from a row to the next.
struct Left {
    const char* words;
    Size stride;

    Word at(Size row, Size step) const { return reinterpret_cast<const Word*>(words + row * stride)[step]; }
    Left from(Size row, Size step) const { return {words + row * stride + step * Size(sizeof(Word)), stride}; }
};

template <typename T>
Left along_rows(const T* x, Size stride) {
    return {reinterpret_cast<const char*>(x), stride * Size(sizeof(T))};
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

template <typename T>
void multiply_by_vectors(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, Size rows,
                         Size columns, bool add) {
    Size column = 0;
    for (; column + TILE_LANES * LANES <= columns; column += TILE_LANES * LANES)
        multiply_columns<T, TILE_LANES>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
    for (; column < columns; column += LANES)
        multiply_columns<T, 1>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
}

#ifdef __AMX_BF16__
// A matrix unit (AMX) multiplies tiles of 16 rows of 16 words. Linux lets a process use it on request.
constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
template <typename T>
constexpr bool HAS_TILES = std::is_same_v<T, bf16>;  // for factors of this type
const bool HAS_MATRIX_UNIT = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;

// The shape of every tile: static, because the compiler knows only of the first bytes that the intrinsic reads.
struct alignas(64) {
    uint8_t palette = 1, unused[15] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} tile_shapes;

// A thread's tiles, as long as this lives.
struct Tiles {
    Tiles() {
        if (HAS_MATRIX_UNIT) _tile_loadconfig(&tile_shapes);
    }
    ~Tiles() {
        if (HAS_MATRIX_UNIT) _tile_release();
    }
};

// Tiles 0 to 3 are sums, 4 and 5 are rows of a, 6 and 7 are columns of b.
#define FOR_SUMS(WORK)                                   \
    {                                                    \
        WORK(0, 4, 6);                                   \
        if constexpr (COLUMNS > 1) WORK(1, 4, 7);        \
        if constexpr (ROWS > 1) WORK(2, 5, 6);           \
        if constexpr (ROWS * COLUMNS > 2) WORK(3, 5, 7); \
    }
#define CLEAR(sum, row, column) _tile_zero(sum)
#define LOAD(sum, row, column) _tile_loadd(sum, c + 16 * ((row - 4) * c_stride + column - 6), c_stride * 4)
#define ADD_PRODUCT(sum, row, column) _tile_dpbf16ps(sum, row, column)
#define STORE(sum, row, column) _tile_stored(sum, c + 16 * ((row - 4) * c_stride + column - 6), c_stride * 4)

// c [16 * ROWS, 16 * COLUMNS] = a b, or c += a b if `add`; `steps` is a multiple of 16.
template <int ROWS, int COLUMNS>
void multiply_tiles(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, bool add) {
    if (add) FOR_SUMS(LOAD) else FOR_SUMS(CLEAR)
    for (Size step = 0; step < steps; step += 16) {
        _tile_loadd(4, a.from(0, step).words, a.stride);
        if constexpr (ROWS > 1) _tile_loadd(5, a.from(16, step).words, a.stride);
        _tile_loadd(6, b + step * b_stride, b_stride * 4);
        if constexpr (COLUMNS > 1) _tile_loadd(7, b + step * b_stride + 16, b_stride * 4);
        FOR_SUMS(ADD_PRODUCT)
    }
    FOR_SUMS(STORE)
}
#else
template <typename T>
constexpr bool HAS_TILES = false;
struct Tiles {
    Tiles() {}
};
#endif

// The rows of a block of a product: with so many, few or none are left over for narrower tiles.
template <typename T>
constexpr Size BLOCK_ROWS = HAS_TILES<T> ? 64 : 16 * TILE_ROWS;

// c [rows, columns] = a b, or c += a b if `add`; columns is a multiple of LANES.
template <typename T>
void multiply(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, Size rows, Size columns,
              bool add) {
#ifdef __AMX_BF16__
    const Size tiled_steps = steps / 16 * 16, tiled_rows = rows / 16 * 16;
    if (HAS_TILES<T> && HAS_MATRIX_UNIT && tiled_steps && tiled_rows) {
        for (Size column = 0; column < columns; column += 32)
            for (Size row = 0; row < tiled_rows; row += 32) {
                const bool two_rows = row + 16 < tiled_rows, two_columns = column + 16 < columns;
                const auto work = two_rows ? (two_columns ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                                           : (two_columns ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
                work(a.from(row, 0), b + column, b_stride, tiled_steps, c + row * c_stride + column, c_stride, add);
            }
        if (tiled_steps < steps)
            multiply_by_vectors<T>(a.from(0, tiled_steps), b + tiled_steps * b_stride, b_stride, steps - tiled_steps, c,
                                   c_stride, tiled_rows, columns, true);
        a = a.from(tiled_rows, 0), c += tiled_rows * c_stride, rows -= tiled_rows;
    }
#endif
    multiply_by_vectors<T>(a, b, b_stride, steps, c, c_stride, rows, columns, add);
}

#ifdef __AVX512F__
// Transpose a block of LANES rows of LANES words; `columns` is the distance of the rows of `out`.
inline void transpose_block(Left x, uint32_t* out, Size columns) {
    Words rows[LANES], lane;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = *reinterpret_cast<const Words*>(x.from(i, 0).words), lane[i] = i;
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) {  // swap the upper right and the lower left of each square
        const Words is_right = Words((lane & half) != 0);
        const Words upper = lane + (is_right & (int(LANES) - half)), lower = upper + half;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if ((i & half) == 0) {
                const auto first = __m512i(rows[i]), second = __m512i(rows[i + half]);
                rows[i] = Words(_mm512_permutex2var_epi32(first, __m512i(upper), second));
                rows[i + half] = Words(_mm512_permutex2var_epi32(first, __m512i(lower), second));
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *reinterpret_cast<Words*>(out + i * columns) = rows[i];
}
#endif

// Pack x [rows, size] for a sum over `size`: `out`, which may be floats, is [size in words, columns], 0 beyond `rows`.
template <typename T>
void pack_transposed(const T* x, Size stride, Size rows, Size size, uint32_t* out, Size columns) {
    const Size steps = in_words<T>(size);
    const Left words = along_rows(x, stride);
    Size block_rows = 0, block_steps = 0;
#ifdef __AVX512F__
    block_rows = rows / LANES * LANES, block_steps = steps / LANES * LANES;
    for (Size row = 0; row < block_rows; row += LANES)
        for (Size step = 0; step < block_steps; step += LANES)
            transpose_block(words.from(row, step), out + step * columns + row, columns);
#endif
    for (Size row = 0; row < rows; row++)
        for (Size step = row < block_rows ? block_steps : 0; step < steps; step++)
            *reinterpret_cast<Word*>(out + step * columns + row) = words.at(row, step);
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
// A thread takes one head of one sample, and computes a block of scores at a time, which stays in the core's cache:
// its rows are queries in a forward, keys in a backward. Blocks in which no query sees a key are skipped. Sums are in
// float32; in bf16, factors of products are rounded to bf16.

constexpr Size MOST_COLUMNS = 256;  // of a block: a multiple of TILE_LANES * LANES

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
    // The columns of a block, and its scores; both are smaller for a short sequence.
    Size columns() const { return std::min(MOST_COLUMNS, up_to_multiple(length, TILE_LANES * LANES)); }
    Size block() const { return up_to_multiple(std::min(BLOCK_ROWS<T>, length), DEPTH<T>) * columns(); }
};

template <typename T>
void write_rows(const std::vector<float>& sums, Size rows, Size width, T* to, Size stride, Size size) {
    for (Size row = 0; row < rows; row++)
#pragma omp simd
        for (Size i = 0; i < size; i++) store(to[row * stride + i], sums[row * width + i]);
}

// Copy rows to a dense matrix: rows at the distance of a power of two drive each other out of the first cache.
template <typename T>
void copy_rows(const T* from, Size stride, Size rows, Size size, std::vector<T>& to) {
    for (Size row = 0; row < rows; row++) std::copy_n(from + row * stride, size, to.begin() + row * size);
}

template <typename T>
class Forward {
  public:
    explicit Forward(const Call<T>& call)
        : width(call.width()), block_keys(call.columns()), keys(up_to_multiple(call.length, block_keys) * call.steps()),
          values(in_words<T>(call.length) * width), scores(call.block()), sums(BLOCK_ROWS<T> * width),
          most(BLOCK_ROWS<T>), total(BLOCK_ROWS<T>), weights(call.block()), query_rows(BLOCK_ROWS<T> * call.size) {}

    void operator()(const Call<T>& head) {
        for (Size first = 0; first < head.length; first += block_keys)
            pack_transposed(head.key + first * head.stride(1), head.stride(1),
                            std::min(block_keys, head.length - first), head.size, keys.data() + first * head.steps(),
                            block_keys);
        pack<T>(head.value, head.stride(2), head.length, head.size, values.data(), width);
        for (Size begin = 0; begin < head.length; begin += BLOCK_ROWS<T>) {
            const Size end = std::min(begin + BLOCK_ROWS<T>, head.length);
            copy_rows(head.query + begin * head.stride(0), head.stride(0), end - begin, head.size, query_rows);
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
        multiply<T>(along_rows(query_rows.data(), head.size), keys.data() + first * head.steps(), block_keys,
                    head.steps(), scores.data(), block_keys, rows, columns, false);
        for (Size row = 0; row < rows; row++) {
            const Size visible = std::clamp(begin + row + 1 - first, Size(0), seen);
            float *score = scores.data() + row * block_keys, greatest = first ? most[row] : -INFINITY, sum = 0;
            const float scale = head.scale;
            T* weight = weights.data() + row * block_keys;
            std::fill(score + visible, score + columns, -INFINITY);
#pragma omp simd reduction(max : greatest)
            for (Size i = 0; i < columns; i++) greatest = score[i] * scale > greatest ? score[i] * scale : greatest;
#pragma omp simd reduction(+ : sum)
            for (Size i = 0; i < columns; i++) {
                const float e = exponential(score[i] * scale - greatest);
                sum += e;
                store(weight[i], e);
            }
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
    std::vector<T> weights, query_rows;
};

template <typename T>
class Backward {
  public:
    explicit Backward(const Call<T>& call)
        : width(call.width()), queries(call.columns()), key_steps(in_words<T>(BLOCK_ROWS<T>)),
          query_columns(up_to_multiple(call.length, queries) * call.steps()), grad_columns(query_columns.size()),
          query_rows(in_words<T>(call.length) * width), grad_rows(query_rows.size()), key_rows(key_steps * width),
          key_columns(key_rows.size()), slope_rows(key_steps * queries), scores(call.block()), slopes(scores.size()),
          log_sums(up_to_multiple(call.length, queries)), averages(log_sums.size()),
          grad_query(log_sums.size() * width), grad_key(BLOCK_ROWS<T> * width),
          grad_value(grad_key.size()), sums(queries * width), rounded_weights(scores.size()),
          rounded_slopes(scores.size()), dense_keys(BLOCK_ROWS<T> * call.size), dense_values(dense_keys.size()) {}

    void operator()(const Call<T>& head) {
        pack<T>(head.query, head.stride(0), head.length, head.size, query_rows.data(), width);
        pack<T>(head.grad, head.stride(4), head.length, head.size, grad_rows.data(), width);
        for (Size begin = 0; begin < head.length; begin += queries) {
            const Size count = std::min(queries, head.length - begin), start = begin * head.steps();
            pack_transposed(head.query + begin * head.stride(0), head.stride(0), count, head.size,
                            query_columns.data() + start, queries);
            pack_transposed(head.grad + begin * head.stride(4), head.stride(4), count, head.size,
                            grad_columns.data() + start, queries);
        }
        std::copy(head.log_sums, head.log_sums + head.length, log_sums.begin());
        for (Size row = 0; row < head.length; row++) {
            const T *out = head.out + row * head.stride(3), *grad = head.grad + row * head.stride(4);
            float average = 0;
#pragma omp simd reduction(+ : average)
            for (Size i = 0; i < head.size; i++) average += to_float(out[i]) * to_float(grad[i]);
            averages[row] = average;
        }
        std::fill(grad_query.begin(), grad_query.end(), 0.0f);
        const Size stride = head.made_stride();
        for (Size first = 0; first < head.length; first += BLOCK_ROWS<T>) {
            const Size count = std::min(BLOCK_ROWS<T>, head.length - first);
            pack<T>(head.key + first * head.stride(1), head.stride(1), count, head.size, key_rows.data(), width);
            copy_rows(head.key + first * head.stride(1), head.stride(1), count, head.size, dense_keys);
            copy_rows(head.value + first * head.stride(2), head.stride(2), count, head.size, dense_values);
            pack_transposed(key_rows.data(), width, in_words<T>(count), width, key_columns.data(), key_steps);
            std::fill(grad_key.begin(), grad_key.end(), 0.0f);
            std::fill(grad_value.begin(), grad_value.end(), 0.0f);
            for (Size begin = first / queries * queries; begin < head.length; begin += queries)
                attend(head, first, count, std::max(begin, first / LANES * LANES),
                       std::min(begin + queries, head.length));
            write_rows(grad_key, count, width, head.grad_key + first * stride, stride, head.size);
            write_rows(grad_value, count, width, head.grad_value + first * stride, stride, head.size);
        }
        for (Size begin = 0; begin < head.length; begin += queries) {
            const Size count = std::min(queries, head.length - begin);
            pack_transposed(grad_query.data() + begin * width, queries, width, count,
                            reinterpret_cast<uint32_t*>(sums.data()), width);
            write_rows(sums, count, width, head.grad_query + begin * stride, stride, head.size);
        }
    }

  private:
    // Add to all gradients what the `count` keys from `first` on and the queries [begin, end) contribute.
    void attend(const Call<T>& head, Size first, Size count, Size begin, Size end) {
        const Size seen = end - begin, columns = up_to_multiple(seen, LANES), column = begin % queries;
        const Size panel = begin - column, start = panel * head.steps() + column;
        multiply<T>(along_rows(dense_keys.data(), head.size), query_columns.data() + start,
                    queries, head.steps(), scores.data(), queries, count, columns, false);
        multiply<T>(along_rows(dense_values.data(), head.size), grad_columns.data() + start,
                    queries, head.steps(), slopes.data(), queries, count, columns, false);
        for (Size row = 0; row < count; row++) {
            const Size hidden = std::clamp(first + row - begin, Size(0), seen);  // queries before the key
            float *score = scores.data() + row * queries, *slope = slopes.data() + row * queries;
            const float *log_sum = log_sums.data() + begin, *average = averages.data() + begin, scale = head.scale;
            T *weights = rounded_weights.data() + row * queries, *to = rounded_slopes.data() + row * queries;
            std::fill(score, score + hidden, -INFINITY);
            std::fill(score + seen, score + columns, -INFINITY);
#pragma omp simd
            for (Size i = 0; i < columns; i++) {
                const float weight = exponential(score[i] * scale - log_sum[i]);
                store(weights[i], weight);
                store(to[i], weight * (slope[i] - average[i]) * scale);
            }
        }
        const Size steps = in_words<T>(seen), done = begin / DEPTH<T> * width;
        multiply<T>(along_rows(rounded_weights.data(), queries), grad_rows.data() + done, width, steps,
                    grad_value.data(), width, count, width, true);
        multiply<T>(along_rows(rounded_slopes.data(), queries), query_rows.data() + done, width, steps,
                    grad_key.data(), width, count, width, true);
        pack<T>(rounded_slopes.data(), queries, count, columns, slope_rows.data(), queries);
        multiply<T>(along_rows(key_columns.data(), key_steps), slope_rows.data(), queries, in_words<T>(count),
                    grad_query.data() + panel * width + column, queries, width, columns, true);
    }

    const Size width, queries, key_steps;
    std::vector<uint32_t> query_columns, grad_columns, query_rows, grad_rows, key_rows, key_columns, slope_rows;
    std::vector<float> scores, slopes, log_sums, averages, grad_query, grad_key, grad_value, sums;
    std::vector<T> rounded_weights, rounded_slopes, dense_keys, dense_values;
};

template <template <typename> class Pass, typename T>
void every_head(const Call<T>& call) {
#pragma omp parallel
    {
        const Tiles tiles;
        Pass<T> pass(call);
#pragma omp for schedule(dynamic)
        for (Size number = 0; number < call.batch * call.heads; number++) pass(call.for_head(number));
    }
}

}  // namespace

// -- what Python calls, for each type

#define KERNELS(T, type)                                                                                              \
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
