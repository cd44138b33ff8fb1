// The element-wise functions of a layer, the loss head's softmax and the backward of causal attention, on a CPU, in
// float32 and in bf16.
//
// PyTorch makes each of its operations a pass over memory. Here every function reads its inputs once and writes its
// outputs once, in float32 between. `cpu_kernels.py` builds this file and describes the functions' arguments.
//
// Nothing here links an OpenMP of its own: torch's is the one of the process, with its threads.

#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>
#include <vector>

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

// Rounded to the nearest, ties to even; NaN stays NaN.
inline void store(bf16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

// exp in float32, to 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2. Below -87 it is 0; NaN stays NaN.
inline float exponential(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    float n = std::nearbyint(clamped * 1.44269504f);
    float r = clamped - n * 0.693145752f;
    r -= n * 1.42860677e-6f;
    float e = 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    int32_t exponent = (int32_t(n < -126.0f ? -126.0f : n) + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, 4);
    return x < -87.0f ? 0.0f : e * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// MKL's products with float32 sums, of torch's library, for matrices by rows: c = alpha * op(a) op(b) + beta * c.
enum class Order { AS_IT_IS, TRANSPOSED };

inline void multiply(void* product, Order a_order, Order b_order, int rows, int columns, int inner, float alpha,
                     const bf16* a, int a_stride, const bf16* b, int b_stride, float beta, float* c, int c_stride) {
    using Function = void (*)(int, int, int, int, int, int, float, const bf16*, int, const bf16*, int, float, float*, int);
    const auto code = [](Order order) { return order == Order::TRANSPOSED ? 112 : 111; };  // of CBLAS; 101 is by rows
    reinterpret_cast<Function>(product)(101, code(a_order), code(b_order), rows, columns, inner, alpha, a, a_stride, b,
                                        b_stride, beta, c, c_stride);
}

// By Fortran's convention, matrices by columns: the transposed product of the transposed matrices.
inline void multiply(void* product, Order a_order, Order b_order, int rows, int columns, int inner, float alpha,
                     const float* a, int a_stride, const float* b, int b_stride, float beta, float* c, int c_stride) {
    using Function = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                              const int*, const float*, const int*, const float*, float*, const int*);
    const auto letter = [](Order order) { return order == Order::TRANSPOSED ? "T" : "N"; };
    reinterpret_cast<Function>(product)(letter(b_order), letter(a_order), &columns, &rows, &inner, &alpha, b, &b_stride,
                                        a, &a_stride, &beta, c, &c_stride);
}

constexpr Size QUERIES = 128, KEYS = 256;  // of a block, whose scores stay in a core's cache

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
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (Size i = 0; i < width; i++) squares += wide(from[i]) * wide(from[i]);
        float factor = 1.0f / std::sqrt(squares / float(width) + eps);
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
            float factor = scale[row], along = 0;
#pragma omp simd reduction(+ : along)
            for (Size i = 0; i < width; i++) {
                float product = wide(of[i]) * wide(from[i]);
                along += product * wide(weight[i]);
                sums[i] += product * factor;
            }
            along *= factor * factor * factor / float(width);
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
            float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
            for (Size i = 0; i < width; i++) most = wide(values[i]) > most ? wide(values[i]) : most;
#pragma omp simd reduction(+ : sum)
            for (Size i = 0; i < width; i++) sum += exponentials[i] = exponential(wide(values[i]) - most);
            const float share = std::is_same_v<T, float> ? 1.0f : 1.0f / sum;
#pragma omp simd
            for (Size i = 0; i < width; i++) store(values[i], exponentials[i] * share);
            greatest[row] = most;
            sums[row] = sum;
        }
    }
}

// Of one head of one sample: all but `grad_*` are read. Strides are those of positions; log_sums has one per position.
template <typename T>
struct Head {
    const T *query, *key, *value, *out, *grad;
    const float* log_sums;
    T *grad_query, *grad_key, *grad_value;
};

