// A table: its lines, its rows, and the search for keys. All tables of a launch share the key type and the line.
//
// Row number n = line * kLineKeys + slot lies n * stride bytes into the slab. Its form is a type of rows.cuh:
//
//   rows::<row type><dim>      dim, stride_bytes, and how columns are read and written
//
// HOTROW_FORMS="FORM(0, fp32, 16) FORM(1, int8, 64)" gives the forms that a kernel is compiled for. A table has the
// number of its form, so a launch over tables of several dims branches once per block, and each dim is a constant.
// Kernels that touch no row are compiled without it.
//
// What `make check-nvrtc` compiles of the files that include this one and name nothing of their own. Their launches are
// of one form; here are several whose units have as many columns, since query.cu has its blocks by these:
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 1) FORM(1, fp32, 16) FORM(2, fp32, 33)
//   FORM(3, fp32, 128)"
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, int8, 17) FORM(1, int8, 128)
//   FORM(2, uint8, 10) FORM(3, uint8, 32) FORM(4, fp8, 7) FORM(5, fp8, 64)"
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=7 HOTROW_FORMS="FORM(0, fp16, 10) FORM(1, fp16, 64) FORM(2, bf16, 33)
//   FORM(3, bf16, 100)"
// Compiled with: HOTROW_KEY=u32 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, int8, 1) FORM(1, uint8, 17)
//   FORM(2, uint8, 64) FORM(3, fp8, 64) FORM(4, fp8, 130)"
#pragma once

#include "line.cuh"
#include "rows.cuh"

// The counters of a table, in the order of `Table::counters`.
enum Counter {
  kKeysFound,  // keys of queries, with duplicates
  kKeysMissed,
  kRowsHeld,           // rows there are now
  kRowsInserted,       // new keys that took an empty slot,
  kRowsReplaced,       // or another key's slot,
  kRefusedFirstMiss,   // or no slot: see policy.cuh
  kRefusedByCap,
  kRefusedByCounters,
  kRefusedNoSlot,      // in a static table whose lines for the key are full
  kRowsUnfit,          // rows with a value that the table's form cannot hold
  kRowsUpdated,
  kRowsErased,
  kAbsentKeys,     // there are now: absent.cuh
  kAbsentAnswers,  // keys of launches that were absent, with duplicates
  kCounters
};

// One per table, in device memory; describe.cu writes it. A kernel of one table first copies it to registers. Through a
// pointer, the fields would be read again after every access past L1, and one load would wait for the other.
struct __align__(64) Table {
  Line* lines;
  u8* rows;
  u64* counters;      // [kCounters]
  Line* absent_lines;
  u32 line_count;
  u32 absent_line_count;
  u32 form;           // number in HOTROW_FORMS
  u32 chain_lines;    // lines that a key may be in: 1, or kMostChainLines in static tables
  u32 seed;           // of the hash
  float default_value;
  u32 unused[2];
};
static_assert(sizeof(Table) == 64, "TABLE_BYTES of gpu_cache/layout.py");

__device__ __forceinline__ u64* counter_at(const Table& table, Counter counter) {
  return global(table.counters) + counter;
}

constexpr u32 kMostChainLines = 16;  // enough for a key to find a slot when four fifths of all slots are taken
constexpr i64 kNoRow = -1;
constexpr i64 kNoKey = -0x7fffffffffffffffll - 1;  // in no line: a tile with fewer keys asks for it

__device__ __forceinline__ u64 hash_of(const Table& table, i64 key, u32 i) {
  return mix(static_cast<u64>(key) + (static_cast<u64>(table.seed) << 32 | i) * 0x9e3779b97f4a7c15ull);
}

// Line `i` of the key's chain: the high half of the hash, as a fraction, times the number of lines, which may be any.
__device__ __forceinline__ u32 chain_line(const Table& table, i64 key, u32 i) {
  return __umulhi(static_cast<u32>(hash_of(table, key, i) >> 32), table.line_count);
}

// The line and the slot of a row's key.
__device__ __forceinline__ Line* line_of_row(const Table& table, i64 row) { return table.lines + row / kLineKeys; }
__device__ __forceinline__ u32 slot_of_row(i64 row) { return static_cast<u32>(row % kLineKeys); }

