// The distinct keys of a batch, grouped by the process that owns their rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucket.hpp"

namespace hotrow {

struct OwnedKeys {
  std::vector<int64_t> keys;    // process after process; within a process, in the order of first appearance
  std::vector<int64_t> counts;  // of each process
  std::vector<int64_t> places;  // of each key of the batch among `keys`
  std::vector<int64_t> firsts;  // of each of `keys`, its first place in the batch
};

// keys[n], of which process `key mod processes`, or process `owner` if it is not -1, owns the row. Without `distinct`,
// every key of the batch is kept. Throws std::bad_alloc.
inline OwnedKeys keys_by_owner(const int64_t* keys, size_t n, int64_t processes, int64_t owner, bool distinct) {
  // An open hash table of the positions of distinct keys, at most half full.
  size_t size = 16;
  while (size < 2 * n) size *= 2;
  std::vector<int64_t> position_of(n), firsts;
  std::vector<int32_t> entries(distinct ? size : 0, -1);
  firsts.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (!distinct) {
      position_of[i] = static_cast<int64_t>(i);
      firsts.push_back(position_of[i]);
      continue;
    }
    size_t at = (mix(keys[i]) >> 32) & (size - 1);
    while (entries[at] >= 0 && keys[firsts[static_cast<size_t>(entries[at])]] != keys[i]) at = (at + 1) & (size - 1);
    if (entries[at] < 0) {
      entries[at] = static_cast<int32_t>(firsts.size());
      firsts.push_back(static_cast<int64_t>(i));
    }
    position_of[i] = entries[at];
  }
  const auto owner_of = [&](int64_t key) {
    if (owner >= 0) return owner;
    const int64_t rest = key % processes;
    return rest < 0 ? rest + processes : rest;
  };
  OwnedKeys owned;
  owned.counts.assign(static_cast<size_t>(processes), 0);
  for (const int64_t first : firsts) ++owned.counts[static_cast<size_t>(owner_of(keys[first]))];
  std::vector<int64_t> next(owned.counts.size(), 0);
  for (size_t process = 1; process < next.size(); ++process) next[process] = next[process - 1] + owned.counts[process - 1];
  owned.keys.resize(firsts.size());
  owned.firsts.resize(firsts.size());
  std::vector<int64_t> moved(firsts.size());
  for (size_t position = 0; position < firsts.size(); ++position) {
    const int64_t key = keys[firsts[position]];
    const int64_t place = next[static_cast<size_t>(owner_of(key))]++;
    owned.keys[static_cast<size_t>(place)] = key;
    owned.firsts[static_cast<size_t>(place)] = firsts[position];
    moved[position] = place;
  }
  owned.places.resize(n);
  for (size_t i = 0; i < n; ++i) owned.places[i] = moved[static_cast<size_t>(position_of[i])];
  return owned;
}

}  // namespace hotrow
