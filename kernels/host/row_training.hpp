// One training step on the rows of a table: pool bags, sum each row's gradients, and move the rows.
//
// A table is a float32 array [capacity, parts, D]: part 0 of a row is its weights, the others are the states of the
// table's update rule. A row's parts are neighbours, because a step reads and writes all of them.
// The formulas are those of training/update_rules.py, where they are explained.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lookup.hpp"

namespace hotrow {

enum class Rule { kSgd, kMomentumSgd, kNesterov, kAdam, kAdaGrad, kFtrl };
constexpr size_t kRules = 6;
constexpr const char* kRuleNames[kRules] = {"sgd", "momentum_sgd", "nesterov", "adam", "ada_grad", "ftrl"};
constexpr size_t kRuleStates[kRules] = {0, 1, 1, 2, 1, 2};

// A rule with the factors of one step. `a`, `b` and `c` are the rule's parameters: momentum_factor; beta1, beta2 and
// epsilon; epsilon; l1 and l2.
struct RuleStep {
  Rule rule;
  double rate;  // the learning rate; Adam's with both corrections
  double a, b, c;
};

struct TrainedTable {
  float* values;
  size_t capacity, parts, dim;
  float* row(int64_t number) const { return values + static_cast<size_t>(number) * parts * dim; }
};

// out[bags.count, D] = the combined weights of rows[N]. A row of -1 counts as a vector of `absent`.
void gather_pooled(const TrainedTable& table, const int64_t* rows, const Bags& bags, float absent, float* out);

// Where each distinct row is in a batch: a list from the row's last place back.
//
// `heads` is scratch with one item per row of the table, all -1 before and after: a list's first place.
class RowPlaces {
 public:
  // rows[N] are at least 0 and below the length of `heads`, and N fits 32 bits. Throws std::bad_alloc.
  RowPlaces(const int64_t* rows, const Bags& bags, int32_t* heads);
  RowPlaces(const RowPlaces&) = delete;
  RowPlaces& operator=(const RowPlaces&) = delete;
  ~RowPlaces() {
    for (const int64_t row : rows_) heads_[row] = -1;
  }

  // The distinct rows, in the order of their first places.
  const std::vector<int64_t>& rows() const { return rows_; }

  // gradient[bags.count, D] of the pooled bags -> sums[U, D], the gradient of each distinct row. The bits do not depend
  // on the number of threads.
  void sum_gradients(const float* gradient, size_t dim, float* sums) const;

 private:
  const Bags& bags_;
  int32_t* heads_;
  std::vector<int32_t> earlier_, bag_of_;
  std::vector<int64_t> rows_;
};

// Move distinct rows[n] by gradient[n, D].
void move_rows(const TrainedTable& table, const RuleStep& step, const int64_t* rows, size_t n, const float* gradient);

}  // namespace hotrow