// Votes. Add the number of lanes with a true vote.
__device__ __forceinline__ void count_lanes(const Table& table, Counter counter, bool vote) {
  const u32 votes = __popc(__ballot_sync(kAllLanes, vote));
  if (votes && lane_id() == 0) atomicAdd(counter_at(table, counter), static_cast<u64>(votes));
}

#ifdef HOTROW_FORMS
// Call `use` with a value of the form's type.
template <class Use>
__device__ __forceinline__ void with_form(u32 form, Use use) {
#define FORM(number, type, dim) \
  case number: use(rows::type<dim>()); break;
  switch (form) { HOTROW_FORMS }
#undef FORM
}

// The maximum over all forms that the kernel is compiled for.
constexpr u32 most_unit_columns() {
  u32 most = 0;
#define FORM(number, type, dim) \
  if (rows::type<dim>::unit_columns > most) most = rows::type<dim>::unit_columns;
  HOTROW_FORMS
#undef FORM
  return most;
}
#endif

// Votes. The table that a block works for, if `first_blocks[t]`, ascending, is the first block of table t. The lanes of
// a warp count the tables that begin at or before the block.
__device__ __forceinline__ u32 table_of_block(const u32* first_blocks, u32 table_count) {
  u32 begun = 0;
  for (u32 t = 0; t < table_count; t += kWarp) {
    const u32 mine = t + lane_id();
    begun += __popc(__ballot_sync(kAllLanes, mine < table_count && __ldg(first_blocks + mine) <= blockIdx.x));
  }
  return begun - 1;
}

// Votes. The row of a key that its first line does not hold. Searches the next lines of the chain while lines overflow.
__device__ __forceinline__ i64 find_in_chain(const Table& table, Tile tile, i64 key, bool overflows) {
  i64 row = kNoRow;
  for (u32 i = 1; i < table.chain_lines && __any_sync(kAllLanes, overflows); ++i) {
    const u32 line = chain_line(table, key, i);
    const Unit unit = overflows ? load_unit(table.lines + line, tile) : Unit();
    const u32 slots = slots_holding(tile, unit, static_cast<Word>(key));
    const bool goes_on = meta_of(tile, unit) & kOverflow;
    if (overflows && slots) row = static_cast<i64>(line) * kLineKeys + __ffs(slots) - 1;
    overflows = overflows && !slots && goes_on;
  }
  return row;
}

// Votes. The row numbers of a tile's keys, kNoRow for keys that are not held. All lanes of a tile pass the same keys
// and get the same rows. All lines are loaded before the first is examined. If the caller is a reader, found rows count
// as used, except in static tables, which evict nothing.
template <bool kIsReader = true, u32 kKeys>
__device__ __forceinline__ void find_rows(const Table& table, Tile tile, const i64 (&keys)[kKeys], i64 (&rows)[kKeys]) {
  u32 lines[kKeys];
  Unit units[kKeys];
#pragma unroll
  for (u32 k = 0; k < kKeys; ++k) {
    lines[k] = chain_line(table, keys[k], 0);
    units[k] = is_holdable(keys[k]) ? load_unit(table.lines + lines[k], tile) : Unit();
  }
#pragma unroll
  for (u32 k = 0; k < kKeys; ++k) {
    const bool holdable = is_holdable(keys[k]);
    const u32 slots = slots_holding(tile, units[k], static_cast<Word>(keys[k]));
    const u32 slot = __ffs(slots) - 1;
    const bool found = holdable && slots;
    rows[k] = found ? static_cast<i64>(lines[k]) * kLineKeys + slot : kNoRow;
    if (table.chain_lines > 1) {
      const bool overflows = meta_of(tile, units[k]) & kOverflow;
      const i64 row = find_in_chain(table, tile, keys[k], overflows && holdable && !found);
      if (!found) rows[k] = row;
    } else if (kIsReader && found && tile.lane == kTileLanes - 1) {  // the lane that has the meta word
      count_use(table.lines + lines[k], word_at(units[k], kUnitWords - 1), slot);
    }
  }
}
