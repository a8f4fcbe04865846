// One table's embedding rows in RAM: int64 key -> float32[dim], kept in one of the forms of row_type.hpp.
//
// A table has an index (bucket_index.hpp), an arena of rows (row_arena.hpp) and epochs (epochs.hpp). A write never
// changes a row in place: it fills a free row, points the index at it and retires the old row. So a reader sees the old
// row or the new row, each whole. The arena has a fifth more rows than the capacity for that.
//
// Readers (fetch, fetch_pooled, read_items) take no lock and never wait. Writers (insert, evict) take a lock. A writer
// waits for readers only if all spare rows were replaced during one reader's stay. Stays are short: a long read leaves
// and enters again every kPieceKeys keys (a longer bag is read in one stay). The cores share lookups of kSharedKeys
// keys or more (lookup_pieces.hpp).
//
// A table with a policy (row_stamps.hpp) makes room for new keys itself (overflow.cpp). The inserting writer chooses
// and removes the rows, in epochs like any other write: readers only see that keys are gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "lookup/lookup.hpp"
#include "memory/shared_area.hpp"
#include "rows/row_encode.hpp"
#include "rows/row_type.hpp"
#include "table/bucket_index.hpp"
#include "table/epochs.hpp"
#include "table/row_arena.hpp"
#include "table/row_stamps.hpp"

namespace hotrow {

// The call would add more keys than fit, or than the table can make room for.
struct TableFull {
  int64_t rows;
  int64_t new_rows;
};

class HostTable {
 public:
  static constexpr bool kReadsMayWait = false;
  static constexpr uint32_t kMaxDim = 1u << 16;
  static constexpr uint64_t kMaxCapacityRows = 3'500'000'000;  // with the spare rows below 2^32

  // 1 <= dim <= kMaxDim, 1 <= capacity_rows <= kMaxCapacityRows. With a policy a full table evicts rows until at most
  // target_rows are left, fewer if an insert needs more room. Throws std::bad_alloc.
  HostTable(uint32_t dim, uint64_t capacity_rows, RowType row_type, OverflowPolicy policy = OverflowPolicy::kRefuse,
            uint64_t target_rows = 0)
      : dim_(dim),
        row_type_(row_type),
        capacity_rows_(capacity_rows),
        target_rows_(target_rows),
        index_(capacity_rows),
        arena_(row_stride_bytes(row_type, dim),
               static_cast<uint32_t>(capacity_rows + spare_rows_for(capacity_rows)), epochs_),
        stamps_(policy, capacity_rows, capacity_rows + spare_rows_for(capacity_rows)) {}

  // In memory that processes share. `writes` is true in the one process that may write.
  HostTable(std::unique_ptr<SharedArea> area, bool writes);

  static uint64_t spare_rows_for(uint64_t capacity_rows);
  static uint64_t memory_bytes_for(uint32_t dim, uint64_t capacity_rows, RowType row_type, OverflowPolicy policy);

  uint32_t dim() const { return dim_; }
  RowType row_type() const { return row_type_; }
  uint64_t capacity_rows() const { return capacity_rows_; }
  int64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  uint64_t bucket_count() const { return index_.bucket_count(); }
  uint64_t longest_probe() const { return index_.longest_probe(); }
  uint64_t memory_bytes() const { return memory_bytes_for(dim_, capacity_rows_, row_type_, policy()); }
  OverflowPolicy policy() const { return stamps_.policy(); }
  SharedArea* area() const { return area_.get(); }  // nullptr: the memory is this process's own
  int64_t evicted_rows() const { return evicted_rows_.load(std::memory_order_relaxed); }

  // keys[n] -> out[n][dim], zeros where absent; found[n]. A reserved key is absent.
  void fetch(const int64_t* keys, size_t n, float* out, bool* found);

  // Bags of keys -> out[bags.count][dim]; found[n] per key. An absent key counts as a row of zeros.
  void fetch_pooled(const int64_t* keys, const Bags& bags, float* out, bool* found);

  // Fetch into the caches what a lookup of these few keys reads: their buckets, and after these their rows.
  void prefetch_buckets(const int64_t* keys, size_t n) const;
  void prefetch_rows(const int64_t* keys, size_t n) const;

  // held[i]: whether keys[i] is in the table. Reads no row.
  void holds(const int64_t* keys, size_t n, bool* held);

  // Insert or overwrite; of equal keys the last wins. No key is reserved (here and in evict). Returns how many other
  // keys were evicted to make room. Throws TableFull, or UnfitValue if the table's row type cannot hold a value,
  // before anything is written; and SharedFault, after some rows were written, if a reader of another process is stuck.
  int64_t insert(const int64_t* keys, const float* rows, size_t n);

  // Returns how many of the keys were present.
  int64_t evict(const int64_t* keys, size_t n);

  // Up to `max_rows` keys and rows from slot number `cursor` on. Moves the cursor; returns how many.
  // Keys never move, so a key that is present throughout a walk is returned exactly once, whatever writers do. A key
  // that is evicted and inserted again may be returned twice.
  size_t read_items(uint64_t& cursor, size_t max_rows, int64_t* keys, float* rows);

 private:
  static constexpr size_t kWriterKeys = 4096;  // keys written per epoch
  static constexpr size_t kWriterAhead = 32;

  // Rows with stamps below `last` go, and `wanted` of the `rows` whose stamp is `last`.
  struct Cut {
    uint8_t last;
    int64_t wanted;
    int64_t rows;
  };
  using RowNumbers = std::vector<uint32_t>;  // ascending

  TableView view() const { return {index_.view(), arena_.view(), dim_, row_type_, stamps_.view()}; }
  int64_t write_encoded(const int64_t* keys, const std::byte* rows, size_t n);
  void write_one(int64_t key, const std::byte* row, size_t bytes);
  bool evict_one(int64_t key);
  void remove(int64_t key, BucketIndex::Place place);
  template <class WriteOne>
  void write_in_epochs(const int64_t* keys, size_t n, WriteOne write_one);

  // overflow.cpp
  int64_t make_room(const int64_t* keys, size_t n);
  void evict_some(int64_t count, const RowNumbers& kept);
  void evict_random(int64_t count, const RowNumbers& kept);
  void evict_by_stamp(int64_t count, const RowNumbers& kept);
  Cut cut_for(int64_t count, const RowNumbers& kept) const;
  int64_t sweep(Cut cut, int64_t count, const RowNumbers& kept);
  bool is_cut(Cut& cut, BucketIndex::Place place, const RowNumbers& kept);
  void remove_at(BucketIndex::Place place);

  void adopt();

  const std::unique_ptr<SharedArea> area_;  // before what lies in it
  const uint32_t dim_;
  const RowType row_type_;
  const uint64_t capacity_rows_;
  const uint64_t target_rows_;
  std::mutex writers_;  // guards the writing methods of index_, arena_ and stamps_, and what overflow.cpp keeps
  Epochs epochs_;       // before arena_, which refers to it
  BucketIndex index_;
  RowArena arena_;
  RowStamps stamps_;
  // Written under writers_. Relaxed: counts publish nothing.
  std::atomic<int64_t> own_rows_{0};
  std::atomic<int64_t>& rows_{own_rows_};
  std::atomic<int64_t> evicted_rows_{0};  // to make room
  std::mt19937_64 random_;
  size_t epoch_removals_ = 0;
};

}  // namespace hotrow
