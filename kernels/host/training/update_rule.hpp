// How a gradient moves one row: the formulas of training/optimizers/rules.py, where they are explained.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace hotrow {

enum class Rule { kSgd, kMomentumSgd, kNesterov, kAdam, kAdaGrad, kRowWiseAdaGrad, kFtrl };
constexpr size_t kRules = 7;
constexpr const char* kRuleNames[kRules] = {"sgd",      "momentum_sgd",      "nesterov", "adam",
                                            "ada_grad", "row_wise_ada_grad", "ftrl"};
constexpr size_t kRuleStates[kRules] = {0, 1, 1, 2, 1, 1, 2};

constexpr const char* name_of(Rule rule) { return kRuleNames[static_cast<size_t>(rule)]; }
constexpr size_t states_of(Rule rule) { return kRuleStates[static_cast<size_t>(rule)]; }

// Whether a state of a row is one float. Otherwise it has a float for each weight.
constexpr bool is_row_wise(Rule rule) { return rule == Rule::kRowWiseAdaGrad; }
constexpr size_t state_floats(Rule rule, size_t dim) { return is_row_wise(rule) ? 1 : dim; }

// Whether a row moves in a step in which its gradient is zero.
constexpr bool moves_always(Rule rule) {
  return rule == Rule::kMomentumSgd || rule == Rule::kNesterov || rule == Rule::kAdam;
}

// What a step does to the rows without a gradient: nothing; the same formula with a zero gradient; or nothing until
// their next gradient, which makes up for the skipped steps.
enum class UpdateType { kLocal, kGlobal, kLazyGlobal };
constexpr size_t kUpdateTypes = 3;
constexpr const char* kUpdateTypeNames[kUpdateTypes] = {"Local", "Global", "LazyGlobal"};

// `a`, `b` and `c` are the rule's parameters: momentum_factor; beta1, beta2 and epsilon; epsilon of both AdaGrads; l1
// and l2.
struct RuleStep {
  Rule rule;
  UpdateType type;
  double rate;
  int64_t step;  // counted from 1
  double a, b, c;
  double scaler;  // gradients are divided by it
};

// Moves rows: weights w[dim], states one after the other, gradient g[dim].
template <Rule kRule>
class Mover {
 public:
  explicit Mover(const RuleStep& step)
      : step_(step),
        rate_(static_cast<float>(kRule == Rule::kAdam ? step.rate * correction(step.step) : step.rate)),
        a_(static_cast<float>(step.a)),
        b_(static_cast<float>(step.b)),
        c_(static_cast<float>(step.c)),
        rest_of_a_(static_cast<float>(1 - step.a)),
        rest_of_b_(static_cast<float>(1 - step.b)) {}

  void move(float* __restrict w, float* __restrict states, const float* __restrict g, size_t dim) const {
    float* __restrict s = states;
    float* __restrict t = states + dim;
    if (kRule == Rule::kFtrl && rate_ == 0) return;  // its formula divides by the rate
    float rate_of_row = 0;
    if constexpr (kRule == Rule::kRowWiseAdaGrad) {
      *s += sum_of_squares(g, dim) / static_cast<float>(dim);
      rate_of_row = rate_ / (std::sqrt(*s) + a_);
    }
    for (size_t d = 0; d < dim; ++d) {
      if constexpr (kRule == Rule::kSgd) {
        w[d] -= rate_ * g[d];
      } else if constexpr (kRule == Rule::kMomentumSgd) {
        s[d] = a_ * s[d] - rate_ * g[d];
        w[d] += s[d];
      } else if constexpr (kRule == Rule::kNesterov) {
        const float before = s[d];
        s[d] = a_ * s[d] - rate_ * g[d];
        w[d] += (1 + a_) * s[d] - a_ * before;
      } else if constexpr (kRule == Rule::kAdam) {
        s[d] = a_ * s[d] + rest_of_a_ * g[d];
        t[d] = b_ * t[d] + rest_of_b_ * (g[d] * g[d]);
        w[d] -= rate_ * s[d] / (std::sqrt(t[d]) + c_);
      } else if constexpr (kRule == Rule::kAdaGrad) {
        s[d] += g[d] * g[d];
        w[d] -= rate_ * g[d] / (std::sqrt(s[d]) + a_);
      } else if constexpr (kRule == Rule::kRowWiseAdaGrad) {
        w[d] -= rate_of_row * g[d];
      } else {
        const float root = std::sqrt(s[d]);
        s[d] += g[d] * g[d];
        const float new_root = std::sqrt(s[d]);
        t[d] += g[d] + (root - new_root) * w[d] / rate_;
        w[d] = std::fabs(t[d]) > a_ ? (std::copysign(a_, t[d]) - t[d]) / (new_root / rate_ + b_) : 0;
      }
    }
  }

