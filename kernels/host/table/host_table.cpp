#include "table/host_table.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "lookup/lookup_pieces.hpp"

namespace hotrow {

uint64_t HostTable::spare_rows_for(uint64_t capacity_rows) {
  constexpr uint64_t fewest = 1024;  // small tables are often rewritten as a whole
  return std::max(capacity_rows / 5, fewest);
}

uint64_t HostTable::memory_bytes_for(uint32_t dim, uint64_t capacity_rows, RowType row_type, OverflowPolicy policy) {
  const uint64_t rows = capacity_rows + spare_rows_for(capacity_rows);
  return HugeArray::rounded(BucketIndex::bytes_for(capacity_rows)) +
         HugeArray::rounded(RowArena::bytes_for(row_stride_bytes(row_type, dim), rows)) +
         RowStamps::memory_bytes_for(policy, rows);
}

HostTable::HostTable(std::unique_ptr<SharedArea> area, bool writes)
    : area_(std::move(area)),
      dim_(area_->shape().dim),
      row_type_(area_->shape().row_type),
      capacity_rows_(area_->shape().capacity_rows),
      target_rows_(0),
      epochs_(area_->epochs()),
      index_(capacity_rows_, area_->header().seed, area_->index(), area_->is_new()),
      arena_(row_stride_bytes(row_type_, dim_), static_cast<uint32_t>(capacity_rows_ + spare_rows_for(capacity_rows_)),
             epochs_, area_->rows()),
      stamps_(OverflowPolicy::kRefuse, capacity_rows_, 0),
      rows_(area_->header().rows) {
  if (area_->is_new())
    area_->publish();
  else if (writes)
    adopt();
}

// Rebuilds from the index the state that only writers use.
void HostTable::adopt() {
  std::vector<bool> is_used(capacity_rows_ + spare_rows_for(capacity_rows_));
  try {
    rows_.store(index_.adopt(is_used), std::memory_order_relaxed);
  } catch (const std::out_of_range&) {
    area_->fail("is damaged: a key refers to a row that does not exist");
  }
  arena_.adopt(is_used);
}

void HostTable::fetch(const int64_t* keys, size_t n, float* out, bool* found) {
  do_in_pieces(n, [&](Piece piece) {
    const Epochs::Reader stay(epochs_);
    const size_t at = piece.begin;
    lookup_loops().fetch(view(), keys + at, piece.size(), out + at * dim_, found + at);
  });
}

void HostTable::fetch_pooled(const int64_t* keys, const Bags& bags, float* out, bool* found) {
  do_in_pieces(static_cast<size_t>(bags.row_ptrs[bags.count]), [&](Piece piece) {
    const Epochs::Reader stay(epochs_);
    const Piece some = bags_of(bags, piece);
    if (some.size()) lookup_loops().fetch_pooled(view(), keys, bags, some.begin, some.end, out, found);
  });
}

void HostTable::prefetch_buckets(const int64_t* keys, size_t n) const {
  const IndexView index = index_.view();
  for (size_t i = 0; i < n; ++i) __builtin_prefetch(index.buckets + index.home(keys[i]), 0, 2);
}

// No stay is needed: a row that is handed out again is fetched for nothing.
void HostTable::prefetch_rows(const int64_t* keys, size_t n) const {
  const TableView table = view();
  const size_t bytes = row_bytes(row_type_, dim_);
  for (size_t i = 0; i < n; ++i) {
    int64_t number;
    lookup_loops().find(table.index, keys + i, 1, &number);
    if (number < 0) continue;
    const std::byte* row = table.rows.at(static_cast<uint32_t>(number));
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

void HostTable::holds(const int64_t* keys, size_t n, bool* held) {
  epochs_.check_attached();
  do_in_pieces(n, [&](Piece piece) {
    lookup_loops().holds(index_.view(), keys + piece.begin, piece.size(), held + piece.begin);
  });
}

void HostTable::write_one(int64_t key, const std::byte* row, size_t bytes) {
  arena_.prefetch(kWriterAhead);
  const uint32_t number = arena_.take();
  std::memcpy(arena_.row(number), row, bytes);
  if (const auto place = index_.find(key)) {
    const uint32_t old = index_.row_at(*place);
    stamps_.replaced(old, number);
    index_.overwrite(*place, number);
    arena_.retire(old);
  } else {
    stamps_.added(number);
    index_.insert(key, number);
    rows_.store(rows() + 1, std::memory_order_relaxed);
  }
}

bool HostTable::evict_one(int64_t key) {
  const auto place = index_.find(key);
  if (place) remove(key, *place);
  return place.has_value();
}

void HostTable::remove(int64_t key, BucketIndex::Place place) {
  const uint32_t old = index_.row_at(place);
  index_.erase(key, place);
  stamps_.removed(old);
  arena_.retire(old);
  rows_.store(rows() - 1, std::memory_order_relaxed);
}

template <class WriteOne>
void HostTable::write_in_epochs(const int64_t* keys, size_t n, WriteOne write_one) {
  for (size_t begin = 0; begin < n; begin += kWriterKeys) {
    const size_t end = std::min(n, begin + kWriterKeys);
    arena_.reserve_retired(end - begin);
    for (size_t i = begin; i < end; ++i) {
      if (i + kWriterAhead < n) index_.prefetch(keys[i + kWriterAhead]);
      write_one(i);
    }
    arena_.end_epoch();
    arena_.reclaim();
  }
}

// Rows are encoded before the lock is taken: other writers continue, and a row that does not fit leaves no trace.
int64_t HostTable::insert(const int64_t* keys, const float* rows, size_t n) {
  epochs_.check_attached();
  if (row_type_ == RowType::kFp32) return write_encoded(keys, reinterpret_cast<const std::byte*>(rows), n);
  const std::unique_ptr<std::byte[]> encoded(new std::byte[n * row_bytes(row_type_, dim_)]);
  if (const auto unfit = encode_rows(row_type_, rows, dim_, n, encoded.get())) throw *unfit;
  return write_encoded(keys, encoded.get(), n);
}

int64_t HostTable::write_encoded(const int64_t* keys, const std::byte* rows, size_t n) {
  const size_t bytes = row_bytes(row_type_, dim_);
  const std::lock_guard<std::mutex> turn(writers_);
  const int64_t evicted = make_room(keys, n);
  write_in_epochs(keys, n, [&](size_t i) { write_one(keys[i], rows + i * bytes, bytes); });
  stamps_.end_insert();
  return evicted;
}

int64_t HostTable::evict(const int64_t* keys, size_t n) {
  epochs_.check_attached();
  const std::lock_guard<std::mutex> turn(writers_);
  int64_t evicted = 0;
  write_in_epochs(keys, n, [&](size_t i) { evicted += evict_one(keys[i]); });
  return evicted;
}

size_t HostTable::read_items(uint64_t& cursor, size_t max_rows, int64_t* keys, float* rows) {
  const TableView table = view();
  const LookupLoops& loops = lookup_loops();
  const uint64_t slots = table.index.bucket_count * kSlots;
  size_t count = 0;
  while (count < max_rows && cursor < slots) {
    const Epochs::Reader reader(epochs_);
    const uint64_t stop = std::min(slots, cursor + kPieceKeys);
    for (; cursor < stop && count < max_rows; ++cursor) {
      const Bucket& bucket = table.index.buckets[cursor / kSlots];
      const int slot = static_cast<int>(cursor % kSlots);
      const int64_t key = bucket.keys[slot].load(std::memory_order_acquire);  // with it, the row it came with
      const uint32_t number = key == kEmpty ? kNoRow : bucket.row_of(key, slot);
      if (number == kNoRow) continue;
      keys[count] = key;
      loops.decode(row_type_, table.rows.at(number), 0, dim_, 1, rows + count * dim_);
      ++count;
    }
  }
  return count;
}

}  // namespace hotrow
