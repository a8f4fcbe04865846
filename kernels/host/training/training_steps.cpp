#include "training/training_steps.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "lookup/core_pool.hpp"
#include "training/row_positions.hpp"

namespace hotrow {
namespace {

constexpr size_t kChunk = 1024;  // rows or bags that one thread takes at a time
constexpr size_t kAhead = 24;    // rows whose memory is asked for before their turn

// Call work(group, first, last) for each chunk of each group of sizes[group] items, from several threads.
template <class Work>
void in_chunks(const std::vector<size_t>& sizes, const Work& work) {
  std::vector<std::pair<size_t, size_t>> chunks;
  for (size_t group = 0; group < sizes.size(); ++group)
    for (size_t first = 0; first < sizes[group]; first += kChunk) chunks.emplace_back(group, first);
  CorePool::shared().run(chunks.size(), [&](size_t chunk) {
    const auto [group, first] = chunks[chunk];
    work(group, first, std::min(sizes[group], first + kChunk));
  });
}

// Memory for one row in float32.
class Scratch {
 public:
  explicit Scratch(size_t dim) : floats_(dim <= kFew ? nullptr : new float[dim]) {}
  float* get() { return floats_ ? floats_.get() : few_; }

 private:
  static constexpr size_t kFew = 256;
  float few_[kFew];
  std::unique_ptr<float[]> floats_;
};

inline void pool_bags_anywhere(const Pooling& pooling, size_t first, size_t last) {
  const TrainedRows& table = pooling.table;
  const RowBags& bags = pooling.bags;
  const size_t dim = table.dim, n = bags.size(), bytes = row_bytes(table.type, table.dim);
  Scratch scratch(dim);
  for (size_t bag = first; bag < last; ++bag) {
    float* __restrict sum = pooling.out + bag * dim;
    for (size_t d = 0; d < dim; ++d) sum[d] = 0;
    for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
      if (i + kAhead < n && bags.rows[i + kAhead] >= 0) table.prefetch(bags.rows[i + kAhead], bytes);
      const float weight = bags.weight(i);
      if (bags.rows[i] < 0) {
        for (size_t d = 0; d < dim; ++d) sum[d] += weight * table.absent;
        continue;
      }
      const float* __restrict row = table.read(bags.rows[i], scratch.get());
      float norm;
      const float factor = weight * (table.max_norm > 0 ? table.scale_of(row, norm) : 1);
      for (size_t d = 0; d < dim; ++d) sum[d] += factor * row[d];
    }
    const float divisor = bags.divisor(bag);
    if (divisor == 0)
      std::fill_n(sum, dim, 0.0f);
    else if (divisor != 1)
      for (size_t d = 0; d < dim; ++d) sum[d] /= divisor;
  }
}

#if defined(__x86_64__)
// Compile a function and all that it calls for AVX2. Its operations round one by one, so the bits stay the same.
#define HOTROW_AVX2 __attribute__((target("avx2"), flatten))
HOTROW_AVX2 void pool_bags_avx2(const Pooling& pooling, size_t first, size_t last) {
  pool_bags_anywhere(pooling, first, last);
}
#endif

bool has_avx2() { return &lookup_loops() != &portable_loops(); }

void pool_bags(const Pooling& pooling, size_t first, size_t last) {
#if defined(__x86_64__)
  if (has_avx2()) return pool_bags_avx2(pooling, first, last);
#endif
  pool_bags_anywhere(pooling, first, last);
}

float dot(const float* one, const float* other, size_t dim) {
  double sum = 0;
  for (size_t d = 0; d < dim; ++d) sum += static_cast<double>(one[d]) * other[d];
  return static_cast<float>(sum);
}

template <class RowMover>
inline void move_row(const TrainingTable& table, const TrainedRows& view, int64_t row, const float* gradient, float* scratch,
              const RuleStep& step, const RowMover& mover) {
  float* weights =
      view.type == RowType::kFp32 ? reinterpret_cast<float*>(view.row(row)) : const_cast<float*>(view.read(row, scratch));
  if (step.type == UpdateType::kLazyGlobal)
    mover.move_lazily(weights, view.states(row), gradient, view.dim, table.last_step(row));
  else
    mover.move(weights, view.states(row), gradient, view.dim);
  if (view.type != RowType::kFp32) view.write(row, weights);
}

// Move the distinct rows from `first` to `last`.
template <class RowMover>
inline void move_distinct_anywhere(TrainingTable& table, const RowGradients& gradients, size_t first, size_t last,
                                   const RuleStep& step, const RowMover& mover) {
  const TrainedRows view = table.view();
  const std::vector<int64_t>& rows = gradients.rows();
  Scratch sum(view.dim), weights(view.dim);
  for (size_t place = first; place < last; ++place) {
    if (place + kAhead < last) {
      view.prefetch(rows[place + kAhead], view.stride_bytes);
      table.prefetch_last_step(rows[place + kAhead]);
    }
    gradients.sum(view, place, sum.get());
    if (step.scaler != 1)
      for (size_t d = 0; d < view.dim; ++d) sum.get()[d] /= static_cast<float>(step.scaler);
    move_row(table, view, rows[place], sum.get(), weights.get(), step, mover);
    table.set_last_step(rows[place], step.step);
  }
}

#if defined(__x86_64__)
template <class RowMover>
HOTROW_AVX2 void move_distinct_avx2(TrainingTable& table, const RowGradients& gradients, size_t first, size_t last,
                                    const RuleStep& step, const RowMover& mover) {
  move_distinct_anywhere(table, gradients, first, last, step, mover);
}
#endif

template <class RowMover>
void move_distinct(TrainingTable& table, const RowGradients& gradients, size_t first, size_t last, const RuleStep& step,
                   const RowMover& mover) {
#if defined(__x86_64__)
  if (has_avx2()) return move_distinct_avx2(table, gradients, first, last, step, mover);
#endif
  move_distinct_anywhere(table, gradients, first, last, step, mover);
}

// Turn the gradient of a row that was scaled to max_norm into that of the stored row. The scale depends on the row: its
// derivative takes away what points along the row.
void through_max_norm(const TrainedRows& table, int64_t number, float* gradient) {
  if (table.max_norm <= 0) return;
  Scratch scratch(table.dim);
  const float* row = table.read(number, scratch.get());
  float norm;
  const float scale = table.scale_of(row, norm);
  if (scale == 1) return;
  const float along = dot(row, gradient, table.dim) / norm / norm;
  for (size_t d = 0; d < table.dim; ++d) gradient[d] = scale * (gradient[d] - along * row[d]);
}

inline void add_places_anywhere(const BagGradient& lookup, size_t dim, float* out) {
  for (size_t bag = 0; bag < lookup.bags.count; ++bag) {
    const float divisor = lookup.bags.divisor(bag);
    const float* __restrict gradient = lookup.gradient + bag * dim;
    for (size_t i = lookup.bags.begin(bag); divisor != 0 && i < lookup.bags.end(bag); ++i) {
      const float share = lookup.bags.weight(i) / divisor;
      float* __restrict sum = out + static_cast<size_t>(lookup.bags.rows[i]) * dim;
      for (size_t d = 0; d < dim; ++d) sum[d] += share * gradient[d];
    }
  }
}

#if defined(__x86_64__)
HOTROW_AVX2 void add_places_avx2(const BagGradient& lookup, size_t dim, float* out) {
  add_places_anywhere(lookup, dim, out);
}
#endif

// out[row][dim] += the gradient of each place at which the row was read. All rows are there.
void add_places(const BagGradient& lookup, size_t dim, float* out) {
#if defined(__x86_64__)
  if (has_avx2()) return add_places_avx2(lookup, dim, out);
#endif
  add_places_anywhere(lookup, dim, out);
}

}  // namespace

