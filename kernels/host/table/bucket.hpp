// One bucket of the index: five keys, their row numbers, and a count of the keys that went past it.
//
// Layout, 64 bytes, one cache line:
//
//   keys    int64[5]     kEmpty if the slot is free
//   rows    uint32[5]    row number of the key in the same position, kNoRow if the slot is free
//   passed  uint32       keys that live in a later bucket although their probe starts in this one or an earlier one
//
// Probing. A key's home bucket is fastrange(hash(key)) (key_hash.hpp); a full bucket sends it to the next one. A probe ends at the
// first bucket that no key passed, so an erased slot is simply free again: there are no tombstones, keys never move,
// and no amount of inserting and erasing lengthens the probes (the idea is the overflow count of folly's F14).
//
// Concurrency. One writer at a time, and any number of readers without a lock. A slot's life, as the writer stores it:
//
//   insert     rows = row, then keys = key        (a visible key has a visible row)
//   overwrite  rows = other row                   (the key stays)
//   erase      keys = kEmpty, then rows = kNoRow
//
// A reader inside an epoch (epochs.hpp) that reads a row number holds that row: it will not be handed out again
// before the reader leaves. So if `rows` shows the same number before and after `keys` showed the key, the slot
// belonged to that key in between and the row is the key's (see row_of). A reader repeats the check only if a writer
// changed this slot since, and a writer can make at most as many such changes as there are spare rows.
//
// The loads and stores that this rests on are seq_cst: the epoch argument needs "I announced myself, then I read the
// slot" and "I changed the slot, then I looked for readers" to be ordered, which acquire and release do not give.
// Such loads cost nothing more than acquire on x86 and Arm.
#pragma once

#include <atomic>
#include <cstdint>

#include "table/key_hash.hpp"

namespace hotrow {

constexpr int kSlots = 5;
constexpr int64_t kEmpty = INT64_MIN;
constexpr uint32_t kNoRow = UINT32_MAX;

struct alignas(64) Bucket {
  std::atomic<int64_t> keys[kSlots];
  std::atomic<uint32_t> rows[kSlots];
  std::atomic<uint32_t> passed;

  void clear() {
    for (auto& key : keys) key.store(kEmpty, std::memory_order_relaxed);
    for (auto& row : rows) row.store(kNoRow, std::memory_order_relaxed);
    passed.store(0, std::memory_order_relaxed);
  }

  // The row of `key` if slot `slot` holds it, else kNoRow.
  uint32_t row_of(int64_t key, int slot) const {
    uint32_t row = rows[slot].load(std::memory_order_seq_cst);
    for (;;) {
      if (keys[slot].load(std::memory_order_seq_cst) != key) return kNoRow;
      const uint32_t again = rows[slot].load(std::memory_order_seq_cst);
      if (again == row) return row;
      row = again;
    }
  }

  // As above, but also kNoRow if a writer changed the slot since.
  uint32_t row_at_one_look(int64_t key, int slot) const {
    const uint32_t row = rows[slot].load(std::memory_order_seq_cst);
    if (__builtin_expect(keys[slot].load(std::memory_order_seq_cst) != key, 0)) return kNoRow;
    return __builtin_expect(rows[slot].load(std::memory_order_seq_cst) == row, 1) ? row : kNoRow;
  }
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "readers must never meet a hidden lock");

// The two smallest and the two largest int64 values mark slots here and on the GPU; they are never keys.
constexpr int64_t kSmallestKey = INT64_MIN + 2, kLargestKey = INT64_MAX - 2;

inline bool is_reserved(int64_t key) { return key < kSmallestKey || key > kLargestKey; }

// An index for readers: plain values, so that loops keep them in registers.
struct IndexView {
  const Bucket* buckets;
  uint64_t bucket_count;
  KeyHash hash;

  uint64_t home(int64_t key) const { return fastrange(hash(key), bucket_count); }
  uint64_t after(uint64_t bucket) const { return bucket + 1 == bucket_count ? 0 : bucket + 1; }
};

}  // namespace hotrow
