// Rows of equal size in one huge-page array, and which of them are free.
//
// A row is free, in the index, or retired: taken out of the index in some epoch and waiting until no reader can hold
// it. Free rows are reused last in, first out.
//
// An extra row at the end always has zero bytes: absent keys read it, and it is zeros in every row type.
//
// Only the writer calls methods other than view(); callers keep writers apart.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "memory/huge_array.hpp"
#include "table/bucket.hpp"
#include "table/epochs.hpp"

namespace hotrow {

// An arena for readers: `count` rows and then one row of zeros. kNoRow and every number beyond the rows read this row,
// so even a file that changed after its check (snapshot.hpp) cannot lead outside the arena.
struct RowsView {
  const std::byte* rows;
  size_t stride_bytes;
  uint32_t count;

  // A branch, which is predicted, instead of a minimum, which delays the address: 2 % of a lookup.
  const std::byte* at(uint32_t row) const {
    return rows + size_t{__builtin_expect(row < count, 1) ? row : count} * stride_bytes;
  }
};

class RowArena {
 public:
  // With `lent`, in zeroed memory of bytes_for(...) that another owns.
  RowArena(size_t stride_bytes, uint32_t rows, Epochs& epochs, std::byte* lent = nullptr)
      : stride_bytes_(stride_bytes), rows_(rows), memory_(bytes_for(stride_bytes, rows), lent), epochs_(epochs) {}

  static size_t bytes_for(size_t stride_bytes, uint64_t rows) { return (rows + 1) * stride_bytes; }

  RowsView view() const { return {memory_.data(), stride_bytes_, rows_}; }
  size_t memory_bytes() const { return memory_.bytes(); }
  std::byte* row(uint32_t number) const { return memory_.data() + number * stride_bytes_; }

  // Make sure that `rows` rows can be retired without an allocation, so that a write cannot fail half way.
  void reserve_retired(size_t rows) {
    retired_.erase(retired_.begin(), retired_.begin() + static_cast<ptrdiff_t>(first_retired_));
    first_retired_ = 0;
    grow(retired_, retired_.size() + rows);
    grow(free_, free_.size() + retired_.size() + rows);
  }

  // A row to write. Waits only while readers may hold every row that is not in the index. A stay takes microseconds, so
  // a reader in another process that stays for seconds is stopped: then the write fails.
  uint32_t take() {
    if (free_.empty() && untouched_ < rows_) return untouched_++;
    if (free_.empty()) wait_for_a_row();
    const uint32_t number = free_.back();
    free_.pop_back();
    return number;
  }

  // Fetch the free row that will be taken `ahead` rows from now: it was retired unread, so no cache has it.
  void prefetch(size_t ahead) const {
    if (ahead >= free_.size()) return;
    const auto* line = reinterpret_cast<const char*>(row(free_[free_.size() - 1 - ahead]));
    for (size_t at = 0; at < stride_bytes_; at += 64) __builtin_prefetch(line + at, 1, 2);
    __builtin_prefetch(line + stride_bytes_ - 1, 1, 2);  // a row-wise row may begin anywhere in a line
  }

  // Another process wrote here until now: readers may hold any row, and rows that are not in the index become free.
  void adopt(const std::vector<bool>& is_used) {
    untouched_ = rows_;
    free_.clear();
    retired_.clear();
    first_retired_ = 0;
    for (uint32_t number = 0; number < rows_; ++number)
      if (!is_used[number]) retire(number);
    reserve_retired(0);
    end_epoch();
    reclaim();
  }

  // A row that was just unlinked from the index.
  void retire(uint32_t number) { retired_.push_back({kRunningEpoch, number}); }

  // End the write's epoch: rows retired so far become free once its readers have left.
  void end_epoch() {
    const uint64_t epoch = epochs_.end_epoch();
    for (size_t i = retired_.size(); i-- > first_retired_ && retired_[i].epoch == kRunningEpoch;)
      retired_[i].epoch = epoch;
  }

  // Collect retired rows whose readers have left.
  void reclaim() {
    if (first_retired_ == retired_.size()) return;
    const uint64_t earliest = epochs_.earliest_reader();
    for (; first_retired_ < retired_.size() && retired_[first_retired_].epoch < earliest; ++first_retired_)
      free_.push_back(retired_[first_retired_].number);
  }

 private:
  static constexpr uint64_t kRunningEpoch = UINT64_MAX;
  static constexpr std::chrono::seconds kLongestStay{5};
  struct Retired {
    uint64_t epoch;
    uint32_t number;
  };

  void wait_for_a_row() {
    const auto deadline = std::chrono::steady_clock::now() + kLongestStay;
    for (;;) {
      end_epoch();
      reclaim();
      if (!free_.empty()) return;
      epochs_.clear_gone();
      if (std::chrono::steady_clock::now() > deadline) epochs_.check_stuck();
      std::this_thread::yield();
    }
  }

  // Like vector::reserve, but doubling, so that many small reservations stay cheap.
  template <class T>
  static void grow(std::vector<T>& list, size_t size) {
    if (size > list.capacity()) list.reserve(std::max(size, 2 * list.capacity()));
  }

  size_t stride_bytes_;
  uint32_t rows_;
  uint32_t untouched_ = 0;  // rows from here on were never handed out
  HugeArray memory_;
  Epochs& epochs_;
  std::vector<uint32_t> free_;
  std::vector<Retired> retired_;  // oldest first, from first_retired_ on
  size_t first_retired_ = 0;
};

}  // namespace hotrow
