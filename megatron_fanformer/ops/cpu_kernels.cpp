// The element-wise functions of a layer, the loss head's softmax and the backward of causal attention, on a CPU in bf16.
//
// PyTorch makes each of its operations a pass over memory. Here every function reads its inputs once and writes its
// outputs once, in float32 between. `cpu_kernels.py` builds this file and describes the functions' arguments.
//
// Nothing here links an OpenMP of its own: torch's is the one of the process, with its threads.

#include <cstdint>
#include <cstring>
#include <cmath>
#include <vector>

namespace {

using bf16 = uint16_t;
using Size = int64_t;

inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// To the nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return bf16(x != x ? 0x7fc0 : rounded);
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

// MKL's product with float32 sums, which torch's library has: c = alpha * op(a) op(b) + beta * c.
using Product = void (*)(int, int, int, int, int, int, float, const void*, int, const void*, int, float, float*, int);
constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;
constexpr Size QUERIES = 128, KEYS = 256;  // of a block, whose scores stay in a core's cache

}  // namespace

extern "C" {

void swiglu(const bf16* gate_up, bf16* out, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + row * 2 * width, *up = gate + width;
        bf16* to = out + row * width;
#pragma omp simd
        for (Size i = 0; i < width; i++) {
            float g = wide(gate[i]);
            to[i] = narrow(g * sigmoid(g) * wide(up[i]));
        }
    }
}

void swiglu_backward(const bf16* gate_up, const bf16* grad, bf16* grad_gate_up, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + row * 2 * width, *up = gate + width, *from = grad + row * width;
        bf16 *grad_gate = grad_gate_up + row * 2 * width, *grad_up = grad_gate + width;
#pragma omp simd
        for (Size i = 0; i < width; i++) {
            float g = wide(gate[i]), d = wide(from[i]), s = sigmoid(g);
            grad_up[i] = narrow(d * g * s);
            grad_gate[i] = narrow(d * wide(up[i]) * s * (1.0f + g * (1.0f - s)));
        }
    }
}

void rms_norm(const bf16* x, const bf16* weight, float eps, bf16* out, float* scale, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size row = 0; row < rows; row++) {
        const bf16* from = x + row * width;
        bf16* to = out + row * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (Size i = 0; i < width; i++) squares += wide(from[i]) * wide(from[i]);
        float factor = 1.0f / std::sqrt(squares / float(width) + eps);
        scale[row] = factor;
#pragma omp simd
        for (Size i = 0; i < width; i++) to[i] = narrow(wide(from[i]) * factor * wide(weight[i]));
    }
}

// `grad_weight` [width] of each of `parts` parts of the rows: their sum is the weight's gradient.
void rms_norm_backward(const bf16* x, const bf16* weight, const float* scale, const bf16* grad, bf16* grad_x,
                       float* grad_weight, Size parts, Size rows, Size width) {
#pragma omp parallel for schedule(static)
    for (Size part = 0; part < parts; part++) {
        float* sums = grad_weight + part * width;
        std::memset(sums, 0, width * sizeof(float));
        for (Size row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
            const bf16 *from = x + row * width, *of = grad + row * width;
            bf16* to = grad_x + row * width;
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
                to[i] = narrow(wide(of[i]) * wide(weight[i]) * factor - wide(from[i]) * along);
        }
    }
}

// Pairs (i, i + half) of each head rotated by the angles of its position; `sign` -1 rotates back.
void rotate(const bf16* x, const float* cosines, const float* sines, float sign, bf16* out, Size positions, Size batch,
            Size heads, Size half, Size position_stride, Size batch_stride, Size head_stride) {
#pragma omp parallel for schedule(static)
    for (Size position = 0; position < positions; position++) {
        const float *cos = cosines + position * half, *sin = sines + position * half;
        for (Size b = 0; b < batch; b++)
            for (Size head = 0; head < heads; head++) {
                const bf16* from = x + position * position_stride + b * batch_stride + head * head_stride;
                bf16* to = out + ((position * batch + b) * heads + head) * 2 * half;
#pragma omp simd
                for (Size i = 0; i < half; i++) {
                    float first = wide(from[i]), second = wide(from[i + half]), s = sign * sin[i];
                    to[i] = narrow(first * cos[i] - second * s);
                    to[i + half] = narrow(second * cos[i] + first * s);
                }
            }
    }
}

void softmax(bf16* logits, float* greatest, float* sums, Size rows, Size width) {
#pragma omp parallel
    {
        std::vector<float> scratch(width);  // stays in the core's cache
        float* exponentials = scratch.data();
#pragma omp for schedule(static)
        for (Size row = 0; row < rows; row++) {
            bf16* values = logits + row * width;
            float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
            for (Size i = 0; i < width; i++) most = wide(values[i]) > most ? wide(values[i]) : most;
#pragma omp simd reduction(+ : sum)
            for (Size i = 0; i < width; i++) sum += exponentials[i] = exponential(wide(values[i]) - most);
            const float share = 1.0f / sum;
#pragma omp simd
            for (Size i = 0; i < width; i++) values[i] = narrow(exponentials[i] * share);
            greatest[row] = most;
            sums[row] = sum;
        }
    }
}

// Of one head of one sample: all but `grad_*` are read. Strides are those of positions; log_sums has one per position.
struct Head {
    const bf16 *query, *key, *value, *out, *grad;
    const float* log_sums;
    bf16 *grad_query, *grad_key, *grad_value;
};

