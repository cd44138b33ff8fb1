// What the kernels share: bf16, exp, and products of small matrices.
//
// A product's factors are made of words of 32 bits, one float32 or two bf16 that follow each other along the axis that
// is summed over. `a` may lie in memory in any order of words; `b` is packed: a row of words for each step of the sum.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};
using Size = int64_t;

inline float wide(float x) { return x; }

inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void store(float& to, float x) { to = x; }

// The 16 bits of the nearest bf16, ties to even; NaN stays NaN.
inline uint32_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline uint32_t rounded(bf16 x) { return x.bits; }

inline void store(bf16& to, float x) { to.bits = uint16_t(rounded(x)); }

// exp in float32, to 0.9 of a unit in the last place (1.2 without fused multiply-add): 2^n * e^r with |r| <= ln(2) / 2.
// Below -87 it is 0; NaN stays NaN. The polynomial is the one of degree 6 with the least relative error there, 3e-9 (by
// Lawson's iteration); Taylor's is off by 1.2e-7, low on one side of 0 and high on the other.
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

// Steps of a product's sum in float32. Longer ones are cut, and their parts added up: a sum that grows loses more and more
// of what is added to it (1.5e-6 of weight gradients over 16,384 tokens, in place of 3e-7).
constexpr Size STEPS_OF_A_SUM = 256;

// The widest vectors of the CPU, and of a product's sums as many as its registers hold besides the factors.
#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 6, TILE_LANES = 4;
#elif defined(__aarch64__)  // with wider tiles, or vectors made of two, GCC keeps sums on the stack
constexpr int VECTOR_BYTES = 16, TILE_ROWS = 4, TILE_LANES = 4;
#else
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 6, TILE_LANES = 2;
#endif
using Word = uint32_t __attribute__((may_alias, aligned(2)));
using Words = uint32_t __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(4)));
using Lanes = float __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(4)));

constexpr Size LANES = sizeof(Lanes) / sizeof(float);
template <typename T>
constexpr Size DEPTH = sizeof(Word) / sizeof(T);  // values of a word

constexpr Size up_to_multiple(Size number, Size of) { return (number + of - 1) / of * of; }

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

// The left factor: `row` and `step` are the distances in bytes from a word to those of the next row and the next step.
struct Left {
    const char* words;
    Size row, step;

    Word at(Size r, Size s) const { return *reinterpret_cast<const Word*>(words + r * row + s * step); }
    Left from(Size r, Size s) const { return {words + r * row + s * step, row, step}; }
};

// A matrix by rows, which are summed over along themselves.
template <typename T>
Left along_rows(const T* x, Size stride) {
    return {reinterpret_cast<const char*>(x), stride * Size(sizeof(T)), sizeof(Word)};
}

// A packed matrix, whose rows of words are the steps of the sum, and whose columns are the product's rows.
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

// c [rows, columns] = a b, or is added to; columns is a multiple of LANES.
template <typename T>
void multiply(Left a, const uint32_t* b, Size b_stride, Size steps, float* c, Size c_stride, Size rows, Size columns,
              bool add) {
    Size column = 0;
    for (; column + TILE_LANES * LANES <= columns; column += TILE_LANES * LANES)
        multiply_columns<T, TILE_LANES>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
    for (; column < columns; column += LANES)
        multiply_columns<T, 1>(a, b + column, b_stride, steps, c + column, c_stride, rows, add);
}

// Pack x [rows, size] for a sum over its columns: `out` is [size in words, columns]; columns beyond the rows are 0.
template <typename T>
void pack_transposed(const T* x, Size stride, Size rows, Size size, uint32_t* out, Size columns) {
    const Size steps = in_words<T>(size);
    const Left words = along_rows(x, stride);
    for (Size row = 0; row < rows; row++)
        for (Size step = 0; step < steps; step++) out[step * columns + row] = words.at(row, step);
    for (Size step = 0; step < steps; step++) std::fill(out + step * columns + rows, out + (step + 1) * columns, 0);
}

// Pack x [rows, size] for a sum over its rows: `out` is [rows in words, columns]; what is beyond rows and size is 0.
// Values of another type than T are rounded to it.
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
            for (Size i = 0; i < size; i++) out[i] = (rounded(first[i]) | rounded(second[i]) << 16) & kept;
        }
        std::fill(out + size, out + columns, 0);
    }
}

}  // namespace