template <typename T>
void attention_head_backward(void* product, const Head<T>& head, const Size* strides, Size grad_stride, Size length,
                             Size size, float scale) {
    const int q = int(strides[0]), k = int(strides[1]), v = int(strides[2]), g = int(strides[4]), d = int(size);
    std::vector<float> scores(QUERIES * KEYS), grads(QUERIES * KEYS), averages(length);
    std::vector<float> grad_query(length * size, 0.0f), grad_key(KEYS * size), grad_value(KEYS * size);
    std::vector<T> weights(QUERIES * KEYS), grad_scores(QUERIES * KEYS);
    for (Size row = 0; row < length; row++) {
        const T *out = head.out + row * strides[3], *of = head.grad + row * g;
        float average = 0;
#pragma omp simd reduction(+ : average)
        for (Size i = 0; i < size; i++) average += wide(out[i]) * wide(of[i]);
        averages[row] = average;
    }
    for (Size first = 0; first < length; first += KEYS) {
        const Size last = first + KEYS < length ? first + KEYS : length;
        const T *key = head.key + first * k, *value = head.value + first * v;
        for (Size begin = first; begin < length; begin += QUERIES) {
            const Size end = begin + QUERIES < length ? begin + QUERIES : length;
            const Size seen = (last < end ? last : end) - first;  // by the last of these queries
            const int rows = int(end - begin), columns = int(seen);
            const float sum = begin == first ? 0 : 1;  // these keys' first queries overwrite what was there
            const T *query = head.query + begin * q, *grad = head.grad + begin * g;
            multiply(product, Order::AS_IT_IS, Order::TRANSPOSED, rows, columns, d, scale, query, q, key, k, 0, scores.data(), columns);
            multiply(product, Order::AS_IT_IS, Order::TRANSPOSED, rows, columns, d, 1, grad, g, value, v, 0, grads.data(), columns);
            for (Size row = 0; row < rows; row++) {
                const float *score = scores.data() + row * seen, *dp = grads.data() + row * seen;
                const float log_sum = head.log_sums[begin + row], average = averages[begin + row];
                T *weight = weights.data() + row * seen, *ds = grad_scores.data() + row * seen;
                const Size up_to_own = begin + row + 1 - first, own = up_to_own < seen ? up_to_own : seen;
#pragma omp simd
                for (Size i = 0; i < own; i++) {
                    float p = exponential(score[i] - log_sum);
                    store(weight[i], p);
                    store(ds[i], p * (dp[i] - average) * scale);
                }
                std::memset(weight + own, 0, (seen - own) * sizeof(T));
                std::memset(ds + own, 0, (seen - own) * sizeof(T));
            }
            float *to_query = grad_query.data() + begin * size, *to_key = grad_key.data(), *to_value = grad_value.data();
            if (begin == first && seen < last - first) {  // later queries see more of these keys, and add to them
                std::memset(to_key + seen * size, 0, (last - first - seen) * size * sizeof(float));
                std::memset(to_value + seen * size, 0, (last - first - seen) * size * sizeof(float));
            }
            multiply(product, Order::TRANSPOSED, Order::AS_IT_IS, columns, d, rows, 1, weights.data(), columns, grad, g, sum, to_value, d);
            multiply(product, Order::TRANSPOSED, Order::AS_IT_IS, columns, d, rows, 1, grad_scores.data(), columns, query, q, sum, to_key, d);
            multiply(product, Order::AS_IT_IS, Order::AS_IT_IS, rows, d, columns, 1, grad_scores.data(), columns, key, k, 1, to_query, d);
        }
        for (Size row = first; row < last; row++)
            for (Size i = 0; i < size; i++) {
                store(head.grad_key[row * grad_stride + i], grad_key[(row - first) * size + i]);
                store(head.grad_value[row * grad_stride + i], grad_value[(row - first) * size + i]);
            }
    }
    for (Size row = 0; row < length; row++)
        for (Size i = 0; i < size; i++)
            store(head.grad_query[row * grad_stride + i], grad_query[row * size + i]);
}

// Tensors [b, n, s, d] by their strides, of batch, head and position each, in the order query, key, value, out, grad;
// log_sums [b, n, s]; the gradients are [s, b, n, d], contiguous.
template <typename T>
void causal_attention_backward(void* product, const T* query, const T* key, const T* value, const T* out,
                               const T* grad, const float* log_sums, T* grad_query, T* grad_key,
                               T* grad_value, const Size* strides, Size batch, Size heads, Size length, Size size,
                               float scale) {
    const Size* batches = strides;
    const Size* head_strides = strides + 5;
    const Size grad_stride = batch * heads * size;
#pragma omp parallel for schedule(dynamic)
    for (Size number = 0; number < batch * heads; number++) {
        const Size b = number / heads, n = number % heads, place = number * size;
        const Head<T> head{query + b * batches[0] + n * head_strides[0], key + b * batches[1] + n * head_strides[1],
                        value + b * batches[2] + n * head_strides[2], out + b * batches[3] + n * head_strides[3],
                        grad + b * batches[4] + n * head_strides[4],  log_sums + number * length,
                        grad_query + place, grad_key + place, grad_value + place};
        attention_head_backward(product, head, strides + 10, grad_stride, length, size, scale);
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
    void causal_attention_backward_##type(                                                                            \
        void* product, const T* query, const T* key, const T* value, const T* out, const T* grad,                     \
        const float* log_sums, T* grad_query, T* grad_key, T* grad_value, const Size* strides, Size batch,            \
        Size heads, Size length, Size size, float scale) {                                                            \
        causal_attention_backward(product, query, key, value, out, grad, log_sums, grad_query, grad_key, grad_value,  \
                                  strides, batch, heads, length, size, scale);                                        \
    }

extern "C" {
KERNELS(float, float32)
KERNELS(bf16, bfloat16)
}
