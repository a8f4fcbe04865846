// Splits a request's keys, which come sample after sample, by embedding table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace hotrow {

// What a split reads and writes. T tables; table t has slots[t] slots in each of B samples.
//
// The arguments are read in place, and another thread may write to them then. So addresses are computed only from
// out_row_ptrs, which are checked after they are written.
template <class Offset>
struct Split {
  const int64_t* keys;     // [N], sample-major: sample 0's keys of table 0, of table 1, ..., then sample 1's
  size_t key_count;        // N
  const Offset* row_ptrs;  // one CSR over all slots of a sample, or one CSR per table, table after table
  std::vector<int64_t> slots;
  size_t samples;          // B
  int64_t* out_keys;       // [N], table-major; not used if there is one table, whose keys are in order
  int32_t* out_row_ptrs;   // B * slots[t] + 1 per table, table after table, each from 0
  int64_t* most_keys;      // [T], the most keys of the table in one sample
  int64_t* all_keys;       // [T], the keys of the table in all samples
};

constexpr size_t kTileSamples = 64;  // their offsets and keys stay in the L1 cache while table after table takes its own

// Whether n + 1 offsets start at 0, never decrease, and end at or below `most`.
template <class Offset>
bool is_csr(const Offset* offsets, size_t n, size_t most) {
  using Bits = std::make_unsigned_t<Offset>;
  Bits signs = 0;  // the highest bit: whether an offset is negative or falls, without a branch or a comparison
  for (size_t i = 0; i < n; ++i) {
    const Bits offset = static_cast<Bits>(offsets[i]), next = static_cast<Bits>(offsets[i + 1]);
    signs |= next | (next - offset);
  }
  return offsets[0] == 0 && !(signs >> (8 * sizeof(Offset) - 1)) && static_cast<uint64_t>(offsets[n]) <= most;
}

// Write one table's offsets behind `out`, from bags that are `slots` of `total` in each sample. A table of one slot has
// a loop of its own.
template <size_t kSlots, class Offset>
void add_bags(const Offset* bags, size_t slots, size_t total, size_t samples, int32_t* out) {
  const size_t count = kSlots ? kSlots : slots;
  uint32_t last = static_cast<uint32_t>(*out);
  for (size_t sample = 0; sample < samples; ++sample, bags += total) {
    for (size_t slot = 0; slot < count; ++slot) {
      last += static_cast<uint32_t>(bags[slot + 1]) - static_cast<uint32_t>(bags[slot]);
      *++out = static_cast<int32_t>(last);
    }
  }
}

// From one CSR over the slots of all tables to one CSR per table. False if it is no CSR of N keys.
template <class Offset>
bool divide_offsets(const Split<Offset>& split) {
  size_t total = 0;
  for (const int64_t slots : split.slots) total += static_cast<size_t>(slots);
  const size_t bags = split.samples * total;
  if (!is_csr(split.row_ptrs, bags, split.key_count)) return false;
  if (static_cast<size_t>(split.row_ptrs[bags]) != split.key_count) return false;
  for (size_t begin = 0; begin < split.samples; begin += kTileSamples) {
    const size_t samples = std::min(split.samples - begin, kTileSamples);
    const Offset* first_bag = split.row_ptrs + begin * total;
    int32_t* of_table = split.out_row_ptrs;
    for (const int64_t signed_slots : split.slots) {
      const size_t slots = static_cast<size_t>(signed_slots);
      if (begin == 0) *of_table = 0;
      const auto add = slots == 1 ? add_bags<1, Offset> : add_bags<0, Offset>;
      add(first_bag, slots, total, samples, of_table + begin * slots);
      first_bag += slots;
      of_table += split.samples * slots + 1;
    }
  }
  return true;
}

// Copy the CSRs of all tables. False if one of them is no CSR.
template <class Offset>
bool copy_offsets(const Split<Offset>& split) {
  const Offset* in = split.row_ptrs;
  int32_t* out = split.out_row_ptrs;
  for (const int64_t slots : split.slots) {
    const size_t bags = split.samples * static_cast<size_t>(slots);
    if (!is_csr(in, bags, split.key_count)) return false;
    out = std::transform(in, in + bags + 1, out, [](Offset offset) { return static_cast<int32_t>(offset); });
    in += bags + 1;
  }
  return true;
}

