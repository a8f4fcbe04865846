// Splits a request's keys, which come sample after sample, by embedding table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

// What a split reads and writes. T tables; table t has slots[t] slots in each of B samples.
struct Split {
  const int64_t* keys;      // [N], sample-major: sample 0's keys of table 0, of table 1, ..., then sample 1's
  size_t key_count;         // N
  const int64_t* row_ptrs;  // one CSR over all slots of a sample, or one CSR per table, table after table
  std::vector<int64_t> slots;
  size_t samples;           // B
  int64_t* out_keys;        // [N], table-major
  int32_t* out_row_ptrs;    // B * slots[t] + 1 per table, table after table, each from 0
  int64_t* most_keys;       // [T], the largest number of keys that one sample has of the table
};

// Whether n + 1 offsets start at 0, never fall, and end at or below `most`.
inline bool is_csr(const int64_t* offsets, size_t n, size_t most) {
  if (offsets[0] != 0) return false;
  bool rises = true;
  for (size_t i = 0; i < n; ++i) rises &= offsets[i] <= offsets[i + 1];
  return rises && static_cast<uint64_t>(offsets[n]) <= most;
}

// From one CSR over the slots of all tables to one per table. False where it is no CSR of N keys.
inline bool divide_offsets(const Split& split) {
  int64_t total = 0;
  for (const int64_t slots : split.slots) total += slots;
  const size_t bags = split.samples * static_cast<size_t>(total);
  if (!is_csr(split.row_ptrs, bags, split.key_count)) return false;
  if (static_cast<size_t>(split.row_ptrs[bags]) != split.key_count) return false;
  int32_t* out = split.out_row_ptrs;
  int64_t first = 0;  // slot of a sample where the table's begin
  for (const int64_t slots : split.slots) {
    const int64_t* bag = split.row_ptrs + first;
    *out++ = 0;
    for (size_t sample = 0; sample < split.samples; ++sample, bag += total) {
      const int32_t base = out[-1];
      for (int64_t slot = 0; slot < slots; ++slot) *out++ = base + static_cast<int32_t>(bag[slot + 1] - bag[0]);
    }
    first += slots;
  }
  return true;
}

// Copy the CSRs of all tables. False where one is none, or they do not end at N together.
inline bool copy_offsets(const Split& split) {
  const int64_t* in = split.row_ptrs;
  int32_t* out = split.out_row_ptrs;
  size_t keys = 0;
  for (const int64_t slots : split.slots) {
    const size_t bags = split.samples * static_cast<size_t>(slots);
    if (!is_csr(in, bags, split.key_count - keys)) return false;
    out = std::transform(in, in + bags + 1, out, [](int64_t offset) { return static_cast<int32_t>(offset); });
    keys += static_cast<size_t>(in[bags]);
    in += bags + 1;
  }
  return keys == split.key_count;
}

// Copy the keys by out_row_ptrs, and note the most that a sample has of each table.
inline void copy_keys(const Split& split) {
  struct Table {
    const int32_t* row_ptrs;
    int64_t slots;
    int64_t* keys;
    int64_t most;
  };
  std::vector<Table> tables;
  const int32_t* row_ptrs = split.out_row_ptrs;
  int64_t* out = split.out_keys;
  for (const int64_t slots : split.slots) {
    tables.push_back({row_ptrs, slots, out, 0});
    row_ptrs += split.samples * static_cast<size_t>(slots);
    out += *row_ptrs++;
  }
  const int64_t* in = split.keys;
  for (size_t sample = 0; sample < split.samples; ++sample) {
    for (Table& table : tables) {
      const int32_t begin = *table.row_ptrs;
      table.row_ptrs += table.slots;
      const int64_t count = *table.row_ptrs - begin;
      table.keys = std::copy_n(in, count, table.keys);
      table.most = std::max(table.most, count);
      in += count;
    }
  }
  for (size_t t = 0; t < tables.size(); ++t) split.most_keys[t] = tables[t].most;
}

// Returns whether row_ptrs are what they must be; where not, the outputs hold nothing of use.
// The caller has checked the lengths, and that N fits int32.
inline bool split_by_table(const Split& split, bool one_csr) {
  if (!(one_csr ? divide_offsets(split) : copy_offsets(split))) return false;
  copy_keys(split);
  return true;
}

}  // namespace hotrow
