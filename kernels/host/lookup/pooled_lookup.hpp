// The bags of several tables, found and pooled in one call.
//
// A table has its pieces and its readers' stays to itself, as in a lookup of that table alone, so its vectors have the
// same bits. A large request is shared between the cores table by table. A table of kSharedKeys keys shares its own
// pieces instead.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lookup/core_pool.hpp"
#include "lookup/lookup.hpp"
#include "lookup/lookup_pieces.hpp"
#include "memory/mapped_file.hpp"
#include "table/host_table.hpp"

namespace hotrow {

using Clock = std::chrono::steady_clock;

// One table's part of a request.
struct TableLookup {
  void* table = nullptr;  // nullptr: it is not looked up
  void (*fetch_pooled)(void* table, const int64_t* keys, const Bags& bags, float* out, bool* found) = nullptr;
  const int64_t* keys = nullptr;
  size_t key_count = 0;
  Bags bags = {};
  float* out = nullptr;   // [bags.count][dim]
  bool* found = nullptr;  // [key_count]

  const HostTable* in_memory = nullptr;  // the same table, unless it is a file

  bool is_read = false;  // whether `out` and `found` are written; false if a file cannot be read
  bool misses = false;   // a key is absent
  int64_t nanoseconds = 0;

  template <class Table>
  void set_table(Table& one) {
    table = &one;
    if constexpr (std::is_same_v<Table, HostTable>) in_memory = &one;
    fetch_pooled = [](void* at, const int64_t* keys, const Bags& bags, float* out, bool* found) {
      static_cast<Table*>(at)->fetch_pooled(keys, bags, out, found);
    };
  }

  // Returns the time at the end; `begin` is the time now.
  Clock::time_point run(Clock::time_point begin) {
    if (!table) return begin;
    try {
      fetch_pooled(table, keys, bags, out, found);
      is_read = true;
    } catch (const FileFault&) {  // the next call for this table alone raises it
    }
    misses = is_read && key_count && std::memchr(found, 0, key_count);
    const Clock::time_point end = Clock::now();
    nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    return end;
  }
};

// A table waits for its first keys' buckets and then for their rows. With few keys that is most of its time, so the
// tables with few keys wait together: 26 tables of one key take 5 us instead of 13.
inline void prefetch_few(const std::vector<TableLookup>& lookups) {
  constexpr size_t kFewKeys = 8;
  for (const TableLookup& one : lookups)
    if (one.in_memory && one.key_count <= kFewKeys) one.in_memory->prefetch_buckets(one.keys, one.key_count);
  for (const TableLookup& one : lookups)
    if (one.in_memory && one.key_count <= kFewKeys) one.in_memory->prefetch_rows(one.keys, one.key_count);
}

// Run all lookups, in any order. Throws what the tables throw, except FileFault.
inline void look_up_tables(std::vector<TableLookup>& lookups) {
  size_t keys = 0;
  for (const TableLookup& one : lookups) keys += one.key_count;
  if (keys < kSharedKeys) {
    prefetch_few(lookups);
    Clock::time_point now = Clock::now();
    for (TableLookup& one : lookups) now = one.run(now);
    return;
  }
  std::vector<TableLookup*> small;
  for (TableLookup& one : lookups) {
    if (one.key_count < kSharedKeys)
      small.push_back(&one);
    else
      one.run(Clock::now());
  }
  CorePool::shared().run(small.size(), [&](size_t place) { small[place]->run(Clock::now()); });
}

}  // namespace hotrow