float RowBags::divisor(size_t bag) const {
  const size_t first = begin(bag), last = end(bag);
  if (combiner == Combiner::kSum) return 1;
  if (!weights) {
    const auto count = static_cast<float>(std::max<size_t>(last - first, 1));
    return combiner == Combiner::kMean ? count : std::sqrt(count);
  }
  if (first == last) return 1;
  float sum = 0;
  for (size_t i = first; i < last; ++i) sum += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
  return combiner == Combiner::kMean ? sum : std::sqrt(sum);
}

void pool(const std::vector<Pooling>& poolings) {
  std::vector<size_t> sizes;
  for (const Pooling& pooling : poolings) sizes.push_back(pooling.bags.count);
  in_chunks(sizes, [&](size_t number, size_t first, size_t last) { pool_bags(poolings[number], first, last); });
}

RowGradients::RowGradients(const std::vector<BagGradient>& lookups, size_t dim)
    : dim_(dim), are_of_rows_(!lookups.empty() && lookups[0].is_of_rows) {
  size_t n = 0;
  for (const BagGradient& lookup : lookups) n += lookup.bags.size();
  places_.reserve(n);
  rows_.reserve(n);
  last_.reserve(n);
  const bool are_distinct = lookups.size() == 1 && are_of_rows_;  // merge_gradients has merged equal rows
  RowPositions positions(are_distinct ? 0 : n);
  for (const auto& [bags, gradient, is_of_rows, keys] : lookups) {
    const size_t count = bags.size();
    for (size_t bag = 0; bag < bags.count; ++bag) {
      const float divisor = bags.divisor(bag);
      for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (bags.rows[i] < 0) continue;
        size_t position = rows_.size();
        if (!are_distinct) {
          if (i + kAhead < count) positions.prefetch(bags.rows[i + kAhead]);
          position = positions.find_or_insert(bags.rows[i], position);
        }
        if (position == rows_.size()) {
          rows_.push_back(bags.rows[i]);
          last_.push_back(-1);
          if (keys) keys_.push_back(keys[i]);
        }
        int32_t& last = last_[position];
        places_.push_back({gradient + bag * dim, divisor == 0 ? 0 : bags.weight(i) / divisor, last});
        last = static_cast<int32_t>(places_.size() - 1);
      }
    }
  }
}