// Whether out_row_ptrs are CSRs of N keys together. Notes how many keys each has.
template <class Offset>
bool check_offsets(const Split<Offset>& split) {
  const int32_t* row_ptrs = split.out_row_ptrs;
  size_t keys = 0;
  for (size_t t = 0; t < split.slots.size(); ++t) {
    const size_t bags = split.samples * static_cast<size_t>(split.slots[t]);
    if (!is_csr(row_ptrs, bags, split.key_count - keys)) return false;
    split.all_keys[t] = row_ptrs[bags];
    keys += static_cast<size_t>(row_ptrs[bags]);
    row_ptrs += bags + 1;
  }
  return keys == split.key_count;
}

// The position of a split in one table.
struct TableCursor {
  const int32_t* row_ptrs;  // at the tile's first sample
  size_t slots;
  int64_t* keys;     // where its next key goes, or nullptr
  int32_t most = 0;  // the most keys of a sample of the tile

  // Add each sample's number of keys to `counts`. With kSlots of 1, the compiler adds several at a time.
  template <size_t kSlots>
  void add_counts(size_t samples, uint32_t* counts) {
    const size_t step = kSlots ? kSlots : slots;
    int32_t largest = 0;
    for (size_t sample = 0; sample < samples; ++sample) {
      const int32_t count = row_ptrs[(sample + 1) * step] - row_ptrs[sample * step];
      counts[sample] += static_cast<uint32_t>(count);
      largest = std::max(largest, count);
    }
    most = largest;
  }

  // Copy the keys of each sample, which begin at `from` in `in`. Then `from` is where the next table's keys begin.
  void copy_keys(size_t samples, const int64_t* in, uint32_t* from) {
    const bool one_each = most == 1 && static_cast<size_t>(row_ptrs[samples * slots] - row_ptrs[0]) == samples;
    if (one_each) {
      for (size_t sample = 0; sample < samples; ++sample) *keys++ = in[from[sample]++];
      return;
    }
    for (size_t sample = 0; sample < samples; ++sample) {
      const int32_t count = row_ptrs[(sample + 1) * slots] - row_ptrs[sample * slots];
      keys = std::copy_n(in + from[sample], count, keys);
      from[sample] += static_cast<uint32_t>(count);
    }
  }
};

// Copy the keys by out_row_ptrs, and note the most keys of a sample in each table.
template <class Offset>
void copy_keys(const Split<Offset>& split) {
  std::vector<TableCursor> tables;
  const int32_t* row_ptrs = split.out_row_ptrs;
  int64_t* out = split.out_keys;
  for (size_t t = 0; t < split.slots.size(); ++t) {
    const size_t slots = static_cast<size_t>(split.slots[t]);
    tables.push_back({row_ptrs, slots, out});
    row_ptrs += split.samples * slots + 1;
    if (out) out += split.all_keys[t];
    split.most_keys[t] = 0;
  }
  uint32_t next = 0;  // where the next sample's keys begin
  for (size_t begin = 0; begin < split.samples; begin += kTileSamples) {
    const size_t samples = std::min(split.samples - begin, kTileSamples);
    uint32_t from[kTileSamples] = {};  // first the number of each sample's keys, then where they begin
    for (TableCursor& table : tables)
      table.slots == 1 ? table.add_counts<1>(samples, from) : table.add_counts<0>(samples, from);
    for (size_t sample = 0; sample < samples; ++sample) next += std::exchange(from[sample], next);
    for (size_t t = 0; t < tables.size(); ++t) {
      if (split.out_keys) tables[t].copy_keys(samples, split.keys, from);
      tables[t].row_ptrs += samples * tables[t].slots;
      split.most_keys[t] = std::max<int64_t>(split.most_keys[t], tables[t].most);
    }
  }
}

// Returns whether row_ptrs are valid. If they are not, the outputs are undefined.
// The caller has checked the lengths, and that N fits int32.
template <class Offset>
bool split_by_table(const Split<Offset>& split, bool one_csr) {
  if (!(one_csr ? divide_offsets(split) : copy_offsets(split)) || !check_offsets(split)) return false;
  copy_keys(split);
  return true;
}

}  // namespace hotrow
