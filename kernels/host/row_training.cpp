#include "row_training.hpp"

#include <algorithm>
#include <cmath>

#include "core_pool.hpp"

namespace hotrow {
namespace {

constexpr size_t kChunk = 1024;  // rows or bags that one thread takes at a time
constexpr size_t kAhead = 8;     // rows whose memory is asked for before their turn

template <class Work>
void in_chunks(size_t items, const Work& work) {
  CorePool::shared().run((items + kChunk - 1) / kChunk, [&](size_t chunk) {
    work(chunk * kChunk, std::min(items, (chunk + 1) * kChunk));
  });
}

void prefetch(const float* values, size_t count) {
  for (size_t at = 0; at < count; at += 16) __builtin_prefetch(values + at);
}

float divisor_of(Combiner combiner, int64_t keys) {
  if (keys < 2 || combiner == Combiner::kSum) return 1;
  const auto count = static_cast<float>(keys);
  return combiner == Combiner::kMean ? count : std::sqrt(count);
}

template <size_t kStates, class Formula>
void move_with(const TrainedTable& table, const int64_t* rows, size_t n, const float* gradient, const Formula& move) {
  const size_t dim = table.dim;
  in_chunks(n, [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      if (i + kAhead < last) prefetch(table.row(rows[i + kAhead]), (1 + kStates) * dim);
      float* __restrict w = table.row(rows[i]);
      float* __restrict s = kStates > 0 ? w + dim : nullptr;
      float* __restrict t = kStates > 1 ? w + 2 * dim : nullptr;
      const float* __restrict g = gradient + i * dim;
      float none = 0;
      for (size_t d = 0; d < dim; ++d) {
        if constexpr (kStates == 0)
          move(w[d], g[d], none, none);
        else if constexpr (kStates == 1)
          move(w[d], g[d], s[d], none);
        else
          move(w[d], g[d], s[d], t[d]);
      }
    }
  });
}

}  // namespace

void gather_pooled(const TrainedTable& table, const int64_t* rows, const Bags& bags, float absent, float* out) {
  const size_t dim = table.dim;
  const int64_t n = bags.row_ptrs[bags.count];
  in_chunks(bags.count, [&](size_t first, size_t last) {
    for (size_t bag = first; bag < last; ++bag) {
      float* __restrict sum = out + bag * dim;
      std::fill_n(sum, dim, 0.0f);
      const int64_t begin = bags.row_ptrs[bag], end = bags.row_ptrs[bag + 1];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t ahead = i + static_cast<int64_t>(kAhead);
        if (ahead < n && rows[ahead] >= 0) prefetch(table.row(rows[ahead]), dim);
        if (rows[i] < 0) {
          for (size_t d = 0; d < dim; ++d) sum[d] += absent;
          continue;
        }
        const float* __restrict row = table.row(rows[i]);
        for (size_t d = 0; d < dim; ++d) sum[d] += row[d];
      }
      const float divisor = divisor_of(bags.combiner, end - begin);
      if (divisor != 1)
        for (size_t d = 0; d < dim; ++d) sum[d] /= divisor;
    }
  });
}

RowPlaces::RowPlaces(const int64_t* rows, const Bags& bags, int32_t* heads)
    : bags_(bags), heads_(heads), earlier_(bags.row_ptrs[bags.count]), bag_of_(earlier_.size()) {
  const size_t n = earlier_.size();
  rows_.reserve(n);
  for (size_t bag = 0; bag < bags.count; ++bag)
    for (auto i = static_cast<size_t>(bags.row_ptrs[bag]); i < static_cast<size_t>(bags.row_ptrs[bag + 1]); ++i) {
      if (i + kAhead < n) __builtin_prefetch(heads + rows[i + kAhead], 1);
      int32_t& head = heads[rows[i]];
      if (head < 0) rows_.push_back(rows[i]);
      earlier_[i] = head;
      bag_of_[i] = static_cast<int32_t>(bag);
      head = static_cast<int32_t>(i);
    }
}

void RowPlaces::sum_gradients(const float* gradient, size_t dim, float* sums) const {
  in_chunks(rows_.size(), [&](size_t first, size_t last) {
    for (size_t place = first; place < last; ++place) {
      float* __restrict sum = sums + place * dim;
      std::fill_n(sum, dim, 0.0f);
      for (int32_t i = heads_[rows_[place]]; i >= 0; i = earlier_[i]) {
        const int32_t bag = bag_of_[i];
        const float* __restrict g = gradient + static_cast<size_t>(bag) * dim;
        const float share = 1 / divisor_of(bags_.combiner, bags_.row_ptrs[bag + 1] - bags_.row_ptrs[bag]);
        for (size_t d = 0; d < dim; ++d) sum[d] += share * g[d];
      }
    }
  });
}

void move_rows(const TrainedTable& table, const RuleStep& step, const int64_t* rows, size_t n, const float* gradient) {
  const auto rate = static_cast<float>(step.rate), a = static_cast<float>(step.a), b = static_cast<float>(step.b),
             c = static_cast<float>(step.c);
  const auto rest_of_a = static_cast<float>(1 - step.a), rest_of_b = static_cast<float>(1 - step.b);
  switch (step.rule) {
    case Rule::kSgd:
      return move_with<0>(table, rows, n, gradient, [=](float& w, float g, float&, float&) { w -= rate * g; });
    case Rule::kMomentumSgd:
      return move_with<1>(table, rows, n, gradient, [=](float& w, float g, float& m, float&) {
        m = a * m - rate * g;
        w += m;
      });
    case Rule::kNesterov:
      return move_with<1>(table, rows, n, gradient, [=](float& w, float g, float& m, float&) {
        const float before = m;
        m = a * m - rate * g;
        w += (1 + a) * m - a * before;
      });
    case Rule::kAdam:
      return move_with<2>(table, rows, n, gradient, [=](float& w, float g, float& m, float& v) {
        m = a * m + rest_of_a * g;
        v = b * v + rest_of_b * (g * g);
        w -= rate * m / (std::sqrt(v) + c);
      });
    case Rule::kAdaGrad:
      return move_with<1>(table, rows, n, gradient, [=](float& w, float g, float& sum, float&) {
        sum += g * g;
        w -= rate * g / (std::sqrt(sum) + c);
      });
    case Rule::kFtrl:
      return move_with<2>(table, rows, n, gradient, [=](float& w, float g, float& sum, float& z) {
        const float root = std::sqrt(sum);
        sum += g * g;
        const float new_root = std::sqrt(sum);
        z += g + (root - new_root) * w / rate;
        w = std::fabs(z) > a ? (std::copysign(a, z) - z) / (new_root / rate + b) : 0;
      });
  }
}

}  // namespace hotrow
