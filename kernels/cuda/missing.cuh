// The distinct missing keys of a request: a hash set with open addressing in device memory, and a list for the host in
// the order in which the keys first appear.
//
// A request's keys are numbered 0 .. N - 1, table after table; this number is a key's position. If table t's keys have
// the positions first .. first + n - 1, the slots 2 first .. 2 (first + n) - 1 belong to table t alone. So at most half
// of them are used, and a slot does not store its table.
//
//   pool, lookup               a key that misses      ->  its slot; `first` is the least of its positions
//   the team                   the launch's slots     ->  numbers in the order of `first`, and the keys for the host
//   pool_again, lookup_again   a slot's number        ->  the row that the host fetched for the key
//
// Keys that are first missed when bags are pooled again get the next numbers. `forget` empties the slots before the
// next request.
//
// The order of first appearance is known only when the last block is done. Then the blocks that are still there list
// the keys (team.cuh). A block stays if it missed a key, and if one block alone would take several rounds. If nothing
// is missed, no block stays, and no other kernel is launched.
#pragma once

#include "absent.cuh"
#include "team.cuh"

constexpr u32 kNoPosition = 0xffffffffu;
constexpr u32 kUnlisted = 0x80000000u;  // N is at most 2^30, so no number is as large
constexpr u32 kTeamSlots = 256;         // one block alone lists up to this many
constexpr u32 kMostNewSlots = 256;      // a key for each thread of a block

struct __align__(16) MissingSlot {
  i64 key;     // kNoKey: none
  u32 first;   // position
  u32 number;  // among the request's distinct missing keys; until it is listed, kUnlisted + how often it missed so far
};

// Per table, on the device; the team reports it to the host and sets it to 0.
struct MissingCounts {
  u32 keys;    // positions that missed
  u32 bags;    // bags with such a key
  u32 absent;  // positions of absent keys; launches again count none
};

// The report to the host, per table.
struct MissingReport {
  u32 keys;
  u32 bags;
  u32 distinct;  // distinct keys that this launch was the first to miss
  u32 used;      // slots that the request uses so far, in all tables
  u32 absent;
};

// A request's set. It is in device memory, except report, keys and times, which are in host memory.
struct MissingSet {
  MissingSlot* slots;     // [2 N]
  u32* used;              // [N] slots with a key, in order of arrival
  u32* marks;             // [N / 32 + 1] a bit per position, clear between launches
  u32* ranks;             // [N / 32 + 1] set bits before each word of `marks`
  u32* progress;          // [2] slots used, slots used by earlier launches
  Team* team;             // [1]
  MissingCounts* counts;  // [T]
  MissingReport* report;  // [T]
  i64* keys;              // [N] this launch's distinct keys, table after table, in order of first appearance
  u32* times;             // [N] how often each of them missed
  u64 seed;               // of the hash: a secret, so that no client can send keys that all have the same home slot
};
static_assert(sizeof(MissingSet) == 88, "MISSING_SET_BYTES of gpu_cache/bag_layout.py");

enum Progress { kSlotsUsed, kSlotsListed };

struct Region {
  u32 first;
  u32 count;
};

// Slots that a block has filled and not listed yet, in shared memory; `count` is 0 at first.
struct NewSlots {
  u32 count;
  u32 begin;  // of them in `used`
  u32 slots[kMostNewSlots];
};

// Keys that no table holds and no list contains.
__device__ __forceinline__ bool is_reserved(i64 key) {
  return key >= 0x7ffffffffffffffell || key <= -0x7fffffffffffffffll;
}

__device__ __forceinline__ u32 next_slot(Region region, u32 at) { return at + 1 == region.count ? 0 : at + 1; }

// Two rounds, because one round of a known bijection does not hide the seed well enough.
__device__ __forceinline__ u32 home_slot(const MissingSet& set, Region region, i64 key) {
  const u64 hash = mix(mix(static_cast<u64>(key) ^ set.seed) + set.seed);
  return __umulhi(static_cast<u32>(hash >> 32), region.count);
}

// The number of a key that an earlier launch missed; kUnlisted or above for other keys.
__device__ __forceinline__ u32 number_of(const MissingSet& set, Region region, i64 key) {
  for (u32 at = home_slot(set, region, key);; at = next_slot(region, at)) {
    const MissingSlot* slot = set.slots + region.first + at;
    const i64 held = __ldcg(&slot->key);
    if (held == key) return __ldcg(&slot->number);
    if (held == kNoKey) return kUnlisted;
  }
}

// Enter a key that missed at a position. It does not matter which thread takes the slot, because the slot keeps the
// least position.
__device__ __forceinline__ void enter_missing(const MissingSet& set, Region region, i64 key, u32 position,
                                              NewSlots& fresh) {
  for (u32 at = home_slot(set, region, key);; at = next_slot(region, at)) {
    MissingSlot* slot = global(set.slots + region.first + at);
    i64 held = __ldcg(&slot->key);
    if (held == kNoKey)
      held = static_cast<i64>(atomicCAS(reinterpret_cast<u64*>(&slot->key), static_cast<u64>(kNoKey),
                                        static_cast<u64>(key)));
    if (held != kNoKey && held != key) continue;
    atomicMin(&slot->first, position);
    atomicAdd(&slot->number, 1u);
    if (held == kNoKey) fresh.slots[atomicAdd(&fresh.count, 1u)] = region.first + at;
    return;
  }
}

