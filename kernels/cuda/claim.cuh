// Lock slots for new keys: what the kernels of claim.cu and insert.cu share.
#pragma once

#include "absent.cuh"
#include "policy.cuh"

// What became of a key, and the row of the slot that was locked for it or kNoRow.
struct Claim {
  Outcome outcome;
  i64 row;
};

// Votes. Lock a slot if `wanted` and if it still has the word in `unit`; returns whether it is locked.
__device__ __forceinline__ bool lock_slot(Tile tile, Line* line, const Unit& unit, u32 slot, bool wanted) {
  bool locked = false;
  if (wanted && tile.lane == slot % kTileLanes) {
    const Word word = word_at(unit, slot / kTileLanes);
    locked = atomicCAS(word_of_slot(line, slot), word, kLocked) == word;
  }
  return tile.ballot(locked);
}

// The counter of an outcome; for kInserted, kRowsHeld counts too.
__device__ __forceinline__ Counter counter_of_outcome(Outcome outcome) {
  return outcome == kInserted    ? kRowsInserted
         : outcome == kReplaced  ? kRowsReplaced
         : outcome == kFirstMiss ? kRefusedFirstMiss
         : outcome == kBeyondCap ? kRefusedByCap
         : outcome == kAllInUse  ? kRefusedByCounters
                                 : kRefusedNoSlot;
}

// Votes. Count the outcomes of a warp's keys, whose tables may differ: one addition for all keys of a table with the
// same outcome.
__device__ __forceinline__ void count_outcomes(const Table& table, Tile tile, u32 table_number, Outcome outcome) {
  const bool counts = tile.lane == 0 && outcome != kDone;
  const u32 alike = __match_any_sync(kAllLanes, counts ? table_number << 8 | outcome : ~0u);
  if (!counts || lane_id() != __ffs(alike) - 1) return;
  const u64 keys = __popc(alike);
  atomicAdd(counter_at(table, counter_of_outcome(outcome)), keys);
  if (outcome == kInserted) atomicAdd(counter_at(table, kRowsHeld), keys);
}

// Votes. Claim a slot of a dynamic table for a new key, if `wanted`. A held key keeps its row.
__device__ __forceinline__ Claim claim_in_line(const Table& table, Tile tile, const Candidate& candidate, u64 limit,
                                               bool wanted) {
  const u32 line_number = chain_line(table, candidate.key, 0);
  Line* line = table.lines + line_number;
  Claim claim = {wanted && is_holdable(candidate.key) ? kOpen : kDone, kNoRow};
  Outcome& outcome = claim.outcome;
  bool judged = false;
  while (__any_sync(kAllLanes, outcome == kOpen)) {
    const Unit unit = outcome == kOpen ? load_unit(line, tile) : Unit();
    Word meta = meta_of(tile, unit);
    const u32 held = slots_holding(tile, unit, static_cast<Word>(candidate.key));
    const u32 empty = slots_holding(tile, unit, kEmpty);
    const u32 victims = unused_slots(meta) & ~slots_holding(tile, unit, kLocked);
    if (outcome == kOpen && held) outcome = kDone;
    if (outcome == kOpen && !empty && !judged) outcome = judge(candidate, line, meta, limit, tile.lane == 0);
    judged |= !empty;
    if (outcome == kOpen && !empty && !victims) {
      if (tile.lane == 0) lower_counters(line, meta);
      outcome = kAllInUse;
    }
    const u32 slot = empty ? __ffs(empty) - 1 : first_slot(victims, candidate.start());
    if (!lock_slot(tile, line, unit, slot, outcome == kOpen)) continue;
    if (candidate.misses >= 2 && tile.lane == 0) atomicOr(meta_word(line), Word(1) << 2 * slot);
    claim.row = static_cast<i64>(line_number) * kLineKeys + slot;
    outcome = empty ? kInserted : kReplaced;
  }
  return claim;
}

// The place for a key of a static table: the first empty slot of its chain, unless a line of the chain holds the key.
struct Place {
  bool held;
  u32 step;  // of the chain; kMostChainLines if there is no empty slot
  Unit unit;
  u32 slot;
};

// Votes. Walks the chain as far as the key may be, and on to the first line with an empty slot.
__device__ __forceinline__ Place find_place(const Table& table, Tile tile, i64 key, bool walks) {
  Place place = {false, kMostChainLines, Unit(), 0};
  for (u32 step = 0; __any_sync(kAllLanes, walks); ++step) {
    const Unit unit = walks ? load_unit(table.lines + chain_line(table, key, step), tile) : Unit();
    const bool holds = slots_holding(tile, unit, static_cast<Word>(key));
    const u32 empty = slots_holding(tile, unit, kEmpty);
    const bool overflows = meta_of(tile, unit) & kOverflow;
    if (!walks) continue;
    place.held = holds;
    if (place.step == kMostChainLines && empty) place = {holds, step, unit, __ffs(empty) - 1u};
    walks = !holds && (overflows || place.step == kMostChainLines) && step + 1 < table.chain_lines;
  }
  return place;
}

// Votes. Claim a slot of a static table, which evicts nothing, for a new key, if `wanted`. A held key keeps its row.
__device__ __forceinline__ Claim claim_in_chain(const Table& table, Tile tile, i64 key, bool wanted) {
  Claim claim = {wanted && is_holdable(key) ? kOpen : kDone, kNoRow};
  Outcome& outcome = claim.outcome;
  while (__any_sync(kAllLanes, outcome == kOpen)) {
    const Place place = find_place(table, tile, key, outcome == kOpen);
    if (outcome == kOpen && place.held) outcome = kDone;
    if (outcome == kOpen && place.step == kMostChainLines) outcome = kNoSlot;
    const u32 line = chain_line(table, key, place.step);
    if (!lock_slot(tile, table.lines + line, place.unit, place.slot, outcome == kOpen)) continue;
    claim.row = static_cast<i64>(line) * kLineKeys + place.slot;
    outcome = kInserted;
    // Before the key is published: a reader of a line without the key must know that the chain goes on.
    if (tile.lane == 0)
      for (u32 step = 0; step < place.step; ++step)
        atomicOr(meta_word(table.lines + chain_line(table, key, step)), kOverflow);
  }
  return claim;
}

// The absent keys' lines, as a dynamic table.
__device__ __forceinline__ Table absent_table(Table table) {
  table.lines = table.absent_lines;
  table.line_count = table.absent_line_count;
  return table;
}

// By one thread: the key of a slot that was claimed for an absent key. No reader waits for a row.
__device__ __forceinline__ void publish_absent(const Table& table, i64 key, const Claim& claim) {
  if (claim.row == kNoRow) return;
  atomicExch(word_of_slot(table.absent_lines + claim.row / kLineKeys, slot_of_row(claim.row)), static_cast<Word>(key));
  if (claim.outcome == kInserted) atomicAdd(counter_at(table, kAbsentKeys), 1ull);
}
