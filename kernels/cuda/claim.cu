// The first half of a write: find and lock the slots that rows are going to be written to. fill.cu is the second half.
//
//   tables     Table[1]
//   keys       int64[N]    distinct; keys that no line can hold are ignored
//   numbers    int64[N]    row of the slot that was locked for the key, or kNoRow if there is nothing to write
//
// A locked slot holds kLocked instead of its key, so that no later launch finds the old key or reads its row. Between
// the halves, the writer's stream waits for the launches that found the key before (gpu_cache/readers.py). The calls of
// one table follow each other on streams. The tiles of one call may meet in a line; a compare-and-swap of the key word
// decides which tile gets a slot. The words change in one direction only, so a tile tries at most once per slot.
//
// Launch: grid = N / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each key.
#include "policy.cuh"

constexpr u32 kBlockThreads = 256;
constexpr u32 kBlockTiles = kBlockThreads / kTileLanes;

__device__ __forceinline__ u32 tile_number() { return blockIdx.x * kBlockTiles + threadIdx.x / kTileLanes; }

// Votes. Lock a slot if `wanted` and if it still has the word in `unit`; returns whether it is locked.
__device__ __forceinline__ bool lock_slot(Tile tile, Line* line, const Unit& unit, u32 slot, bool wanted) {
  bool locked = false;
  if (wanted && tile.lane == slot % kTileLanes) {
    const Word word = word_at(unit, slot / kTileLanes);
    locked = atomicCAS(word_of_slot(line, slot), word, kLocked) == word;
  }
  return tile.ballot(locked);
}

// Votes. Count the outcomes of a warp's keys.
__device__ __forceinline__ void count_outcomes(const Table& table, Tile tile, Outcome outcome) {
  const Outcome said = tile.lane == 0 ? outcome : kDone;
  count_lanes(table, kRowsHeld, said == kInserted);
  count_lanes(table, kRowsInserted, said == kInserted);
  count_lanes(table, kRowsReplaced, said == kReplaced);
  count_lanes(table, kRefusedFirstMiss, said == kFirstMiss);
  count_lanes(table, kRefusedByCap, said == kBeyondCap);
  count_lanes(table, kRefusedByCounters, said == kAllInUse);
  count_lanes(table, kRefusedNoSlot, said == kNoSlot);
}

// New keys of a dynamic table; held keys keep their rows. policy.cuh decides which keys get a slot.
//
//   misses       uint32[N]   how often each key was missed since the last call, if `has_misses`; else once
//   salt, limit  see policy.cuh
extern "C" __global__ void __launch_bounds__(256)
    claim(const Table* tables, const i64* keys, u32 count, i64* numbers, const u32* misses, u32 has_misses, u64 salt,
          u64 limit) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const Candidate candidate(table, i < count ? keys[i] : kNoKey, i < count && has_misses ? misses[i] : 1, salt);
  const u32 line_number = chain_line(table, candidate.key, 0);
  Line* line = table.lines + line_number;
  Outcome outcome = is_holdable(candidate.key) ? kOpen : kDone;
  bool judged = false;
  i64 number = kNoRow;
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
    number = static_cast<i64>(line_number) * kLineKeys + slot;
    outcome = empty ? kInserted : kReplaced;
  }
  if (i < count && tile.lane == 0) numbers[i] = number;
  count_outcomes(table, tile, outcome);
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
  for (u32 step = 0; step < table.chain_lines && __any_sync(kAllLanes, walks); ++step) {
    const Unit unit = walks ? load_unit(table.lines + chain_line(table, key, step), tile) : Unit();
    const bool holds = slots_holding(tile, unit, static_cast<Word>(key));
    const u32 empty = slots_holding(tile, unit, kEmpty);
    const bool overflows = meta_of(tile, unit) & kOverflow;
    if (!walks) continue;
    place.held = holds;
    if (place.step == kMostChainLines && empty) place = {holds, step, unit, __ffs(empty) - 1u};
    walks = !holds && (overflows || place.step == kMostChainLines);
  }
  return place;
}

// New keys of a static table, which evicts nothing. Held keys keep their rows.
//
// At least 4 blocks: without a number the assembler aims at 8 and spills registers.
extern "C" __global__ void __launch_bounds__(256, 4)
    claim_static(const Table* tables, const i64* keys, u32 count, i64* numbers) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const i64 key = i < count ? keys[i] : kNoKey;
  Outcome outcome = is_holdable(key) ? kOpen : kDone;
  i64 number = kNoRow;
  while (__any_sync(kAllLanes, outcome == kOpen)) {
    const Place place = find_place(table, tile, key, outcome == kOpen);
    if (outcome == kOpen && place.held) outcome = kDone;
    if (outcome == kOpen && place.step == kMostChainLines) outcome = kNoSlot;
    const u32 line = chain_line(table, key, place.step);
    if (!lock_slot(tile, table.lines + line, place.unit, place.slot, outcome == kOpen)) continue;
    number = static_cast<i64>(line) * kLineKeys + place.slot;
    outcome = kInserted;
    // Before the key is published: a reader of a line without the key must know that the chain goes on.
    if (tile.lane == 0)
      for (u32 step = 0; step < place.step; ++step)
        atomicOr(meta_word(table.lines + chain_line(table, key, step)), kOverflow);
  }
  if (i < count && tile.lane == 0) numbers[i] = number;
  count_outcomes(table, tile, outcome);
}

// Held keys whose rows are overwritten: lock their own slots. Keys that are not held are ignored.
extern "C" __global__ void __launch_bounds__(256)
    claim_held(const Table* tables, const i64* keys, u32 count, i64* numbers) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const i64 key[1] = {i < count ? keys[i] : kNoKey};
  i64 row[1];
  find_rows<false>(table, tile, key, row);
  bool locked = false;
  if (row[0] != kNoRow && tile.lane == 0) {
    const Word word = static_cast<Word>(key[0]);
    locked = atomicCAS(word_of_slot(line_of_row(table, row[0]), slot_of_row(row[0])), word, kLocked) == word;
  }
  if (i < count && tile.lane == 0) numbers[i] = locked ? row[0] : kNoRow;
  count_lanes(table, kRowsUpdated, locked);
}
