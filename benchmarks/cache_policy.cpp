// Replacement rules of the GPU cache and its peers, as caches without rows. benchmarks/cache_policy.py loads this.
//
// All policies see the same batches: every key of a batch is looked up, then missing keys may enter. Keys are
// 0 .. key_count - 1. Every policy is deterministic; randomness comes from a hash or a seeded generator.
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace {

using i64 = std::int64_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr i64 kEmpty = -1;
constexpr u64 kGolden = 0x9e3779b97f4a7c15ull;

// MurmurHash3's finaliser.
u64 mix(u64 k) {
  k ^= k >> 33;
  k *= 0xff51afd7ed558ccdull;
  k ^= k >> 33;
  k *= 0xc4ceb9fe1a85ec53ull;
  return k ^ k >> 33;
}

u32 scaled(u32 fraction, u64 size) { return static_cast<u32>(fraction * size >> 32); }

// The distinct keys of a batch in order of first appearance, and their counts.
class Distinct {
 public:
  explicit Distinct(i64 key_count) : counts_(key_count, 0) {}
  void add(i64 key) {
    if (counts_[key]++ == 0) keys_.push_back(key);
  }
  const std::vector<i64>& keys() const { return keys_; }
  u32 count(i64 key) const { return counts_[key]; }
  void clear() {
    for (i64 key : keys_) counts_[key] = 0;
    keys_.clear();
  }

 private:
  std::vector<i64> keys_;
  std::vector<u32> counts_;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual u64 access(const i64* keys, u64 n) = 0;  // the number of hits
  virtual bool holds(i64 key) const = 0;
  u64 rows_written = 0;
};

// Slots in sets of `ways`; a policy defines `set_of` a key.
class Sets {
 public:
  Sets(u64 capacity, u32 ways) : ways(ways), count(static_cast<u32>(capacity / ways)), keys_(u64(count) * ways, kEmpty) {}
  i64* set(u32 number) { return &keys_[u64(number) * ways]; }
  int find(u32 number, i64 key) const {
    const i64* slots = &keys_[u64(number) * ways];
    for (u32 w = 0; w < ways; ++w)
      if (slots[w] == key) return static_cast<int>(w);
    return -1;
  }
  const u32 ways, count;

 private:
  std::vector<i64> keys_;
};

// The rule of kernels/cuda, one key after the other; see docs/gpu_cache.md, "Policy".
class Counters : public Policy {
 public:
  Counters(u64 capacity, u32 ways, bool marks, i64 key_count)
      : sets_(capacity, ways), lines_(sets_.count), has_marks_(marks), missed_(key_count) {}

  u64 access(const i64* keys, u64 n) override {
    u64 hits = 0;
    for (u64 i = 0; i < n; ++i) {
      const u32 number = line_of(keys[i]);
      const int way = sets_.find(number, keys[i]);
      if (way < 0) {
        missed_.add(keys[i]);
        continue;
      }
      ++hits;
      u32& counters = lines_[number].counters;
      if ((counters >> 2 * way & 3) < 3) counters += 1u << 2 * way;
    }
    if (!missed_.keys().empty()) insert();
    return hits;
  }

  bool holds(i64 key) const override { return sets_.find(line_of(key), key) >= 0; }

 private:
  struct Line {
    u32 counters = 0, marks = 0;
    u32 locked = 0;  // slots replaced in this call
    u64 call = 0;    // the call of `locked`
  };

  u32 line_of(i64 key) const { return scaled(static_cast<u32>(mix(key) >> 32), sets_.count); }

  void insert() {
    ++call_;
    const u64 misses = missed_.keys().size(), slots = u64(sets_.count) * sets_.ways;
    const u64 cap = std::max<u64>(1, slots / (has_marks_ ? 5 : 10));
    u64 limit = misses <= cap ? 1ull << 32 : (cap << 32) / misses;
    if (!has_marks_) limit = std::min<u64>(limit, 1ull << 30);
    for (i64 key : missed_.keys()) {
      Line& line = lines_[line_of(key)];
      if (line.call != call_) line.locked = 0, line.call = call_;
      const u32 count = missed_.count(key);
      const int way = claim(line, key, count, limit);
      if (way < 0) continue;
      sets_.set(line_of(key))[way] = key;
      line.locked |= 1u << way;
      if (count > 1) line.counters |= 1u << 2 * way;
      ++rows_written;
    }
    missed_.clear();
  }

  // The slot a key gets, or -1.
  int claim(Line& line, i64 key, u32 count, u64 limit) {
    const int empty = sets_.find(line_of(key), kEmpty);
    if (empty >= 0) return empty;
    const u64 hash = mix(key), draw = mix(hash ^ call_ * kGolden);
    if (has_marks_ && !was_marked(line, 1u << (hash & 31)) && count < 2) return -1;
    if (draw >> 32 >= limit * count) return -1;
    return victim(line, scaled(static_cast<u32>(draw), sets_.ways));
  }

  static bool was_marked(Line& line, u32 mark) {
    if (line.marks & mark) return true;
    line.marks = __builtin_popcount(line.marks) >= 8 ? mark : line.marks | mark;
    return false;
  }

  int victim(Line& line, u32 start) const {
    const u32 ways = sets_.ways;
    for (u32 i = 0; i < ways; ++i) {
      const u32 way = (start + i) % ways;
      if (!(line.locked >> way & 1) && !(line.counters >> 2 * way & 3)) return static_cast<int>(way);
    }
    line.counters -= (line.counters | line.counters >> 1) & 0x55555555u;
    return -1;
  }

  Sets sets_;
  std::vector<Line> lines_;
  bool has_marks_;
  Distinct missed_;
  u64 call_ = 0;
};

// NV Embedding Cache 26.06 as in its sources: sets of 8, no hash. The counters of slots change only when a batch is
// inserted, which is drawn at random by the batch's hit rate. A new key replaces the slot of its set with the smallest
// counter if the key occurs more often in the batch than that counter.
class Nve : public Policy {
 public:
  Nve(u64 capacity, i64 key_count, u64 seed)
      : sets_(capacity, 8), counters_(u64(sets_.count) * 8, 0.0f), seen_(key_count), random_(seed) {}

  u64 access(const i64* keys, u64 n) override {
    u64 hits = 0;
    for (u64 i = 0; i < n; ++i) hits += holds(keys[i]);
    const double miss_rate = 1.0 - static_cast<double>(hits) / static_cast<double>(n);
    const double chance = miss_rate > 0.25 ? miss_rate : miss_rate * miss_rate * miss_rate;
    if (std::uniform_real_distribution<>(0, 1)(random_) < chance) insert(keys, n);
    return hits;
  }

  bool holds(i64 key) const override { return sets_.find(set_of(key), key) >= 0; }

 private:
  u32 set_of(i64 key) const { return static_cast<u32>(key % sets_.count); }

  void insert(const i64* keys, u64 n) {
    for (float& counter : counters_) counter *= 0.95f;
    for (u64 i = 0; i < n; ++i) seen_.add(keys[i]);
    std::vector<std::pair<u32, i64>> fresh;
    for (i64 key : seen_.keys()) {
      const int way = sets_.find(set_of(key), key);
      if (way >= 0)
        counters_[u64(set_of(key)) * 8 + way] += static_cast<float>(seen_.count(key));
      else
        fresh.emplace_back(seen_.count(key), key);
    }
    seen_.clear();
    std::stable_sort(fresh.begin(), fresh.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (auto [count, key] : fresh) {
      i64* set = sets_.set(set_of(key));
      float* counters = &counters_[u64(set_of(key)) * 8];
      const int empty = sets_.find(set_of(key), kEmpty);
      const auto way = empty >= 0 ? empty : std::min_element(counters, counters + 8) - counters;
      if (empty < 0 && static_cast<float>(count) <= counters[way]) continue;
      set[way] = key;
      counters[way] = static_cast<float>(count);
      ++rows_written;
    }
  }

  Sets sets_;
  std::vector<float> counters_;
  Distinct seen_;
  std::mt19937_64 random_;
};

// A bit per slot, set by a hit; a hand per set passes over set bits and clears them. Every miss enters.
class Clock : public Policy {
 public:
  Clock(u64 capacity, u32 ways, i64 key_count)
      : sets_(capacity, ways), bits_(sets_.count, 0), hands_(sets_.count, 0), missed_(key_count) {}

  u64 access(const i64* keys, u64 n) override {
    u64 hits = 0;
    for (u64 i = 0; i < n; ++i) {
      const int way = sets_.find(set_of(keys[i]), keys[i]);
      if (way < 0) {
        missed_.add(keys[i]);
      } else {
        bits_[set_of(keys[i])] |= 1u << way;
        ++hits;
      }
    }
    for (i64 key : missed_.keys()) {
      const int empty = sets_.find(set_of(key), kEmpty);
      sets_.set(set_of(key))[empty >= 0 ? empty : victim(set_of(key))] = key;
      ++rows_written;
    }
    missed_.clear();
    return hits;
  }

  bool holds(i64 key) const override { return sets_.find(set_of(key), key) >= 0; }

 private:
  u32 set_of(i64 key) const { return scaled(static_cast<u32>(mix(key) >> 32), sets_.count); }

  int victim(u32 set) {
    for (;;) {
      const u32 way = hands_[set];
      hands_[set] = (way + 1) % sets_.ways;
      if (!(bits_[set] >> way & 1)) return static_cast<int>(way);
      bits_[set] &= ~(1u << way);
    }
  }

  Sets sets_;
  std::vector<u32> bits_, hands_;
  Distinct missed_;
};

// The least recently used row leaves; every miss enters.
class Lru : public Policy {
 public:
  Lru(u64 capacity, i64 key_count)
      : capacity_(capacity), end_(key_count), before_(key_count + 1, kEmpty), after_(key_count + 1), missed_(key_count) {
    before_[end_] = after_[end_] = end_;
  }

  u64 access(const i64* keys, u64 n) override {
    u64 hits = 0;
    for (u64 i = 0; i < n; ++i) {
      if (!holds(keys[i])) {
        missed_.add(keys[i]);
        continue;
      }
      ++hits;
      unlink(keys[i]);
      link_newest(keys[i]);
    }
    for (i64 key : missed_.keys()) {
      if (size_ == capacity_) unlink(after_[end_]);
      size_ = std::min(size_ + 1, capacity_);
      link_newest(key);
      ++rows_written;
    }
    missed_.clear();
    return hits;
  }

  bool holds(i64 key) const override { return before_[key] != kEmpty; }

 private:
  void unlink(i64 key) {
    after_[before_[key]] = after_[key];
    before_[after_[key]] = before_[key];
    before_[key] = kEmpty;
  }
  void link_newest(i64 key) {
    before_[key] = before_[end_];
    after_[key] = end_;
    after_[before_[end_]] = key;
    before_[end_] = key;
  }

  u64 capacity_, size_ = 0;
  i64 end_;  // sentinel after the newest and before the oldest
  std::vector<i64> before_, after_;
  Distinct missed_;
};

}  // namespace

extern "C" {
Policy* new_counters(u64 capacity, u32 ways, int marks, i64 key_count) {
  return new Counters(capacity, ways, marks != 0, key_count);
}
Policy* new_nve(u64 capacity, i64 key_count, u64 seed) { return new Nve(capacity, key_count, seed); }
Policy* new_clock(u64 capacity, u32 ways, i64 key_count) { return new Clock(capacity, ways, key_count); }
Policy* new_lru(u64 capacity, i64 key_count) { return new Lru(capacity, key_count); }
void delete_policy(Policy* policy) { delete policy; }
u64 access_keys(Policy* policy, const i64* keys, u64 n) { return policy->access(keys, n); }
int holds_key(const Policy* policy, i64 key) { return policy->holds(key); }
u64 rows_written(const Policy* policy) { return policy->rows_written; }
}
