// The positions of distinct rows in the order in which they are first seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

// An open hash table that is at most half full.
class RowPositions {
 public:
  // `most`: distinct rows, fewer than 2^31.
  explicit RowPositions(size_t most) {
    size_t size = 16;
    while (size < 2 * most) size *= 2;
    entries_.resize(size);
  }
  void prefetch(int64_t row) const { __builtin_prefetch(&entries_[home(row)], 1); }
  // The row's position, which is `next` if nobody has asked for the row before.
  size_t find_or_insert(int64_t row, size_t next) {
    const auto row_after = static_cast<uint32_t>(row + 1);
    size_t at = home(row);
    while (entries_[at].row_after && entries_[at].row_after != row_after) at = (at + 1) & (entries_.size() - 1);
    if (!entries_[at].row_after) entries_[at] = {row_after, static_cast<int32_t>(next)};
    return static_cast<size_t>(entries_[at].position);
  }

 private:
  struct Entry {
    uint32_t row_after = 0;  // row + 1; 0: free
    int32_t position = 0;
  };
  size_t home(int64_t row) const {
    return static_cast<size_t>((static_cast<uint64_t>(row) + 1) * 0x9E3779B97F4A7C15u >> 32) & (entries_.size() - 1);
  }

  std::vector<Entry> entries_;
};

}  // namespace hotrow
