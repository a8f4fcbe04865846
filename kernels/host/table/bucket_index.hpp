// The index: an array of buckets with a fixed number of slots, key -> row number. See bucket.hpp for the layout, the
// probing and the guarantees for readers. Only the writer calls these methods; callers allow one writer at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "memory/huge_array.hpp"
#include "table/bucket.hpp"

namespace hotrow {

class BucketIndex {
 public:
  // Where a key lives.
  struct Place {
    uint64_t bucket;
    int slot;
  };

  // At capacity half of the slots are used. Measured: probes of a table that is 0.65 full take 8 % longer.
  static constexpr double kLoadAtCapacity = 0.5;

  // With `lent`, the index is in memory of bytes_for(capacity_keys) that the caller owns. Memory that is not `is_new`
  // keeps its keys, and the seed is the one that they were written with.
  explicit BucketIndex(uint64_t capacity_keys, uint64_t seed = random_seed(), std::byte* lent = nullptr,
                       bool is_new = true)
      : memory_(bytes_for(capacity_keys), lent),
        bucket_count_(buckets_for(capacity_keys)),
        seed_(seed),
        hash_(seed) {
    if (!is_new) return;
    for (uint64_t b = 0; b < bucket_count_; ++b) (new (buckets() + b) Bucket)->clear();
  }

  static uint64_t buckets_for(uint64_t capacity_keys) {
    return static_cast<uint64_t>(static_cast<double>(capacity_keys) / (kSlots * kLoadAtCapacity)) + 1;
  }
  static size_t bytes_for(uint64_t capacity_keys) { return buckets_for(capacity_keys) * sizeof(Bucket); }

  IndexView view() const { return {buckets(), bucket_count_, hash_}; }
  uint64_t seed() const { return seed_; }
  uint64_t bucket_count() const { return bucket_count_; }
  size_t memory_bytes() const { return memory_.bytes(); }

  // Buckets that the longest probe of a present key visits; 0 if there is no key. Any thread.
  uint64_t longest_probe() const {
    for (size_t distance = kDistances; distance-- > 0;)
      if (keys_at_distance_[distance].load(std::memory_order_relaxed)) return distance + 1;
    return 0;
  }

  void prefetch(int64_t key) const { __builtin_prefetch(&buckets()[view().home(key)], 1, 2); }

  std::optional<Place> find(int64_t key) const {
    const uint64_t home = view().home(key);
    uint64_t b = home;
    do {
      const Bucket& bucket = buckets()[b];
      for (int slot = 0; slot < kSlots; ++slot)
        if (bucket.keys[slot].load(std::memory_order_relaxed) == key) return Place{b, slot};
      if (bucket.passed.load(std::memory_order_relaxed) == 0) return std::nullopt;
      b = view().after(b);
    } while (b != home);
    return std::nullopt;
  }

  void prefetch_bucket(uint64_t bucket) const { __builtin_prefetch(&buckets()[bucket], 1, 2); }

  // The key that lives there; kEmpty if none does.
  int64_t key_at(Place place) const {
    return buckets()[place.bucket].keys[place.slot].load(std::memory_order_relaxed);
  }

  uint32_t row_at(Place place) const {
    return buckets()[place.bucket].rows[place.slot].load(std::memory_order_relaxed);
  }

  // Point a present key at another row. seq_cst: a writer that later looks for readers must find every reader that
  // could still have read the old row number.
  void overwrite(Place place, uint32_t row) {
    buckets()[place.bucket].rows[place.slot].store(row, std::memory_order_seq_cst);
  }

  // Add an absent key. The caller makes sure that a slot is free.
  void insert(int64_t key, uint32_t row) {
    uint64_t b = view().home(key);
    size_t distance = 0;
    for (int slot = free_slot(b); ; slot = free_slot(b)) {
      if (slot >= 0) {
        publish(buckets()[b], slot, key, row);
        count(distance, +1);
        return;
      }
      // Before the key is visible, so that a reader that sees it can find it again (ordered by the key's release
      // store).
      add_passed(b, +1);
      b = view().after(b);
      ++distance;
    }
  }

