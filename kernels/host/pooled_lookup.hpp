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
#include <vector>

#include "core_pool.hpp"
#include "lookup.hpp"
#include "lookup_pieces.hpp"
#include "mapped_file.hpp"

namespace hotrow {

// One table's part of a request.
struct TableLookup {
  void* table = nullptr;  // nullptr: it is not looked up
  void (*fetch_pooled)(void* table, const int64_t* keys, const Bags& bags, float* out, bool* found) = nullptr;
  const int64_t* keys = nullptr;
  size_t key_count = 0;
  Bags bags = {};
  float* out = nullptr;   // [bags.count][dim]
  bool* found = nullptr;  // [key_count]

  bool is_read = false;  // whether `out` and `found` are written; not so where a file cannot be read
  bool misses = false;   // a key is absent
  int64_t nanoseconds = 0;

  template <class Table>
  void set_table(Table& one) {
    table = &one;
    fetch_pooled = [](void* at, const int64_t* keys, const Bags& bags, float* out, bool* found) {
      static_cast<Table*>(at)->fetch_pooled(keys, bags, out, found);
    };
  }

  void run() {
    using Clock = std::chrono::steady_clock;
    if (!table) return;
    const auto begin = Clock::now();
    try {
      fetch_pooled(table, keys, bags, out, found);
    } catch (const FileFault&) {  // whoever asks the table again gets the error
      return;
    }
    misses = key_count && std::memchr(found, 0, key_count);
    nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    is_read = true;
  }
};

// Run all lookups, in any order. Throws what the tables throw, except FileFault.
inline void look_up_tables(std::vector<TableLookup>& lookups) {
  size_t keys = 0;
  for (const TableLookup& one : lookups) keys += one.key_count;
  if (keys < kSharedKeys) {
    for (TableLookup& one : lookups) one.run();
    return;
  }
  std::vector<TableLookup*> small;
  for (TableLookup& one : lookups) {
    if (one.key_count < kSharedKeys)
      small.push_back(&one);
    else
      one.run();
  }
  CorePool::shared().run(small.size(), [&](size_t place) { small[place]->run(); });
}

}  // namespace hotrow