void RowGradients::sum(const TrainedRows& table, size_t place, float* __restrict sum) const {
  for (size_t d = 0; d < dim_; ++d) sum[d] = 0;
  for (int32_t at = last_[place]; at >= 0;) {
    const auto [gradient, share, earlier] = places_[static_cast<size_t>(at)];
    if (earlier >= 0) __builtin_prefetch(&places_[static_cast<size_t>(earlier)]);
    for (size_t d = 0; d < dim_; ++d) sum[d] += share * gradient[d];
    at = earlier;
  }
  if (!are_of_rows_) through_max_norm(table, rows_[place], sum);
}

void sum_gradients(const std::vector<RowSums>& sums) {
  std::vector<size_t> sizes;
  for (const RowSums& one : sums) sizes.push_back(one.order.size());
  in_chunks(sizes, [&](size_t number, size_t first, size_t last) {
    const RowSums& one = sums[number];
    for (size_t place = first; place < last; ++place) {
      if (place + 2 * kAhead < last) one.gradients->prefetch_last(one.order[place + 2 * kAhead]);
      if (place + kAhead < last) one.gradients->prefetch_gradient(one.order[place + kAhead]);
      one.gradients->sum(one.table, one.order[place], one.out + place * one.table.dim);
    }
  });
}

std::vector<uint32_t> ascending(const std::vector<int64_t>& rows) {
  // A radix sort, eleven bits at a time. Few rows would not pay for the counts.
  constexpr size_t kFew = 512;
  constexpr int kBits = 11;
  std::vector<uint32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0u);
  if (rows.size() < kFew) {
    std::sort(order.begin(), order.end(), [&](uint32_t one, uint32_t other) { return rows[one] < rows[other]; });
    return order;
  }
  const int64_t largest = *std::max_element(rows.begin(), rows.end());
  std::vector<uint32_t> sorted(rows.size());
  for (int shift = 0; shift < 33 && largest >> shift; shift += kBits) {
    const auto digit = [&](uint32_t place) {
      return static_cast<size_t>(rows[place] >> shift) & ((size_t{1} << kBits) - 1);
    };
    std::vector<uint32_t> begins((size_t{1} << kBits) + 1);
    for (const uint32_t place : order) ++begins[digit(place) + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    for (const uint32_t place : order) sorted[begins[digit(place)]++] = place;
    order.swap(sorted);
  }
  return order;
}

