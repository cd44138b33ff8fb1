// The order in which megatron-core draws from the sources of a blend, in a time that hardly depends on their number.
//
// Each step takes from the source whose error, weight * step - samples drawn so far, is the largest; of equal ones from
// the first. megatron-core's build_blending_indices computes the errors of all sources at every step. Here most of them
// sleep: while the largest error is above a floor, a source need not be looked at before its own error, which grows by
// its weight at every step, may have come to the floor. The errors that are compared are computed as there, in double
// and without fused operations, so that the order is the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace {

constexpr int64_t SLOTS = 1 << 14;  // steps ahead for which a sleeper can be put down; one that sleeps longer is put down anew
constexpr double MARGIN = 2.0;      // steps that a sleeper is woken early: rounding is far below
constexpr int64_t LEAST_AWAKE = 8;  // when the floor is put down; it is raised above four times as many
constexpr int64_t LONGEST = 32;     // steps for each source after which a floor is tried that fewer have reached

class Order {
 public:
  Order(const double* weights, int32_t sources)
      : weights_(weights), drawn_(sources, 0.0), next_(sources), slots_(SLOTS, -1), wanted_(LEAST_AWAKE) {}

  void run(int64_t steps, int16_t* source, int64_t* number) {
    wake_anew(0);
    for (int64_t step = 0; step < steps;) {
      wake(step);
      const int64_t place = largest(step);
      if (place < 0) {  // all errors are below the floor
        wake_anew(step);
        continue;
      }
      const int32_t taken = awake_[place];
      source[step] = static_cast<int16_t>(taken);
      number[step] = static_cast<int64_t>(drawn_[taken]);
      drawn_[taken] += 1.0;
      of_awake_[place] = drawn_[taken];
      if (error(taken, step) < floor_) put_down(place, step);
      ++step;
      const bool many = static_cast<int64_t>(awake_.size()) > 4 * wanted_ && awake_.size() < drawn_.size();
      if (many || step - floor_since_ >= LONGEST * sources()) wake_anew(step);
    }
  }

 private:
  int64_t sources() const { return static_cast<int64_t>(drawn_.size()); }

  double error(int64_t source, int64_t step) const {
    return weights_[source] * std::max(static_cast<double>(step), 1.0) - drawn_[source];
  }

  // The place among those awake of the largest error, of equal ones of the first source; -1 where it is below the floor.
  int64_t largest(int64_t step) {
    const double now = std::max(static_cast<double>(step), 1.0);
    const int64_t count = static_cast<int64_t>(awake_.size());
    errors_.resize(count);
    double most = -1e300;
    for (int64_t place = 0; place < count; ++place) {
      errors_[place] = weight_of_awake_[place] * now - of_awake_[place];
      most = std::max(most, errors_[place]);
    }
    if (count == 0 || most < floor_) return -1;
    int64_t found = -1;
    for (int64_t place = 0; place < count; ++place)
      if (errors_[place] == most && (found < 0 || awake_[place] < awake_[found])) found = place;
    return found;
  }

  void wake(int64_t step) {
    int32_t& slot = slots_[step % SLOTS];
    for (int32_t source = slot; source >= 0;) {
      const int32_t after = next_[source];
      if (error(source, step) >= floor_) {
        add(source);
      } else {
        sleep(source, step);
      }
      source = after;
    }
    slot = -1;
  }

  // Puts the floor at an error that about wanted_ sources have reached: at that of more where the last one did not hold
  // as long as it takes to be worth the time, which is that of all sources, while each step takes that of those awake.
  void wake_anew(int64_t step) {
    const bool held = (step - floor_since_) * wanted_ >= 4 * sources();
    wanted_ = held ? std::max(wanted_ / 2, LEAST_AWAKE) : std::min(wanted_ * 2, std::max(sources(), LEAST_AWAKE));
    floor_since_ = step;
    errors_.resize(sources());
    for (int64_t source = 0; source < sources(); ++source) errors_[source] = error(source, step);
    const auto last = errors_.begin() + (std::min(wanted_, sources()) - 1);
    std::nth_element(errors_.begin(), last, errors_.end(), std::greater<double>());
    floor_ = *last;
    std::fill(slots_.begin(), slots_.end(), -1);
    awake_.clear();
    weight_of_awake_.clear();
    of_awake_.clear();
    for (int32_t source = 0; source < sources(); ++source) {
      if (error(source, step) >= floor_) {
        add(source);
      } else {
        sleep(source, step);
      }
    }
  }

  void add(int32_t source) {
    awake_.push_back(source);
    weight_of_awake_.push_back(weights_[source]);
    of_awake_.push_back(drawn_[source]);
  }

  void put_down(int64_t place, int64_t step) {
    const int32_t source = awake_[place];
    awake_[place] = awake_.back();
    weight_of_awake_[place] = weight_of_awake_.back();
    of_awake_[place] = of_awake_.back();
    awake_.pop_back();
    weight_of_awake_.pop_back();
    of_awake_.pop_back();
    sleep(source, step);
  }

  // Puts a source into the slot of a step at which its error is still below the floor, and at least the next one.
  void sleep(int32_t source, int64_t step) {
    const double reached = (drawn_[source] + floor_) / weights_[source] - MARGIN;
    const double latest = static_cast<double>(step + SLOTS - 1);
    const int64_t at = std::max(step + 1, static_cast<int64_t>(std::min(reached, latest)));
    next_[source] = slots_[at % SLOTS];
    slots_[at % SLOTS] = source;
  }

  const double* weights_;
  std::vector<double> drawn_;
  std::vector<int32_t> next_, slots_;  // lists of sleepers, by the step modulo SLOTS
  int64_t wanted_, floor_since_ = 0;
  double floor_ = 0.0;
  std::vector<int32_t> awake_;
  std::vector<double> weight_of_awake_, of_awake_, errors_;
};

}  // namespace

// Fills source and number, [steps] each, for sources of those weights.
extern "C" void blend_order(const double* weights, int32_t sources, int64_t steps, int16_t* source, int64_t* number) {
  Order(weights, sources).run(steps, source, number);
}
