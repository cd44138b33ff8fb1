// The element-wise functions of a layer, the loss head's softmax and the products of weight gradients, on a CPU, in
// float32 and in bf16.
//
// PyTorch makes each of its operations a pass over memory. Here every function reads its inputs once and writes its
// outputs once, in float32 between. `cpu_kernels.py` builds this file and describes the functions' arguments.
//
// Nothing here links an OpenMP of its own: torch's is the one of the process, with its threads.

#include <memory>
#include <vector>

#include "cpu_kernels.h"

extern "C" int omp_get_num_threads();  // not every compiler brings omp.h

namespace {

// The sum of `term(i)` for i in [0, count), which is called once for each: in float32 for a while, then added in double.
template <typename Term>
inline double sum_of(Size count, Term term) {
    constexpr Size TERMS = 512;  // more gain no speed
    double sum = 0;
    for (Size first = 0; first < count; first += TERMS) {
        const Size end = std::min(first + TERMS, count);
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (Size i = first; i < end; i++) part += term(i);
        sum += part;
    }
    return sum;
}

// Write exp(values - most); returns their sum. Most terms are far smaller than the largest: a float32 sum loses them whole
// (2e-5 of one of 150,000 columns). Those of four quarters are added in float32, which saves conversions to double.
template <typename T>
inline double exponentials_of(const T* values, float most, float* to, Size count) {
    const auto write = [=](Size i) { return to[i] = exponential(wide(values[i]) - most); };
    const Size quarter = count / 4;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Size i = 0; i < quarter; i++)
        sum += double((write(i) + write(i + quarter)) + (write(i + 2 * quarter) + write(i + 3 * quarter)));
    for (Size i = 4 * quarter; i < count; i++) sum += double(write(i));
    return sum;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename T>
void swiglu(const T* gate_up, T* out, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * width, *up = gate + width;
        T* to = out + row * width;
#pragma omp simd
        for (Size i = 0; i < width; i++) {
            float g = wide(gate[i]);
            store(to[i], g * sigmoid(g) * wide(up[i]));
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
            float g = wide(gate[i]), d = wide(from[i]), s = sigmoid(g);
            store(grad_up[i], d * g * s);
            store(grad_gate[i], d * wide(up[i]) * s * (1.0f + g * (1.0f - s)));
        }
    }
}

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, T* out, float* scale, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const T* from = x + row * width;
        T* to = out + row * width;
        const double squares = sum_of(width, [=](Size i) { return wide(from[i]) * wide(from[i]); });
        const float factor = float(1 / std::sqrt(squares / double(width) + eps));
        scale[row] = factor;
#pragma omp simd
        for (Size i = 0; i < width; i++) store(to[i], wide(from[i]) * factor * wide(weight[i]));
    }
}

// `grad_weight` [width] of each of `parts` parts of the rows: their sum is the weight's gradient.
template <typename T>
void rms_norm_backward(const T* x, const T* weight, const float* scale, const T* grad, T* grad_x,
                       float* grad_weight, Size parts, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size part = 0; part < parts; part++) {
        float* sums = grad_weight + part * width;
        std::memset(sums, 0, width * sizeof(float));
        for (Size row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
            const T *from = x + row * width, *of = grad + row * width;
            T* to = grad_x + row * width;
            const float factor = scale[row];
            const double whole = sum_of(width, [=](Size i) {
                const float product = wide(of[i]) * wide(from[i]);
                sums[i] += product * factor;
                return product * wide(weight[i]);
            });
            const float along = float(whole * factor * factor * factor / double(width));
#pragma omp simd
            for (Size i = 0; i < width; i++)
                store(to[i], wide(of[i]) * wide(weight[i]) * factor - wide(from[i]) * along);
        }
    }
}

// Pairs (i, i + half) of each head rotated by the angles of its position; `sign` -1 rotates back.
template <typename T>
void rotate(const T* x, const float* cosines, const float* sines, float sign, T* out, Size positions, Size batch,
            Size heads, Size half, Size position_stride, Size batch_stride, Size head_stride) {
#pragma omp parallel for schedule(static)
    for (Size position = 0; position < positions; position++) {
        const float *cos = cosines + position * half, *sin = sines + position * half;
        for (Size b = 0; b < batch; b++)
            for (Size head = 0; head < heads; head++) {
                const T* from = x + position * position_stride + b * batch_stride + head * head_stride;
                T* to = out + ((position * batch + b) * heads + head) * 2 * half;
#pragma omp simd
                for (Size i = 0; i < half; i++) {
                    float first = wide(from[i]), second = wide(from[i + half]), s = sign * sin[i];
                    store(to[i], first * cos[i] - second * s);
                    store(to[i + half], second * cos[i] + first * s);
                }
            }
    }
}