// By all threads of a block: hand its new slots to the list of all blocks. Between barriers.
__device__ __forceinline__ void list_slots(const MissingSet& set, NewSlots& fresh) {
  const u32 count = fresh.count;
  if (count == 0) return;
  if (threadIdx.x == 0) fresh.begin = atomicAdd(global(set.progress) + kSlotsUsed, count);
  __syncthreads();
  if (threadIdx.x < count) set.used[fresh.begin + threadIdx.x] = fresh.slots[threadIdx.x];
  __syncthreads();
}

// By one thread of a block: count the keys of an item.
__device__ __forceinline__ void count_keys(const Table& table, MissingCounts& counts, u32 found, u32 missed,
                                           u32 absent) {
  if (found) atomicAdd(counter_at(table, kKeysFound), u64(found));
  if (missed) atomicAdd(counter_at(table, kKeysMissed), u64(missed));
  if (absent) {
    atomicAdd(counter_at(table, kAbsentAnswers), u64(absent));
    atomicAdd(global(&counts.absent), absent);
  }
}

// Positions before this one at which a key of this launch first appeared.
__device__ __forceinline__ u32 rank_of(const MissingSet& set, u32 position) {
  const u32 below = (1u << position % 32) - 1;
  return __ldcg(set.ranks + position / 32) + __popc(__ldcg(set.marks + position / 32) & below);
}

// By all threads of each of `blocks` blocks, after its work: whether the block helps to list the missing keys.
// `has_missed`: the block missed a key. Barriers.
__device__ __forceinline__ bool stays_to_list(const MissingSet& set, u32 blocks, bool has_missed, Member& me) {
  const bool has_reason = threadIdx.x == 0 && has_missed &&
                          __ldcg(set.progress + kSlotsUsed) - __ldcg(set.progress + kSlotsListed) > kTeamSlots;
  return join_team(*set.team, blocks, has_reason, me);
}

// By the team: set the bits of the first positions of slots `begin` .. `end` - 1 of `used`.
template <u32 kThreads>
__device__ __forceinline__ void mark_firsts(const MissingSet& set, const Member& me, u32 begin, u32 end) {
  for (u32 i = begin + me.rank * kThreads + threadIdx.x; i < end; i += me.size * kThreads) {
    const u32 first = __ldcg(&set.slots[__ldcg(set.used + i)].first);
    atomicOr(global(set.marks) + first / 32, 1u << first % 32);
  }
}

// By the team: count the marks before each word. Meets.
template <u32 kThreads>
__device__ __forceinline__ void rank_words(const MissingSet& set, Member& me, u32 words) {
  const u32 threads = me.size * kThreads, share = (words + threads - 1) / threads;
  const u32 from = min((me.rank * kThreads + threadIdx.x) * share, words), to = min(from + share, words);
  u32 count = 0;
  for (u32 w = from; w < to; ++w) count += __popc(__ldcg(set.marks + w));
  u32 rank = sum_before_in_team<kThreads>(*set.team, me, count);
  for (u32 w = from; w < to; ++w) {
    set.ranks[w] = rank;
    rank += __popc(__ldcg(set.marks + w));
  }
}

// By the team: number the slots, and write their keys for the host.
template <u32 kThreads>
__device__ __forceinline__ void number_slots(const MissingSet& set, const Member& me, u32 begin, u32 end) {
  for (u32 i = begin + me.rank * kThreads + threadIdx.x; i < end; i += me.size * kThreads) {
    MissingSlot* slot = set.slots + __ldcg(set.used + i);
    const u32 listed = rank_of(set, __ldcg(&slot->first));
    set.keys[listed] = __ldcg(&slot->key);
    set.times[listed] = __ldcg(&slot->number) - kUnlisted;
    slot->number = begin + listed;
  }
}

// By the team: number the slots that the launch filled, and write keys and counts for the host. `first_position` is the
// first position of each table, and for T the number of positions. Meets, and leaves.
template <u32 kThreads, class FirstPosition>
__device__ __forceinline__ void list_missing(const MissingSet& set, Member& me, u32 table_count,
                                             FirstPosition first_position) {
  const u32 begin = __ldcg(set.progress + kSlotsListed), end = __ldcg(set.progress + kSlotsUsed);
  const u32 words = first_position(table_count) / 32 + 1;
  if (begin != end) {
    mark_firsts<kThreads>(set, me, begin, end);
    meet(*set.team, me);
    rank_words<kThreads>(set, me, words);
    meet(*set.team, me);
    number_slots<kThreads>(set, me, begin, end);
  }
  for (u32 t = me.rank * kThreads + threadIdx.x; t < table_count; t += me.size * kThreads) {
    MissingCounts* counts = global(set.counts) + t;
    const u32 distinct = begin == end ? 0 : rank_of(set, first_position(t + 1)) - rank_of(set, first_position(t));
    set.report[t] = {atomicExch(&counts->keys, 0u), atomicExch(&counts->bags, 0u), distinct, end,
                     atomicExch(&counts->absent, 0u)};
  }
  if (begin != end) {
    meet(*set.team, me);
    for (u32 w = me.rank * kThreads + threadIdx.x; w < words; w += me.size * kThreads) set.marks[w] = 0;
  }
  if (leaves_last(*set.team, me.size)) set.progress[kSlotsListed] = end;
}
