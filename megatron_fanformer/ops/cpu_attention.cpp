// Causal attention, forward and backward, on a CPU, in float32 and in bf16; `cpu_kernels.py` describes the arguments.
//
// A thread takes a head of a sample, and of it a block of queries with a block of keys at a time: their scores stay in
// the core's cache, and those of keys that no query of the block sees are not computed. Sums are in float32; in bf16,
// what is multiplied is rounded to it.

#include <vector>

#include "cpu_kernels.h"

namespace {

constexpr Size QUERIES = 96, MOST_KEYS = 256;  // of a block: multiples of TILE_ROWS, and of TILE_LANES * LANES

// Tensors [b, n, s, d] of a call. Strides are of batch, head and position each, in the order query, key, value, out,
// grad; what is made is [s, b, n, d], contiguous; log_sums is [b, n, s].
template <typename T>
struct Call {
    const T *query, *key, *value, *out, *grad;
    float* log_sums;
    T *made, *grad_query, *grad_key, *grad_value;
    const Size* strides;
    Size batch, heads, length, size;
    float scale;

    Call of_head(Size number) const {
        const Size b = number / heads, n = number % heads, place = number * size;
        const auto start = [&](Size which) { return b * strides[which] + n * strides[5 + which]; };
        Call head = *this;
        head.query += start(0), head.key += start(1), head.value += start(2);
        head.out += start(3), head.grad += start(4);
        head.log_sums += number * length;
        head.made += place, head.grad_query += place, head.grad_key += place, head.grad_value += place;
        return head;
    }
    Size stride(Size which) const { return strides[10 + which]; }
    Size made_stride() const { return batch * heads * size; }
    Size width() const { return up_to_multiple(size, LANES); }
    Size steps() const { return in_words<T>(size); }
    // Keys of a block, and a block's scores: a short sequence has smaller ones.
    Size keys() const { return std::min(MOST_KEYS, up_to_multiple(length, TILE_LANES * LANES)); }
    Size block() const { return up_to_multiple(std::min(QUERIES, length), DEPTH<T>) * keys(); }
};

// How many of the `seen` keys from `first` the query at a position sees.
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
            for (Size first = 0; first < end; first += block_keys) see(head, begin, end, first);
            for (Size row = 0; row < end - begin; row++) {
                for (Size i = 0; i < width; i++) sums[row * width + i] *= float(1 / total[row]);
                head.log_sums[begin + row] = float(most[row] + std::log(total[row]));
            }
            write_rows(sums, end - begin, width, head.made + begin * head.made_stride(), head.made_stride(), head.size);
        }
    }

  private:
    // Have the queries [begin, end) see the keys from `first`: softmax's sums go on from the keys before.
    void see(const Call<T>& head, Size begin, Size end, Size first) {
        const Size rows = end - begin, seen = std::min(end - first, block_keys), columns = up_to_multiple(seen, LANES);
        multiply<T>(along_rows(head.query + begin * head.stride(0), head.stride(0)),
                    keys.data() + first * head.steps(), block_keys, head.steps(), scores.data(), block_keys, rows,
                    columns, false);
        for (Size row = 0; row < rows; row++) {
            const Size own = visible(begin + row, first, seen);
            const float *score = scores.data() + row * block_keys, scale = head.scale;
            T* weight = weights.data() + row * block_keys;
            float greatest = first ? most[row] : -INFINITY, sum = 0;
#pragma omp simd reduction(max : greatest)
            for (Size i = 0; i < own; i++) greatest = score[i] * scale > greatest ? score[i] * scale : greatest;
#pragma omp simd reduction(+ : sum)
            for (Size i = 0; i < own; i++) {
                const float e = exponential(score[i] * scale - greatest);
                sum += e;
                store(weight[i], e);
            }
            std::fill(weight + own, weight + columns, T{});
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
            for (Size i = 0; i < head.size; i++) average += wide(out[i]) * wide(grad[i]);
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
                see(head, begin, std::min(begin + QUERIES, head.length), first, count);
            write_rows(grad_key, count, width, head.grad_key + first * stride, stride, head.size);
            write_rows(grad_value, count, width, head.grad_value + first * stride, stride, head.size);
        }
        write_rows(grad_query, head.length, width, head.grad_query, stride, head.size);
    }

  private:
    // What the queries [begin, end) and the `count` keys from `first` add to each other's gradients.
    void see(const Call<T>& head, Size begin, Size end, Size first, Size count) {
        const Size rows = end - begin, seen = std::min(end - first, count), columns = up_to_multiple(seen, LANES);
        multiply<T>(along_rows(head.query + begin * head.stride(0), head.stride(0)), keys.data(), block_keys,
                    head.steps(), weights.data(), block_keys, rows, columns, false);
        multiply<T>(along_rows(head.grad + begin * head.stride(4), head.stride(4)), values.data(), block_keys,
                    head.steps(), slopes.data(), block_keys, rows, columns, false);
        for (Size row = 0; row < rows; row++) {
            const Size own = visible(begin + row, first, seen);
            float *weight = weights.data() + row * block_keys, *slope = slopes.data() + row * block_keys;
            const float log_sum = head.log_sums[begin + row], average = averages[begin + row], scale = head.scale;
#pragma omp simd
            for (Size i = 0; i < own; i++) {
                weight[i] = exponential(weight[i] * scale - log_sum);
                slope[i] = weight[i] * (slope[i] - average) * scale;
            }
            std::fill(weight + own, weight + columns, 0.0f);
            std::fill(slope + own, slope + columns, 0.0f);
        }
        const Size steps = in_words<T>(rows), done = begin / DEPTH<T> * width;
        multiply<T>(by_keys(weights, weight_words, rows, columns), grad_rows.data() + done, width, steps,
                    grad_value.data(), width, seen, width, true);
        multiply<T>(by_keys(slopes, slope_words, rows, columns), query_rows.data() + done, width, steps,
                    grad_key.data(), width, seen, width, true);
        multiply<T>(by_queries(rows, columns), key_rows.data(), width, in_words<T>(seen),
                    grad_query.data() + begin * width, width, rows, width, true);
    }

    // A block [queries, keys] as the left factor of a sum over queries, and the slopes as that of a sum over keys.
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
        for (Size number = 0; number < call.batch * call.heads; number++) pass(call.of_head(number));
    }
}

}  // namespace

#define KERNELS(T, type)                                                                                              \
    void causal_attention_##type(const T* query, const T* key, const T* value, T* out, float* log_sums,               \
                                 const Size* strides, Size batch, Size heads, Size length, Size size, float scale) {  \
        /* what a forward does not touch is anything of the right type */                                             \
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
