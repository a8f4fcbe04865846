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
// A key with a row is no longer absent (absent.cuh), whether it is stored or not.
//
// Launch: grid = N / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each key.
#include "claim.cuh"

// By one thread: the result of a key.
__device__ __forceinline__ void write_claim(const Table& table, i64 key, i64 row, i64* number) {
  *number = row;
  forget_absent(table, key);
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
  const Claim claim = claim_in_line(table, tile, candidate, limit, true);
  if (i < count && tile.lane == 0) write_claim(table, keys[i], claim.row, numbers + i);
  count_outcomes(table, tile, 0, claim.outcome);
}

// New keys of a static table, which evicts nothing. Held keys keep their rows.
//
// At least 4 blocks: without a number the assembler aims at 8 and spills registers.
extern "C" __global__ void __launch_bounds__(256, 4)
    claim_static(const Table* tables, const i64* keys, u32 count, i64* numbers) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const Claim claim = claim_in_chain(table, tile, i < count ? keys[i] : kNoKey, true);
  if (i < count && tile.lane == 0) write_claim(table, keys[i], claim.row, numbers + i);
  count_outcomes(table, tile, 0, claim.outcome);
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
  if (i < count && tile.lane == 0) write_claim(table, key[0], locked ? row[0] : kNoRow, numbers + i);
  count_lanes(table, kRowsUpdated, locked);
}

// Keys that no tier holds: they become absent keys (absent.cuh). All of it; there is no second half.
//
//   salt, limit  see policy.cuh
extern "C" __global__ void __launch_bounds__(256)
    claim_absent(const Table* tables, const i64* keys, u32 count, u64 salt, u64 limit) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const i64 key = i < count ? keys[i] : kNoKey;
  const Claim claim = claim_in_line(absent_table(table), tile, Candidate(table, key, 1, salt), limit, true);
  if (tile.lane == 0) publish_absent(table, key, claim);
}
