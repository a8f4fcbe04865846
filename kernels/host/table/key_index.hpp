// A growing map from key to row number, without rows. New keys get the next number; numbers are never reused.
//
// The buckets of bucket_index.hpp under a reader-writer lock. Unlike HostTable it grows, and a reader without a lock
// would meet keys that move.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "lookup/lookup.hpp"
#include "table/bucket_index.hpp"

namespace hotrow {

class KeyIndex {
 public:
  static constexpr uint64_t kMaxKeys = 3'500'000'000;

  // Room for `capacity` keys before it first grows. Throws std::bad_alloc.
  explicit KeyIndex(uint64_t capacity) : capacity_(capacity), index_(capacity) {}

  // keys[n] -> rows[n], -1 where absent. A reserved key is absent.
  void find(const int64_t* keys, size_t n, int64_t* rows) const {
    const std::shared_lock<std::shared_mutex> hold(mutex_);
    lookup_loops().find(index_.view(), keys, n, rows);
  }

  // keys[n] -> rows[n]; absent keys are added in order. No key is reserved.
  // Throws std::bad_alloc; keys added until then stay.
  void find_or_insert(const int64_t* keys, size_t n, int64_t* rows) {
    const std::unique_lock<std::shared_mutex> hold(mutex_);
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) index_.prefetch(keys[i + kAhead]);
      const auto place = index_.find(keys[i]);
      rows[i] = place ? index_.row_at(*place) : add(keys[i]);
    }
  }

  size_t size() const {
    const std::shared_lock<std::shared_mutex> hold(mutex_);
    return keys_.size();
  }

  // Writes at most n keys in row order to `out`; returns how many.
  size_t copy_keys(int64_t* out, size_t n) const {
    const std::shared_lock<std::shared_mutex> hold(mutex_);
    n = std::min(n, keys_.size());
    std::copy_n(keys_.begin(), n, out);
    return n;
  }

 private:
  static constexpr size_t kAhead = 8;

  uint32_t add(int64_t key) {
    if (keys_.size() == capacity_) grow();
    const auto row = static_cast<uint32_t>(keys_.size());
    keys_.push_back(key);
    index_.insert(key, row);
    return row;
  }

  void grow() {
    if (capacity_ >= kMaxKeys) throw std::bad_alloc();
    const uint64_t capacity = std::min(2 * capacity_, kMaxKeys);
    index_.grow(capacity);
    capacity_ = capacity;
  }

  mutable std::shared_mutex mutex_;  // guards everything below
  uint64_t capacity_;
  BucketIndex index_;
  std::vector<int64_t> keys_;  // by row number
};

}  // namespace hotrow
