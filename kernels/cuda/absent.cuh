// The absent keys of a table: keys that no tier holds, as far as is known. They are in lines of their own, which have
// no rows. Their hash is that of the table's first lines. A launch answers an absent key with the default value and
// does not list it as missing.
//
// insert.cu puts a key there. Every later write that names the key takes it out again, so a default does not outlive
// the erasure of its key. One thread searches a line: only keys that the table does not hold are searched.
#pragma once

#include "table.cuh"

__device__ __forceinline__ Line* absent_line(const Table& table, i64 key) {
  const u32 hash = static_cast<u32>(hash_of(table, key, 0) >> 32);
  return table.absent_lines + __umulhi(hash, table.absent_line_count);
}

// The slot of an absent key, or kLineKeys; `meta` becomes the line's meta word.
__device__ __forceinline__ u32 absent_slot(const Line* line, i64 key, Word& meta) {
  u32 found = kLineKeys;
#pragma unroll 2
  for (u32 lane = 0; lane < kTileLanes; ++lane) {
    const Unit unit = __ldcg(reinterpret_cast<const Unit*>(line) + lane);
    meta = word_at(unit, kUnitWords - 1);  // of the last lane
#pragma unroll
    for (u32 i = 0; i < kUnitWords; ++i) {
      const u32 slot = i * kTileLanes + lane;
      if (word_at(unit, i) == static_cast<Word>(key) && slot < kLineKeys) found = slot;
    }
  }
  return found;
}

// By one thread: whether the key is absent. Counts the use of its slot.
__device__ __forceinline__ bool is_absent(const Table& table, i64 key) {
  if (!is_holdable(key)) return false;
  Line* line = absent_line(table, key);
  Word meta = 0;
  const u32 slot = absent_slot(line, key, meta);
  if (slot == kLineKeys) return false;
  count_use(line, meta, slot);
  return true;
}

// By one thread: the key is no longer absent.
__device__ __forceinline__ void forget_absent(const Table& table, i64 key) {
  if (!is_holdable(key)) return;
  Line* line = absent_line(table, key);
  Word meta = 0;
  const u32 slot = absent_slot(line, key, meta);
  if (slot < kLineKeys && free_slot(line, slot, static_cast<Word>(key)))
    atomicAdd(counter_at(table, kAbsentKeys), ~0ull);  // minus one
}