// Of bf16 the softmax; of float32 the exponentials, not yet divided by their sum.
template <typename T>
void softmax(T* logits, float* greatest, float* sums, Size rows, Size width) {
#pragma omp parallel
    {
        std::vector<float> scratch(width);  // stays in the core's cache
        float* exponentials = scratch.data();
#pragma omp for schedule(static)
        for (Size row = 0; row < rows; row++) {
            T* values = logits + row * width;
            float most = -INFINITY;
#pragma omp simd reduction(max : most)
            for (Size i = 0; i < width; i++) most = wide(values[i]) > most ? wide(values[i]) : most;
            const double sum = exponentials_of(values, most, exponentials, width);
            const float share = std::is_same_v<T, float> ? 1.0f : float(1 / sum);
#pragma omp simd
            for (Size i = 0; i < width; i++) store(values[i], exponentials[i] * share);
            greatest[row] = most;
            sums[row] = float(sum);
        }
    }
}

// sum [rows, columns] += grad [tokens, rows], transposed, times x [tokens, columns]; columns is a multiple of LANES.
//
// x is packed once, in panels as wide as a tile; of grad every thread packs some columns, which stay in its core's
// cache with a panel. A tile sums over some tokens at a time, so that `sum` is seldom read and written.
template <typename T>
void add_product(const T* grad, Size grad_stride, const T* x, Size x_stride, float* sum, Size sum_stride, Size tokens,
                 Size rows, Size columns) {
    constexpr Size PANEL = TILE_LANES * LANES, MOST_ROWS = 16 * TILE_ROWS;
    const Size steps = in_words<T>(tokens), panels = up_to_multiple(columns, PANEL) / PANEL;
    const std::unique_ptr<uint32_t[]> packed(new uint32_t[panels * steps * PANEL]);
#pragma omp parallel
    {
        const Size blocks = up_to_multiple((rows - 1) / MOST_ROWS + 1, omp_get_num_threads());  // each takes as many
        const Size block = up_to_multiple((rows - 1) / blocks + 1, TILE_ROWS);
        const std::unique_ptr<uint32_t[]> own(new uint32_t[steps * block]);
#pragma omp for schedule(dynamic)
        for (Size panel = 0; panel < panels; panel++)
            pack<T>(x + panel * PANEL, x_stride, tokens, std::min(PANEL, columns - panel * PANEL),
                    packed.get() + panel * steps * PANEL, PANEL);
#pragma omp for schedule(dynamic)
        for (Size first = 0; first < rows; first += block) {
            const Size count = std::min(block, rows - first);
            pack<T>(grad + first, grad_stride, tokens, count, own.get(), block);
            for (Size panel = 0; panel < panels; panel++)
                for (Size step = 0; step < steps; step += STEPS_OF_A_SUM)
                    multiply<T>(across_rows(own.get(), block).from(0, step),
                                packed.get() + (panel * steps + step) * PANEL, PANEL, std::min(STEPS_OF_A_SUM, steps - step),
                                sum + first * sum_stride + panel * PANEL, sum_stride, count,
                                std::min(PANEL, columns - panel * PANEL), true);
        }
    }
}

}  // namespace

// -- what Python calls, for each type

#define KERNELS(T, type)                                                                                              \
    void swiglu_##type(const T* x, T* out, Size rows, Size width) { swiglu(x, out, rows, width); }                    \
    void swiglu_backward_##type(const T* x, const T* grad, T* grad_x, Size rows, Size width) {                        \
        swiglu_backward(x, grad, grad_x, rows, width);                                                                \
    }                                                                                                                 \
    void rms_norm_##type(const T* x, const T* weight, float eps, T* out, float* scale, Size rows, Size width) {       \
        rms_norm(x, weight, eps, out, scale, rows, width);                                                            \
    }                                                                                                                 \
    void rms_norm_backward_##type(const T* x, const T* weight, const float* scale, const T* grad, T* grad_x,          \
                                  float* grad_weight, Size parts, Size rows, Size width) {                            \
        rms_norm_backward(x, weight, scale, grad, grad_x, grad_weight, parts, rows, width);                           \
    }                                                                                                                 \
    void rotate_##type(const T* x, const float* cosines, const float* sines, float sign, T* out, Size positions,      \
                       Size batch, Size heads, Size half, Size position_stride, Size batch_stride, Size head_stride) { \
        rotate(x, cosines, sines, sign, out, positions, batch, heads, half, position_stride, batch_stride,            \
               head_stride);                                                                                          \
    }                                                                                                                 \
    void softmax_##type(T* logits, float* greatest, float* sums, Size rows, Size width) {                             \
        softmax(logits, greatest, sums, rows, width);                                                                 \
    }                                                                                                                 \
    void add_product_##type(const T* grad, Size grad_stride, const T* x, Size x_stride, float* sum, Size sum_stride,   \
                            Size tokens, Size rows, Size columns) {                                                    \
        add_product(grad, grad_stride, x, x_stride, sum, sum_stride, tokens, rows, columns);                          \
    }

extern "C" {
KERNELS(float, float32)
KERNELS(bf16, bfloat16)
}
