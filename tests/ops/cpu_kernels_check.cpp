// Holds the CPU kernels to the same functions in float64, without Python: for machines that are only emulated here.
//
// test_cpu_kernels_on_arm.py builds it with the kernels. It prints a line a result, the error beside its bound, and
// returns 1 if any is beyond. Cases and bounds are those of test_cpu_kernels.py, where they are explained.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

using Size = int64_t;
using Doubles = std::vector<double>;

struct Bf16 {
    uint16_t bits;
};

template <typename T>
struct Kernels;

#define KERNELS(T, type)                                                                                               \
    extern "C" {                                                                                                       \
    void swiglu_##type(const T*, T*, Size, Size);                                                                      \
    void swiglu_backward_##type(const T*, const T*, T*, Size, Size);                                                   \
    void rms_norm_##type(const T*, const T*, float, T*, float*, Size, Size);                                           \
    void rms_norm_backward_##type(const T*, const T*, const float*, const T*, T*, float*, Size, Size, Size);           \
    void rotate_##type(const T*, const float*, const float*, float, T*, Size, Size, Size, Size, Size, Size, Size);     \
    void softmax_##type(T*, float*, float*, Size, Size);                                                               \
    void add_product_##type(const T*, Size, const T*, Size, float*, Size, Size, Size, Size);                           \
    void causal_attention_##type(const T*, const T*, const T*, T*, float*, const Size*, Size, Size, Size, Size,        \
                                 float);                                                                               \
    void causal_attention_backward_##type(const T*, const T*, const T*, const T*, const T*, float*, T*, T*, T*,        \
                                          const Size*, Size, Size, Size, Size, float);                                 \
    }                                                                                                                  \
    template <>                                                                                                        \
    struct Kernels<T> {                                                                                                \
        static constexpr auto swiglu = swiglu_##type;                                                                  \
        static constexpr auto swiglu_backward = swiglu_backward_##type;                                                \
        static constexpr auto rms_norm = rms_norm_##type;                                                              \
        static constexpr auto rms_norm_backward = rms_norm_backward_##type;                                            \
        static constexpr auto rotate = rotate_##type;                                                                  \
        static constexpr auto softmax = softmax_##type;                                                                \
        static constexpr auto add_product = add_product_##type;                                                        \
        static constexpr auto causal_attention = causal_attention_##type;                                              \
        static constexpr auto causal_attention_backward = causal_attention_backward_##type;                            \
    };

KERNELS(float, float32)
KERNELS(Bf16, bfloat16)

