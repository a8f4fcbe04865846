// Which new keys get a slot, and whose. The state of a line is its meta word (line.cuh): a counter of 0 to 3 for each
// slot, and 32 marks.
//
//   a query that finds a row     adds 1 to its counter, as far as 3
//   a new key takes the line's first empty slot without further ado; else
//     first miss                 it is refused, and its mark set: bit hash % 32. A key whose mark is set, or that was
//                                missed twice since the last call, goes on. 8 marks are forgotten when one more comes.
//     cap                        of those, as many are let in by lot as make about a fifth of the slots per call
//     counters                   the victim is the first slot, from one drawn by lot on, whose counter is 0. Where there
//                                is none, all counters go down by 1 and the key is refused.
//   the new row's counter is 0, or 1 if the key was missed twice since the last call
//
// A slot that was locked in a call is no victim in the same call. Counters and marks are hints: where two change a meta
// word at a time, one change may be lost. u32 lines have no room for marks: every fourth key goes on by lot, and the cap
// is a tenth.
//
// Both come from the caller: salt, which differs from call to call, and limit, 2^32 times the share that is let in
// (gpu_cache/policy.py).
#pragma once

#include "table.cuh"

constexpr bool kHasMarks = sizeof(Word) == sizeof(u64);
constexpr u32 kMostMarks = 8;
constexpr u32 kEveryCounter = 0x55555555u & ((1u << 2 * kLineKeys) - 1);  // the lower bit of each

// What became of a key.
enum Outcome { kOpen, kDone, kInserted, kReplaced, kFirstMiss, kBeyondCap, kAllInUse, kNoSlot };

struct Candidate {
  i64 key;
  u32 misses;
  u64 hash;
  u64 lot;

  __device__ __forceinline__ Candidate(const Table& table, i64 key, u32 misses, u64 salt)
      : key(key), misses(misses), hash(hash_of(table, key, 0)), lot(mix(hash ^ salt)) {}

  // The slot from which a victim is looked for.
  __device__ __forceinline__ u32 start() const { return __umulhi(static_cast<u32>(lot), kLineKeys); }
};

// Bit 2s: the counter of slot s is above 0.
__device__ __forceinline__ u32 counters_above_zero(Word meta) {
  const u32 counters = static_cast<u32>(meta);
  return (counters | counters >> 1) & kEveryCounter;
}

// Bit s: the counter of slot s is 0.
__device__ __forceinline__ u32 unused_slots(Word meta) {
  u32 bits = kEveryCounter & ~counters_above_zero(meta);
  bits = (bits | bits >> 1) & 0x33333333;  // the even bits, pushed together
  bits = (bits | bits >> 2) & 0x0f0f0f0f;
  bits = (bits | bits >> 4) & 0x00ff00ff;
  return (bits | bits >> 8) & kSlots;
}

// The first of the slots from `start` on, around the line.
__device__ __forceinline__ u32 first_slot(u32 slots, u32 start) {
  const u32 after = slots & ~0u << start;
  return __ffs(after ? after : slots) - 1;
}

// Take 1 from every counter above 0; by one lane.
__device__ __forceinline__ void lower_counters(Line* line, Word meta) {
  atomicCAS(meta_word(line), meta, meta - counters_above_zero(meta));
}

// Whether the line has the candidate's mark. If not, it gets it, from one lane; `meta` is then the word with it.
__device__ __forceinline__ bool was_marked(const Candidate& candidate, Line* line, Word& meta, bool writes) {
  const u64 mark = 1ull << (32 + candidate.hash % 32);
  if (meta & mark) return true;
  const bool forgets = __popc(static_cast<u32>(static_cast<u64>(meta) >> 32)) >= static_cast<int>(kMostMarks);
  const Word marked = static_cast<Word>((forgets ? meta & 0xffffffff : meta) | mark);
  if (writes && forgets) atomicCAS(meta_word(line), meta, marked);
  if (writes && !forgets) atomicOr(meta_word(line), static_cast<Word>(mark));
  meta = marked;
  return false;
}

// Whether a candidate for a full line goes on: kOpen, or why not. All lanes of a tile call; one of them writes.
__device__ __forceinline__ Outcome judge(const Candidate& candidate, Line* line, Word& meta, u64 limit, bool writes) {
  if (kHasMarks && !was_marked(candidate, line, meta, writes) && candidate.misses < 2) return kFirstMiss;
  return candidate.lot >> 32 < limit * candidate.misses ? kOpen : kBeyondCap;
}