  // Make up for the steps since `last`, the row's last update or 0, and move.
  void move_lazily(float* __restrict w, float* __restrict states, const float* __restrict g, size_t dim,
                   int64_t last) const {
    float* __restrict s = states;
    float* __restrict t = states + dim;
    if constexpr (kRule == Rule::kMomentumSgd || kRule == Rule::kNesterov) {
      const double first = kRule == Rule::kNesterov ? step_.a * step_.a : step_.a;
      const double decay = std::pow(step_.a, static_cast<double>(step_.step - 1 - last));
      const auto made_up = static_cast<float>(first * (1 - decay) / (1 - step_.a));
      const auto kept = static_cast<float>(decay);
      for (size_t d = 0; d < dim; ++d) {
        w[d] += s[d] * made_up;
        s[d] *= kept;
      }
      move(w, states, g, dim);
    } else if constexpr (kRule == Rule::kAdam) {
      const auto elapsed = static_cast<double>(step_.step - last);
      const double kept_m = std::pow(step_.a, elapsed), kept_v = std::pow(step_.b, elapsed);
      const double moves = last > 0 ? step_.rate * correction(last) * (1 - kept_m) / (1 - step_.a) : 0;
      const auto rate = static_cast<float>(moves);
      const auto m = static_cast<float>(kept_m), v = static_cast<float>(kept_v);
      for (size_t d = 0; d < dim; ++d) {
        w[d] -= rate * s[d] / (std::sqrt(t[d]) + c_);
        s[d] = m * s[d] + rest_of_a_ * g[d];
        t[d] = v * t[d] + rest_of_b_ * (g[d] * g[d]);
      }
    } else {
      move(w, states, g, dim);
    }
  }

 private:
  // In eight sums, so that the compiler may use vectors. The order is the same in every build.
  static float sum_of_squares(const float* __restrict g, size_t dim) {
    constexpr size_t kSums = 8;
    float sums[kSums] = {};
    size_t d = 0;
    for (; d + kSums <= dim; d += kSums)
      for (size_t i = 0; i < kSums; ++i) sums[i] += g[d + i] * g[d + i];
    for (size_t i = 0; d < dim; ++d, ++i) sums[i] += g[d] * g[d];
    for (size_t half = kSums / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
  }

  // Adam's corrections of both moments.
  double correction(int64_t step) const {
    const auto steps = static_cast<double>(step);
    return std::sqrt(1 - std::pow(step_.b, steps)) / (1 - std::pow(step_.a, steps));
  }

  RuleStep step_;
  float rate_, a_, b_, c_, rest_of_a_, rest_of_b_;
};

// Call work(mover) with the Mover of the step's rule.
template <class Work>
void with_mover(const RuleStep& step, const Work& work) {
  switch (step.rule) {
    case Rule::kSgd: return work(Mover<Rule::kSgd>(step));
    case Rule::kMomentumSgd: return work(Mover<Rule::kMomentumSgd>(step));
    case Rule::kNesterov: return work(Mover<Rule::kNesterov>(step));
    case Rule::kAdam: return work(Mover<Rule::kAdam>(step));
    case Rule::kAdaGrad: return work(Mover<Rule::kAdaGrad>(step));
    case Rule::kRowWiseAdaGrad: return work(Mover<Rule::kRowWiseAdaGrad>(step));
    case Rule::kFtrl: return work(Mover<Rule::kFtrl>(step));
  }
}

}  // namespace hotrow