static void attention_head_backward(Product product, const Head& head, const Size* strides, Size grad_stride, Size length,
                                    Size size, float scale) {
    const int q = int(strides[0]), k = int(strides[1]), v = int(strides[2]), g = int(strides[4]), d = int(size);
    std::vector<float> scores(QUERIES * KEYS), grads(QUERIES * KEYS), averages(length);
    std::vector<float> grad_query(length * size, 0.0f), grad_key(KEYS * size), grad_value(KEYS * size);
    std::vector<bf16> weights(QUERIES * KEYS), grad_scores(QUERIES * KEYS);
    for (Size row = 0; row < length; row++) {
        const bf16 *out = head.out + row * strides[3], *of = head.grad + row * g;
        float average = 0;
#pragma omp simd reduction(+ : average)
        for (Size i = 0; i < size; i++) average += wide(out[i]) * wide(of[i]);
        averages[row] = average;
    }
    for (Size first = 0; first < length; first += KEYS) {
        const Size last = first + KEYS < length ? first + KEYS : length;
        const bf16 *key = head.key + first * k, *value = head.value + first * v;
        for (Size begin = first; begin < length; begin += QUERIES) {
            const Size end = begin + QUERIES < length ? begin + QUERIES : length;
            const Size seen = (last < end ? last : end) - first;  // by the last of these queries
            const int rows = int(end - begin), columns = int(seen);
            const float sum = begin == first ? 0 : 1;  // these keys' first queries overwrite what was there
            const bf16 *query = head.query + begin * q, *grad = head.grad + begin * g;
            product(ROW_MAJOR, AS_IT_IS, TRANSPOSED, rows, columns, d, scale, query, q, key, k, 0, scores.data(), columns);
            product(ROW_MAJOR, AS_IT_IS, TRANSPOSED, rows, columns, d, 1, grad, g, value, v, 0, grads.data(), columns);
            for (Size row = 0; row < rows; row++) {
                const float *score = scores.data() + row * seen, *dp = grads.data() + row * seen;
                const float log_sum = head.log_sums[begin + row], average = averages[begin + row];
                bf16 *weight = weights.data() + row * seen, *ds = grad_scores.data() + row * seen;
                const Size up_to_own = begin + row + 1 - first, own = up_to_own < seen ? up_to_own : seen;
#pragma omp simd
                for (Size i = 0; i < own; i++) {
                    float p = exponential(score[i] - log_sum);
                    weight[i] = narrow(p);
                    ds[i] = narrow(p * (dp[i] - average) * scale);
                }
                std::memset(weight + own, 0, (seen - own) * sizeof(bf16));
                std::memset(ds + own, 0, (seen - own) * sizeof(bf16));
            }
            float *to_query = grad_query.data() + begin * size, *to_key = grad_key.data(), *to_value = grad_value.data();
            if (begin == first && seen < last - first) {  // later queries see more of these keys, and add to them
                std::memset(to_key + seen * size, 0, (last - first - seen) * size * sizeof(float));
                std::memset(to_value + seen * size, 0, (last - first - seen) * size * sizeof(float));
            }
            product(ROW_MAJOR, TRANSPOSED, AS_IT_IS, columns, d, rows, 1, weights.data(), columns, grad, g, sum, to_value, d);
            product(ROW_MAJOR, TRANSPOSED, AS_IT_IS, columns, d, rows, 1, grad_scores.data(), columns, query, q, sum, to_key, d);
            product(ROW_MAJOR, AS_IT_IS, AS_IT_IS, rows, d, columns, 1, grad_scores.data(), columns, key, k, 1, to_query, d);
        }
        for (Size row = first; row < last; row++)
            for (Size i = 0; i < size; i++) {
                head.grad_key[row * grad_stride + i] = narrow(grad_key[(row - first) * size + i]);
                head.grad_value[row * grad_stride + i] = narrow(grad_value[(row - first) * size + i]);
            }
    }
    for (Size row = 0; row < length; row++)
        for (Size i = 0; i < size; i++)
            head.grad_query[row * grad_stride + i] = narrow(grad_query[row * size + i]);
}

// Tensors [b, n, s, d] by their strides, of batch, head and position each, in the order query, key, value, out, grad;
// log_sums [b, n, s]; the gradients are [s, b, n, d], contiguous.
void causal_attention_backward(Product product, const bf16* query, const bf16* key, const bf16* value, const bf16* out,
                               const bf16* grad, const float* log_sums, bf16* grad_query, bf16* grad_key,
                               bf16* grad_value, const Size* strides, Size batch, Size heads, Size length, Size size,
                               float scale) {
    const Size* batches = strides;
    const Size* head_strides = strides + 5;
    const Size grad_stride = batch * heads * size;
#pragma omp parallel for schedule(dynamic)
    for (Size number = 0; number < batch * heads; number++) {
        const Size b = number / heads, n = number % heads, place = number * size;
        const Head head{query + b * batches[0] + n * head_strides[0], key + b * batches[1] + n * head_strides[1],
                        value + b * batches[2] + n * head_strides[2], out + b * batches[3] + n * head_strides[3],
                        grad + b * batches[4] + n * head_strides[4],  log_sums + number * length,
                        grad_query + place, grad_key + place, grad_value + place};
        attention_head_backward(product, head, strides + 10, grad_stride, length, size, scale);
    }
}

}  // extern "C"