  // Make room for more keys, in place: there is never a second index. No thread may read at the same time. Throws
  // std::bad_alloc before anything changes. Not for lent memory.
  void grow(uint64_t capacity_keys) {
    const uint64_t before = bucket_count_;
    std::vector<std::pair<int64_t, uint32_t>> late;
    late.reserve(kMostLateKeys);
    memory_.grow(bytes_for(capacity_keys));
    bucket_count_ = buckets_for(capacity_keys);
    for (uint64_t b = before; b < bucket_count_; ++b) (new (buckets() + b) Bucket)->clear();
    for (auto& count : keys_at_distance_) count.store(0, std::memory_order_relaxed);
    // The new home of a key is never before its old home. So we go from the last bucket to the first, and a key finds a
    // place in a bucket that is done. A few keys at both ends of the index do not, and are inserted at the end.
    for (uint64_t b = before; b-- > 0;) {
      std::array<std::pair<int64_t, uint32_t>, kSlots> entries;
      for (int slot = 0; slot < kSlots; ++slot)
        entries[static_cast<size_t>(slot)] = {key_at({b, slot}), row_at({b, slot})};
      buckets()[b].clear();
      for (const auto& [key, row] : entries) {
        if (key == kEmpty) continue;
        uint64_t at = view().home(key);
        const bool is_done = at >= b;
        while (is_done && at < bucket_count_ && free_slot(at) < 0) ++at;
        if (is_done && at < bucket_count_)
          insert(key, row);
        else
          late.emplace_back(key, row);
      }
    }
    for (const auto& [key, row] : late) insert(key, row);
  }

  // Remove a present key. seq_cst for the same reason as in overwrite.
  void erase(int64_t key, Place place) {
    Bucket& bucket = buckets()[place.bucket];
    bucket.keys[place.slot].store(kEmpty, std::memory_order_seq_cst);
    bucket.rows[place.slot].store(kNoRow, std::memory_order_seq_cst);
    size_t distance = 0;
    for (uint64_t b = view().home(key); b != place.bucket; b = view().after(b), ++distance) add_passed(b, -1);
    count(distance, -1);
  }

  // Clean up the unfinished write of a killed writer and count again while readers continue. `passed` was never less
  // than the present keys need, so no probe misses a key meanwhile. Returns which rows are in the index. Throws
  // std::out_of_range if a key's row does not exist.
  int64_t adopt(std::vector<bool>& is_used) {
    std::vector<uint32_t> passed(bucket_count_);
    int64_t keys = 0;
    for (auto& count : keys_at_distance_) count.store(0, std::memory_order_relaxed);
    for (uint64_t b = 0; b < bucket_count_; ++b)
      for (int slot = 0; slot < kSlots; ++slot) {
        const int64_t key = key_at({b, slot});
        if (key == kEmpty) {
          buckets()[b].rows[slot].store(kNoRow, std::memory_order_seq_cst);
          continue;
        }
        is_used.at(row_at({b, slot})) = true;
        ++keys;
        size_t distance = 0;
        for (uint64_t at = view().home(key); at != b; at = view().after(at), ++distance) ++passed[at];
        count(distance, +1);
      }
    for (uint64_t b = 0; b < bucket_count_; ++b) buckets()[b].passed.store(passed[b], std::memory_order_relaxed);
    return keys;
  }

 private:
  static constexpr size_t kMostLateKeys = 4096;  // more than ever occur in a table that is not full
  static constexpr size_t kDistances = 256;  // keys further away are counted at the last distance

  Bucket* buckets() const { return reinterpret_cast<Bucket*>(memory_.data()); }

  int free_slot(uint64_t b) const {
    for (int slot = 0; slot < kSlots; ++slot)
      if (buckets()[b].keys[slot].load(std::memory_order_relaxed) == kEmpty) return slot;
    return -1;
  }

  static void publish(Bucket& bucket, int slot, int64_t key, uint32_t row) {
    // release: a reader that sees the row number sees the row's contents and that the slot's last key is gone.
    bucket.rows[slot].store(row, std::memory_order_release);
    // release: a reader that sees the key sees the row number and the `passed` counts on its way.
    bucket.keys[slot].store(key, std::memory_order_release);
  }

  // A separate read and write are enough: there is one writer, and the atomic is for readers.
  void add_passed(uint64_t b, int change) {
    auto& passed = buckets()[b].passed;
    passed.store(passed.load(std::memory_order_relaxed) + static_cast<uint32_t>(change), std::memory_order_relaxed);
  }

  void count(size_t distance, int change) {
    auto& keys = keys_at_distance_[distance < kDistances ? distance : kDistances - 1];
    keys.store(keys.load(std::memory_order_relaxed) + static_cast<uint64_t>(change), std::memory_order_relaxed);
  }

  HugeArray memory_;
  uint64_t bucket_count_;
  const uint64_t seed_;
  const KeyHash hash_;
  // The number of keys by their distance from home in buckets. Relaxed: longest_probe only reports it.
  std::array<std::atomic<uint64_t>, kDistances> keys_at_distance_{};
};

}  // namespace hotrow
