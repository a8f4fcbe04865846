// One training step on the rows of tables: pool bags, sum each row's gradients, move the rows.
//
// The bits of every result are the same whatever the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "training/trained_rows.hpp"
#include "training/training_table.hpp"
#include "training/update_rule.hpp"

namespace hotrow {

// Bags of row numbers. A row of -1 is absent.
struct RowBags {
  const int64_t* rows;
  const int64_t* row_ptrs;  // [count + 1]; nullptr: one row per bag
  size_t count;
  Combiner combiner;
  const float* weights;  // one per row number, or nullptr

  size_t begin(size_t bag) const { return row_ptrs ? static_cast<size_t>(row_ptrs[bag]) : bag; }
  size_t end(size_t bag) const { return begin(bag + 1); }
  size_t size() const { return begin(count); }
  float weight(size_t place) const { return weights ? weights[place] : 1; }
  // What the weighted sum of a bag is divided by, as serving does. 0: the bag becomes zeros.
  float divisor(size_t bag) const;
};

struct Pooling {
  TrainedRows table;
  RowBags bags;
  float* out;  // [bags.count][dim]
};

// out = the combined weights of each bag.
void pool(const std::vector<Pooling>& poolings);

struct BagGradient {
  RowBags bags;
  const float* gradient;  // [bags.count][dim], of the pooled bags
  bool is_of_rows = false;  // a bag is a row, and this is the gradient of the row as it is stored, before max_norm
  const int64_t* keys = nullptr;  // of each row number, if `RowGradients::keys` is to have them
};

// The distinct rows that some lookups of one table have read, and the sums of their gradients.
class RowGradients {
 public:
  // At most 2^31 - 1 row numbers. All gradients are of rows, or none is. Throws std::bad_alloc.
  explicit RowGradients(const std::vector<BagGradient>& lookups, size_t dim);

  // In the order of their first places.
  const std::vector<int64_t>& rows() const { return rows_; }
  // The key of each distinct row, if all lookups have keys.
  const std::vector<int64_t>& keys() const { return keys_; }
  // sum[dim] = the gradient of a distinct row, which `place` counts.
  void sum(const TrainedRows& table, size_t place, float* sum) const;
  // Ask for the memory that `sum` reads: for the last place of a row, and later for its gradient.
  void prefetch_last(size_t place) const { __builtin_prefetch(&places_[static_cast<size_t>(last_[place])]); }
  void prefetch_gradient(size_t place) const { __builtin_prefetch(places_[static_cast<size_t>(last_[place])].gradient); }

 private:
  // One place at which a row was read.
  struct Place {
    const float* gradient;  // of the bag
    float share;            // of the row in the bag
    int32_t earlier;        // the row's place before; -1: none
  };

  size_t dim_;
  bool are_of_rows_;
  std::vector<Place> places_;
  std::vector<int64_t> rows_, keys_;
  std::vector<int32_t> last_;  // of each distinct row, its last place
};

struct RowSums {
  TrainedRows table;
  const RowGradients* gradients;
  std::vector<uint32_t> order;  // of the distinct rows in `out`
  float* out;                   // [order.size()][dim], their gradients
};

// The places of distinct rows in ascending order of their numbers, which fit 32 bits.
std::vector<uint32_t> ascending(const std::vector<int64_t>& rows);

void sum_gradients(const std::vector<RowSums>& sums);

// out[rows][dim] = the gradient of each row of an array, divided by `divisor`: zeros where no place reads it.
void array_gradients(const TrainedRows& table, const BagGradient& lookup, size_t rows, float divisor, float* out);

// out[n] = the gradient of each weight. `bags.weights` are there.
void weight_gradients(const TrainedRows& table, const BagGradient& lookup, float* out);

struct TableUpdate {
  TrainingTable* table;
  std::vector<BagGradient> lookups;
};

// Move the rows of each table, which have the rule's states.
void update(const std::vector<TableUpdate>& updates, const RuleStep& step);

}  // namespace hotrow