namespace {

constexpr double ROUNDED_ONCE = 1.0 / 512, OF_FEW = 1.01 / 256, SUMMED = 2 * ROUNDED_ONCE;
constexpr double IN_FLOAT32 = 2e-6, LONG_SUM = 3e-7, LONG_PRODUCT = 4e-7;

template <typename T>
constexpr bool IS_BF16 = std::is_same_v<T, Bf16>;

double wide(float x) { return x; }
double wide(Bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

void assign(float& to, double x) { to = float(x); }
void assign(Bf16& to, double x) {  // cut off: which bf16 an input becomes does not matter
    const float single = float(x);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    to.bits = uint16_t(bits >> 16);
}

std::mt19937 generator(0);

template <typename T>
std::vector<T> normal(Size count, double spread = 1) {
    std::normal_distribution<double> distribution(0, spread);
    std::vector<T> made(count);
    for (T& each : made) assign(each, distribution(generator));
    return made;
}

template <typename T>
Doubles widened(const std::vector<T>& values) {
    Doubles made;
    for (const T& each : values) made.push_back(wide(each));
    return made;
}

int failures = 0;

void report(const std::string& name, double error, double bound) {
    const bool holds = error <= bound;  // NaN does not
    std::printf("%-55s %.2e of %.2e%s\n", name.c_str(), error, bound, holds ? "" : "  BEYOND");
    failures += !holds;
}

void holds_to(const std::string& name, const Doubles& made, const Doubles& exact, double bound, double least = 1) {
    double error = 0, size = 0;
    for (size_t i = 0; i < exact.size(); i++) {
        error += (made[i] - exact[i]) * (made[i] - exact[i]);
        size += exact[i] * exact[i];
    }
    report(name, std::sqrt(error) / std::max(least, std::sqrt(size)), bound);
}

template <typename T>
void holds(const std::string& name, const std::vector<T>& made, const Doubles& exact, double of_bf16 = ROUNDED_ONCE) {
    const std::string of_type = std::string(IS_BF16<T> ? "bf16 " : "float32 ") + name;
    holds_to(of_type, widened(made), exact, IS_BF16<T> ? of_bf16 : IN_FLOAT32);
}

template <typename T>
void check_swiglu() {
    const Size rows = 15, width = 37;
    std::vector<T> x = normal<T>(rows * 2 * width, 4), grad = normal<T>(rows * width);
    const double far[] = {-200, -89, -60, 60, 89, 200};
    for (Size i = 0; i < 6; i++) assign(x[i], far[i]);
    std::vector<T> out(rows * width), grad_x(x.size());
    Kernels<T>::swiglu(x.data(), out.data(), rows, width);
    Kernels<T>::swiglu_backward(x.data(), grad.data(), grad_x.data(), rows, width);
    Doubles exact(out.size()), exact_grad(x.size());
    for (Size row = 0; row < rows; row++)
        for (Size i = 0; i < width; i++) {
            const Size gate = row * 2 * width + i, up = gate + width, of_out = row * width + i;
            const double g = wide(x[gate]), u = wide(x[up]), d = wide(grad[of_out]), s = 1 / (1 + std::exp(-g));
            exact[of_out] = g * s * u;
            exact_grad[gate] = d * u * s * (1 + g * (1 - s));
            exact_grad[up] = d * g * s;
        }
    holds("SwiGLU", out, exact);
    holds("SwiGLU's gradient", grad_x, exact_grad);
}

template <typename T>
void check_rms_norm(Size rows, Size width) {
    const Size parts = std::max<Size>(32, rows / 256);  // as cpu_kernels.py chooses them
    const double eps = 1e-5f;
    const std::vector<T> x = normal<T>(rows * width), weight = normal<T>(width), noise = normal<T>(rows * width);
    std::vector<T> grad(x.size()), out(x.size()), grad_x(x.size());
    for (size_t i = 0; i < x.size(); i++) assign(grad[i], wide(x[i]) + wide(noise[i]));  // or a weight's terms cancel
    std::vector<float> scale(rows), in_parts(parts * width);
    Kernels<T>::rms_norm(x.data(), weight.data(), float(eps), out.data(), scale.data(), rows, width);
    Kernels<T>::rms_norm_backward(x.data(), weight.data(), scale.data(), grad.data(), grad_x.data(), in_parts.data(),
                                  parts, rows, width);
    Doubles exact(x.size()), exact_grad(x.size()), exact_weight(width), grad_weight(width), exact_scale(rows);
    for (Size row = 0; row < rows; row++) {
        const Size first = row * width;
        double squares = 0, along = 0;
        for (Size i = 0; i < width; i++) {
            const double value = wide(x[first + i]);
            squares += value * value;
            along += wide(grad[first + i]) * wide(weight[i]) * value;
        }
        const double factor = exact_scale[row] = 1 / std::sqrt(squares / double(width) + eps);
        for (Size i = 0; i < width; i++) {
            const double value = wide(x[first + i]), d = wide(grad[first + i]), w = wide(weight[i]);
            exact[first + i] = value * factor * w;
            exact_grad[first + i] = d * w * factor - value * along * factor * factor * factor / double(width);
            exact_weight[i] += d * value * factor;
        }
    }
    for (size_t i = 0; i < in_parts.size(); i++) grad_weight[i % width] += double(in_parts[i]);
    const std::string of = " of " + std::to_string(rows) + " rows", type = IS_BF16<T> ? "bf16 " : "float32 ";
    holds("RMSNorm" + of, out, exact);
    holds("RMSNorm's gradient" + of, grad_x, exact_grad);
    holds_to(type + "RMSNorm's factors" + of, widened(scale), exact_scale, LONG_SUM);
    holds_to(type + "RMSNorm's weight's gradient" + of, grad_weight, exact_weight, LONG_SUM);
}

// Heads of 20, of which values 3 to 17 are rotated.
template <typename T>
void check_rotation(double sign) {
    const Size positions = 5, batch = 2, heads = 3, size = 20, start = 3, half = 7;
    const std::vector<T> x = normal<T>(positions * batch * heads * size);
    const std::vector<float> angles = normal<float>(positions * half, 50);
    std::vector<float> cosines, sines;
    for (const float angle : angles) cosines.push_back(std::cos(angle)), sines.push_back(std::sin(angle));
    std::vector<T> out(positions * batch * heads * 2 * half);
    Kernels<T>::rotate(x.data() + start, cosines.data(), sines.data(), float(sign), out.data(), positions, batch,
                       heads, half, batch * heads * size, heads * size, size);
    Doubles exact(out.size());
    for (Size head = 0; head < positions * batch * heads; head++)
        for (Size i = 0; i < half; i++) {
            const Size angle = head / (batch * heads) * half + i;
            const double first = wide(x[head * size + start + i]), second = wide(x[head * size + start + half + i]);
            const double c = cosines[angle], s = sign * sines[angle];
            exact[head * 2 * half + i] = first * c - second * s;
            exact[head * 2 * half + half + i] = second * c + first * s;
        }
    holds(sign > 0 ? "rotation" : "rotation back", out, exact);
}

// Of five rows the second has impossible columns, and the third a value that is not a number.
template <typename T>
void check_softmax(Size columns) {
    const Size rows = 5;
    std::vector<T> logits = normal<T>(rows * columns, 5);
    for (Size i = columns / 2; i < columns; i++) assign(logits[columns + i], -FLT_MAX);
    assign(logits[2 * columns + columns / 2], std::numeric_limits<double>::quiet_NaN());
    const Doubles given = widened(logits);
    std::vector<float> greatest(rows), sums(rows);
    Kernels<T>::softmax(logits.data(), greatest.data(), sums.data(), rows, columns);
    Doubles exact, made, of_greatest;
    double of_sums = 0;
    for (Size row = 0; row < rows; row++) {
        const auto first = given.begin() + row * columns;
        if (row == 2) {
            report("a row that is not a number", std::isnan(sums[row]) ? 0 : 1, 0);
            continue;
        }
        const double most = *std::max_element(first, first + columns);
        double sum = 0;
        for (Size i = 0; i < columns; i++) sum += std::exp(first[i] - most);
        for (Size i = 0; i < columns; i++) {
            exact.push_back(std::exp(first[i] - most) / sum);
            made.push_back(wide(logits[row * columns + i]) / (IS_BF16<T> ? 1 : double(sums[row])));
        }
        of_greatest.push_back(std::abs(most - double(greatest[row])));
        of_sums = std::max(of_sums, std::abs(double(sums[row]) / sum - 1));
    }
    const std::string of = " of " + std::to_string(columns) + " columns", type = IS_BF16<T> ? "bf16 " : "float32 ";
    holds_to(type + "softmax" + of, made, exact, IS_BF16<T> ? OF_FEW : IN_FLOAT32, 0);
    report(type + "softmax's greatest" + of, *std::max_element(of_greatest.begin(), of_greatest.end()), 0);
    report(type + "softmax's sums" + of, of_sums, LONG_SUM);
}

// Of views, as QKV's output gives them: [s, b, n, 3, d].
template <typename T>
void check_attention(Size length, Size size) {
    const Size batch = 2, heads = 3, all = length * batch * heads * size, stride = batch * heads * size;
    const float scale = 0.3f;
    const std::vector<T> qkv = normal<T>(3 * all), grad = normal<T>(all);
    std::vector<T> out(all), grads[3] = {out, out, out};
    std::vector<float> log_sums(batch * heads * length);
    const Size in_qkv[] = {heads * 3 * size, 3 * size, 3 * stride}, in_out[] = {heads * size, size, stride};
    Size strides[15];
    for (Size axis = 0; axis < 3; axis++)
        for (Size which = 0; which < 5; which++) strides[axis * 5 + which] = which < 3 ? in_qkv[axis] : in_out[axis];
    const T *q = qkv.data(), *k = q + size, *v = k + size;
    Kernels<T>::causal_attention(q, k, v, out.data(), log_sums.data(), strides, batch, heads, length, size, scale);
    Kernels<T>::causal_attention_backward(q, k, v, out.data(), grad.data(), log_sums.data(), grads[0].data(),
                                          grads[1].data(), grads[2].data(), strides, batch, heads, length, size, scale);

    Doubles exact(all), exact_grads[3] = {exact, exact, exact}, exact_sums(log_sums.size());
    for (Size head = 0; head < batch * heads; head++) {
        const auto at = [=](Size row, Size part) { return (row * batch * heads + head) * 3 * size + part * size; };
        const auto place = [=](Size row) { return row * stride + head * size; };
        for (Size row = 0; row < length; row++) {
            Doubles weights(row + 1), slopes(row + 1);
            double most = -INFINITY, sum = 0, average = 0;
            for (Size key = 0; key <= row; key++) {
                for (Size i = 0; i < size; i++) weights[key] += wide(qkv[at(row, 0) + i]) * wide(qkv[at(key, 1) + i]);
                most = std::max(most, weights[key] *= double(scale));
            }
            for (double& weight : weights) sum += weight = std::exp(weight - most);
            exact_sums[head * length + row] = most + std::log(sum);
            for (Size key = 0; key <= row; key++) {
                weights[key] /= sum;
                for (Size i = 0; i < size; i++) {
                    const double d = wide(grad[place(row) + i]), value = wide(qkv[at(key, 2) + i]);
                    exact[place(row) + i] += weights[key] * value;
                    exact_grads[2][place(key) + i] += weights[key] * d;
                    slopes[key] += d * value;
                }
                average += weights[key] * slopes[key];
            }
            for (Size key = 0; key <= row; key++) {
                const double slope = weights[key] * (slopes[key] - average) * double(scale);
                for (Size i = 0; i < size; i++) {
                    exact_grads[0][place(row) + i] += slope * wide(qkv[at(key, 1) + i]);
                    exact_grads[1][place(key) + i] += slope * wide(qkv[at(row, 0) + i]);
                }
            }
        }
    }
    const std::string of = " of " + std::to_string(length) + " positions, heads of " + std::to_string(size);
    const double bound = length > 1 ? SUMMED : OF_FEW;
    holds("attention" + of, out, exact, bound);
    holds_to(std::string(IS_BF16<T> ? "bf16" : "float32") + " attention's sums" + of, widened(log_sums), exact_sums,
             IN_FLOAT32);
    holds("queries' gradient" + of, grads[0], exact_grads[0], bound);
    holds("keys' gradient" + of, grads[1], exact_grads[1], bound);
    holds("values' gradient" + of, grads[2], exact_grads[2], bound);
}

// Added to a part of a sum, from parts of rows; what is around that part stays.
template <typename T>
void check_product(Size tokens, Size rows, Size columns) {
    const Size grad_stride = rows + 3, x_stride = columns + 5, sum_stride = columns + 7;
    const std::vector<T> grad = normal<T>(tokens * grad_stride), x = normal<T>(tokens * x_stride);
    std::vector<float> sums = normal<float>((rows + 4) * sum_stride), before = sums;
    Kernels<T>::add_product(grad.data() + 3, grad_stride, x.data() + 5, x_stride, sums.data() + 2 * sum_stride,
                            sum_stride, tokens, rows, columns);
    Doubles exact, made, around;
    for (Size row = 0; row < rows + 4; row++)
        for (Size column = 0; column < sum_stride; column++) {
            const Size i = row * sum_stride + column;
            if (row < 2 || row >= rows + 2 || column >= columns) {
                around.push_back(double(sums[i]) - double(before[i]));
                continue;
            }
            double sum = before[i];
            for (Size token = 0; token < tokens; token++)
                sum += wide(grad[token * grad_stride + 3 + row - 2]) * wide(x[token * x_stride + 5 + column]);
            exact.push_back(sum), made.push_back(sums[i]);
        }
    const std::string name = std::string(IS_BF16<T> ? "bf16" : "float32") + " product of " + std::to_string(tokens) +
                             " x " + std::to_string(rows) + " x " + std::to_string(columns);
    holds_to(name, made, exact, LONG_PRODUCT, 0);
    holds_to(name + ", around it", around, Doubles(around.size()), 0);
}

template <typename T>
void check_all() {
    check_swiglu<T>();
    check_rms_norm<T>(63, 451), check_rms_norm<T>(65536, 16);
    check_rotation<T>(1), check_rotation<T>(-1);
    for (const Size columns : {1, 33, 5000, 50304}) check_softmax<T>(columns);
    check_attention<T>(1, 16), check_attention<T>(100, 18), check_attention<T>(300, 64), check_attention<T>(515, 16);
    check_product<T>(1, 1, 16), check_product<T>(7, 5, 32), check_product<T>(300, 101, 208);
    check_product<T>(16384, 13, 32);
}

}  // namespace

int main() {
    check_all<float>();
    check_all<Bf16>();
    return failures > 0;
}
