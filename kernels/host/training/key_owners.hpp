// The distinct keys of a batch, grouped by the process that owns their rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/key_hash.hpp"

namespace hotrow {

struct OwnedKeys {
  std::vector<int64_t> keys;    // process after process; within a process, in the order of first appearance
  std::vector<int64_t> counts;  // of each process
  std::vector<int64_t> places;  // of each key of the batch among `keys`
  std::vector<int64_t> firsts;  // of each of `keys`, its first place in the batch
};

// keys[n]. Process `key mod processes`, or process `owner` if it is not -1, owns the row of a key. Without `distinct`,
// every key of the batch is kept. Throws std::bad_alloc.
inline OwnedKeys keys_by_owner(const int64_t* keys, size_t n, int64_t processes, int64_t owner, bool distinct) {
  // An open hash table of distinct keys and their positions, at most half full.
  struct Entry {
    int64_t key;
    int64_t position = -1;
  };
  constexpr size_t kAhead = 16;  // entries whose memory is asked for before their turn
  size_t size = 16;
  while (size < 2 * n) size *= 2;
  std::vector<Entry> entries(distinct ? size : 0);
  static const KeyHash hash(random_seed());
  const auto home = [&](int64_t key) { return (hash(key) >> 32) & (size - 1); };
  std::vector<int64_t> firsts;
  OwnedKeys owned;
  owned.places.resize(n);
  firsts.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    int64_t position = static_cast<int64_t>(firsts.size());
    if (distinct) {
      if (i + kAhead < n) __builtin_prefetch(&entries[home(keys[i + kAhead])], 1);
      size_t at = home(keys[i]);
      while (entries[at].position >= 0 && entries[at].key != keys[i]) at = (at + 1) & (size - 1);
      if (entries[at].position < 0) entries[at] = {keys[i], position};
      position = entries[at].position;
    }
    if (position == static_cast<int64_t>(firsts.size())) firsts.push_back(static_cast<int64_t>(i));
    owned.places[i] = position;
  }
  const bool is_power_of_two = (processes & (processes - 1)) == 0;
  std::vector<uint32_t> owners(firsts.size(), static_cast<uint32_t>(std::max<int64_t>(owner, 0)));
  for (size_t position = 0; owner < 0 && position < firsts.size(); ++position) {
    const int64_t key = keys[firsts[position]];
    const int64_t rest = is_power_of_two ? key & (processes - 1) : key % processes;
    owners[position] = static_cast<uint32_t>(rest < 0 ? rest + processes : rest);
  }
  owned.counts.assign(static_cast<size_t>(processes), 0);
  for (const uint32_t process : owners) ++owned.counts[process];
  std::vector<int64_t> next(owned.counts.size(), 0);
  for (size_t process = 1; process < next.size(); ++process) next[process] = next[process - 1] + owned.counts[process - 1];
  owned.keys.resize(firsts.size());
  owned.firsts.resize(firsts.size());
  std::vector<int64_t> moved(firsts.size());
  for (size_t position = 0; position < firsts.size(); ++position) {
    const int64_t place = next[owners[position]]++;
    owned.keys[static_cast<size_t>(place)] = keys[firsts[position]];
    owned.firsts[static_cast<size_t>(place)] = firsts[position];
    moved[position] = place;
  }
  for (int64_t& place : owned.places) place = moved[static_cast<size_t>(place)];
  return owned;
}

}  // namespace hotrow
