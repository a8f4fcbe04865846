// The policy: which new keys get a slot, and which keys lose theirs. A line's state is its meta word (line.cuh): a
// counter of 0 to 3 for each slot, and 32 marks.
//
//   a query that finds a row     adds 1 to its counter, up to 3
//   a new key                    takes the line's first empty slot. If there is none:
//     first miss                 The key is refused, and its mark is set: bit hash % 32. A key whose mark is set, or that
//                                was missed twice since the last call, passes. A ninth mark clears the other eight.
//     cap                        Of the keys that pass, a lot lets in as many as fill about a fifth of the slots per call.
//     counters                   The victim is the first slot whose counter is 0, from a drawn slot on. If there is none,
//                                all counters go down by 1 and the key is refused.
//   a new row's counter          is 0, or 1 if the key was missed twice since the last call
//
// A slot that was locked in a call is never a victim in the same call. Counters and marks are hints: if two threads
// change a meta word at once, one change may be lost. u32 lines have no space for marks: a lot lets every fourth key
// pass, and the cap is a tenth.
//
// The caller passes salt, which differs in every call, and limit, 2^32 times the share that is let in
// (gpu_cache/device_table.py).
#pragma once

#include "table.cuh"

constexpr bool kHasMarks = sizeof(Word) == sizeof(u64);
constexpr u32 kMostMarks = 8;
constexpr u32 kEveryCounter = 0x55555555u & ((1u << 2 * kLineKeys) - 1);  // the lower bit of each

// The outcome of a key.
enum Outcome { kOpen, kDone, kInserted, kReplaced, kFirstMiss, kBeyondCap, kAllInUse, kNoSlot };

struct Candidate {
  i64 key;
  u32 misses;
  u64 hash;
  u64 lot;

  __device__ __forceinline__ Candidate(const Table& table, i64 key, u32 misses, u64 salt)
      : key(key), misses(misses), hash(hash_of(table, key, 0)), lot(mix(hash ^ salt)) {}

  // The slot at which the search for a victim starts.
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
  bits = (bits | bits >> 1) & 0x33333333;  // close the gaps between the even bits
  bits = (bits | bits >> 2) & 0x0f0f0f0f;
  bits = (bits | bits >> 4) & 0x00ff00ff;
  return (bits | bits >> 8) & kSlots;
}

// The first of the slots from `start` on, wrapping around the line.
__device__ __forceinline__ u32 first_slot(u32 slots, u32 start) {
  const u32 after = slots & ~0u << start;
  return __ffs(after ? after : slots) - 1;
}

// By one lane: take 1 from every counter above 0.
__device__ __forceinline__ void lower_counters(Line* line, Word meta) {
  atomicCAS(meta_word(line), meta, meta - counters_above_zero(meta));
}

// Whether the line has the candidate's mark. If not, one lane sets the mark, and `meta` becomes the word with the mark.
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

// Whether a candidate for a full line passes: kOpen, or the reason why not. All lanes of a tile call it; one of them
// writes.
__device__ __forceinline__ Outcome judge(const Candidate& candidate, Line* line, Word& meta, u64 limit, bool writes) {
  if (kHasMarks && !was_marked(candidate, line, meta, writes) && candidate.misses < 2) return kFirstMiss;
  return candidate.lot >> 32 < limit * candidate.misses ? kOpen : kBeyondCap;
}