void array_gradients(const TrainedRows& table, const BagGradient& lookup, size_t rows, float divisor, float* out) {
  std::fill_n(out, rows * table.dim, 0.0f);
  add_places(lookup, table.dim, out);
  if (divisor == 1 && table.max_norm <= 0) return;
  in_chunks({rows}, [&](size_t, size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      float* gradient = out + row * table.dim;
      through_max_norm(table, static_cast<int64_t>(row), gradient);
      for (size_t d = 0; d < table.dim; ++d) gradient[d] /= divisor;
    }
  });
}

void weight_gradients(const TrainedRows& table, const BagGradient& lookup, float* out) {
  const RowBags& bags = lookup.bags;
  const size_t dim = table.dim;
  in_chunks({bags.count}, [&](size_t, size_t first, size_t last) {
    Scratch scratch(dim);
    for (size_t bag = first; bag < last; ++bag) {
      const float* gradient = lookup.gradient + bag * dim;
      const float divisor = bags.divisor(bag);
      float along = 0;  // dot product of the undivided bag and the gradient
      for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (bags.rows[i] < 0) {
          float sum = 0;
          for (size_t d = 0; d < dim; ++d) sum += gradient[d];
          out[i] = table.absent * sum;
        } else {
          const float* row = table.read(bags.rows[i], scratch.get());
          float norm;
          out[i] = dot(row, gradient, dim) * (table.max_norm > 0 ? table.scale_of(row, norm) : 1);
        }
        along += bags.weights[i] * out[i];
      }
      for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
        if (divisor == 0)
          out[i] = 0;
        else if (bags.combiner == Combiner::kMean)
          out[i] = (out[i] - along / divisor) / divisor;
        else if (bags.combiner == Combiner::kSqrtN)
          out[i] = (out[i] - bags.weights[i] * along / divisor / divisor) / divisor;
      }
    }
  });
}

void update(const std::vector<TableUpdate>& updates, const RuleStep& step) {
  std::vector<std::unique_ptr<RowGradients>> gradients(updates.size());
  CorePool::shared().run(updates.size(), [&](size_t t) {
    gradients[t] = std::make_unique<RowGradients>(updates[t].lookups, updates[t].table->options().dim);
  });
  const bool is_global = step.type == UpdateType::kGlobal && moves_always(step.rule);
  std::vector<size_t> distinct, all;
  std::vector<std::vector<uint8_t>> is_moved(updates.size());
  for (size_t t = 0; t < updates.size(); ++t) {
    distinct.push_back(gradients[t]->rows().size());
    all.push_back(is_global ? updates[t].table->size() : 0);
    is_moved[t].resize(all[t]);
    updates[t].table->set_step(step.step);
  }
  with_mover(step, [&](const auto& mover) {
    in_chunks(distinct, [&](size_t t, size_t first, size_t last) {
      move_distinct(*updates[t].table, *gradients[t], first, last, step, mover);
      for (size_t place = first; is_global && place < last; ++place)
        is_moved[t][static_cast<size_t>(gradients[t]->rows()[place])] = 1;
    });
    in_chunks(all, [&](size_t t, size_t first, size_t last) {
      TrainingTable& table = *updates[t].table;
      const TrainedRows view = table.view();
      Scratch zeros(view.dim), weights(view.dim);
      std::fill_n(zeros.get(), view.dim, 0.0f);
      for (auto row = static_cast<int64_t>(first); row < static_cast<int64_t>(last); ++row) {
        if (is_moved[t][static_cast<size_t>(row)]) continue;
        move_row(table, view, row, zeros.get(), weights.get(), step, mover);
        table.set_last_step(row, step.step);
      }
    });
  });
}

}  // namespace hotrow
