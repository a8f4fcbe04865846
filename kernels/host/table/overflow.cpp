// How a full table makes room for new keys: it chooses rows by its policy and removes them in epochs.
#include <algorithm>
#include <array>
#include <utility>

#include "table/host_table.hpp"

namespace hotrow {

namespace {

void keep_each_once(std::vector<uint32_t>& rows) {
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
}

bool is_among(uint32_t row, const std::vector<uint32_t>& rows) {
  return std::binary_search(rows.begin(), rows.end(), row);
}

}  // namespace

// Evict as many rows as the keys need, before any key is written. No row of these keys is evicted.
int64_t HostTable::make_room(const int64_t* keys, size_t n) {
  const auto capacity = static_cast<int64_t>(capacity_rows_);
  if (static_cast<int64_t>(n) <= capacity - rows()) return 0;
  std::vector<int64_t> added;
  RowNumbers kept;
  for (size_t i = 0; i < n; ++i) {
    if (i + kWriterAhead < n) index_.prefetch(keys[i + kWriterAhead]);
    if (const auto place = index_.find(keys[i]))
      kept.push_back(index_.row_at(*place));
    else
      added.push_back(keys[i]);
  }
  std::sort(added.begin(), added.end());
  const int64_t new_rows = std::unique(added.begin(), added.end()) - added.begin();
  if (new_rows <= capacity - rows()) return 0;
  keep_each_once(kept);
  const auto kept_rows = static_cast<int64_t>(kept.size());
  if (policy() == OverflowPolicy::kRefuse || new_rows + kept_rows > capacity) throw TableFull{rows(), new_rows};
  const int64_t left = std::max(std::min(static_cast<int64_t>(target_rows_), capacity - new_rows), kept_rows);
  const int64_t count = rows() - left;
  evict_some(count, kept);
  evicted_rows_.store(evicted_rows() + count, std::memory_order_relaxed);
  return count;
}

// The table has at least `count` rows that are not among `kept`.
void HostTable::evict_some(int64_t count, const RowNumbers& kept) {
  arena_.reserve_retired(kWriterKeys);
  epoch_removals_ = 0;
  stamps_.empty() ? evict_random(count, kept) : evict_by_stamp(count, kept);
  arena_.end_epoch();
  arena_.reclaim();
}

// Remove the key that lives at `place`.
void HostTable::remove_at(BucketIndex::Place place) {
  remove(index_.key_at(place), place);
  if (++epoch_removals_ == kWriterKeys) {
    arena_.end_epoch();
    arena_.reclaim();
    arena_.reserve_retired(kWriterKeys);
    epoch_removals_ = 0;
  }
}

// All slots are equally likely. Several are drawn at a time, so that their buckets are fetched together.
void HostTable::evict_random(int64_t count, const RowNumbers& kept) {
  std::uniform_int_distribution<uint64_t> slots(0, bucket_count() * kSlots - 1);
  std::array<BucketIndex::Place, 32> places;
  while (count > 0) {
    for (auto& place : places) {
      const uint64_t slot = slots(random_);
      place = {slot / kSlots, static_cast<int>(slot % kSlots)};
      index_.prefetch_bucket(place.bucket);
    }
    for (const auto& place : places) {
      if (count == 0 || index_.key_at(place) == kEmpty || is_among(index_.row_at(place), kept)) continue;
      remove_at(place);
      --count;
    }
  }
}

// Readers change stamps during a sweep. If a sweep finds fewer small stamps than were counted, the stamps are counted again.
void HostTable::evict_by_stamp(int64_t count, const RowNumbers& kept) {
  constexpr int kExactSweeps = 3;
  int64_t left = count;
  for (int sweeps = 0; left > 0; ++sweeps)
    left -= sweep(sweeps < kExactSweeps ? cut_for(left, kept) : Cut{UINT8_MAX, left, left}, left, kept);
  stamps_.age(static_cast<uint64_t>(count));
}

// The cut that evicts the `count` rows with the smallest stamps.
HostTable::Cut HostTable::cut_for(int64_t count, const RowNumbers& kept) const {
  auto rows = stamps_.histogram();
  for (const uint32_t row : kept) --rows[stamps_.at(row)];
  uint8_t stamp = 1;
  for (; stamp < UINT8_MAX && rows[stamp] < count; ++stamp) count -= std::max<int64_t>(rows[stamp], 0);
  return {stamp, count, rows[stamp]};
}

// One round over all buckets, or up to `count` evictions; returns how many.
int64_t HostTable::sweep(Cut cut, int64_t count, const RowNumbers& kept) {
  constexpr uint64_t kAhead = 16;
  const uint64_t buckets = bucket_count();
  int64_t evicted = 0;
  for (uint64_t bucket = 0; bucket < buckets && evicted < count; ++bucket) {
    for (int slot = 0; slot < kSlots && bucket + kAhead < buckets; ++slot)
      stamps_.prefetch(index_.row_at({bucket + kAhead, slot}));
    for (int slot = 0; slot < kSlots && evicted < count; ++slot) {
      if (!is_cut(cut, {bucket, slot}, kept)) continue;
      remove_at({bucket, slot});
      ++evicted;
    }
  }
  return evicted;
}

// Rows with the last stamp are equally likely to go (Knuth's algorithm S). If all came from one part of the table, the
// other part would stay full and its probes long.
bool HostTable::is_cut(Cut& cut, BucketIndex::Place place, const RowNumbers& kept) {
  const uint32_t row = index_.row_at(place);
  const uint8_t stamp = row == kNoRow ? kNoStamp : stamps_.at(row);
  if (stamp == kNoStamp || stamp > cut.last || is_among(row, kept)) return false;
  if (stamp < cut.last) return true;
  const auto draw = static_cast<int64_t>(fastrange(random_(), static_cast<uint64_t>(std::max<int64_t>(cut.rows, 1))));
  --cut.rows;
  if (draw >= cut.wanted) return false;
  --cut.wanted;
  return true;
}

}  // namespace hotrow
