// Insert the rows that a request missed into the caches of all its tables, from where the request has them on the
// device: the keys in its set of missing keys (missing.cuh), the rows in its staging memory.
//
//   claim_missing   lock slots: the first half, as in claim.cu
//   fill_staged     rows, then keys: the second half, as in fill.cu
//
//   tables       Table[T], of distinct caches
//   bags         TableBags[T], the request's head (bags.cuh)
//   table_count  T
//   missing      MissingSet[1]
//   count        M, the missing keys whose rows were fetched: the first M of `used`, with the numbers 0 .. M - 1
//   misses       uint32[M], by number: how often the key was missed, or 0 to leave it out. The bit kAbsent says that no
//                tier holds the key. It becomes an absent key (absent.cuh), by the policy of dynamic tables
//   limits       uint64[T, 2], for rows and for absent keys; salt, limits: see policy.cuh
//   rows         int64[M], by place in `used`: the row of the slot that was locked for the key, or kNoRow
//   staged       the rows that the host fetched, in float32
//   staged_at    uint32[M], by number: the place of the key's row in `staged`, in units of 16 bytes
//
// Launch: grid = M / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each key.
//
// A launch is compiled for the forms of all tables of a model, so here for many at once:
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 16) FORM(1, fp32, 33)
//   FORM(2, fp32, 128) FORM(3, fp16, 10) FORM(4, fp16, 64) FORM(5, bf16, 100) FORM(6, int8, 17) FORM(7, uint8, 10)
//   FORM(8, fp8, 64)"
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=7 HOTROW_FORMS="FORM(0, fp32, 1) FORM(1, fp32, 64) FORM(2, fp16, 7)
//   FORM(3, bf16, 33) FORM(4, bf16, 64) FORM(5, int8, 64) FORM(6, uint8, 130) FORM(7, fp8, 10)"
// Compiled with: HOTROW_KEY=u32 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 32) FORM(1, fp16, 100)
//   FORM(2, bf16, 10) FORM(3, int8, 1) FORM(4, uint8, 32) FORM(5, uint8, 64) FORM(6, fp8, 33)"
#include "bags.cuh"
#include "claim.cuh"
#include "fill.cuh"

constexpr u32 kAbsent = 1u << 31;

// A missing key of the request. Tiles without a key have number 0 of table 0, so that all tiles may read.
struct Missed {
  i64 key;
  u32 number;
  u32 table;
};

// The table of a slot of the set: the last table that begins at or before it.
__device__ __forceinline__ u32 table_of_slot(const TableBags* bags, u32 table_count, u32 slot) {
  u32 low = 0, high = table_count;  // the answer is in low .. high - 1
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (region_of(bags[middle]).first <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ Missed missed_key(const TableBags* bags, u32 table_count, const MissingSet& set, u32 i,
                                             bool is_real) {
  if (!is_real) return {kNoKey, 0, 0};
  const u32 slot = set.used[i];
  return {set.slots[slot].key, set.slots[slot].number, table_of_slot(bags, table_count, slot)};
}

extern "C" __global__ void __launch_bounds__(256, 4)
    claim_missing(const Table* tables, const TableBags* bags, u32 table_count, const MissingSet* missing, u32 count,
                  const u32* misses, const u64* limits, u64 salt, i64* rows) {
  const Tile tile;
  const u32 i = tile_number();
  const Missed missed = missed_key(bags, table_count, *missing, i, i < count);
  const Table table = tables[missed.table];
  const u32 given = i < count ? misses[missed.number] : 0, times = given & ~kAbsent;
  const bool absent = given & kAbsent, chained = !absent && table.chain_lines > 1;
  const Candidate candidate(table, missed.key, times, salt);
  const u64 limit = limits[2 * missed.table + absent];
  const Claim in_line = claim_in_line(absent ? absent_table(table) : table, tile, candidate, limit, times && !chained);
  const Claim in_chain = claim_in_chain(table, tile, missed.key, times && chained);
  const Claim claim = chained ? in_chain : in_line;
  count_outcomes(table, tile, missed.table, absent ? kDone : claim.outcome);
  if (i >= count || tile.lane != 0) return;
  rows[i] = absent ? kNoRow : claim.row;
  if (absent)
    publish_absent(table, missed.key, claim);
  else if (times)
    forget_absent(table, missed.key);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    fill_staged(const Table* tables, const TableBags* bags, u32 table_count, const MissingSet* missing, u32 count,
                const u8* staged, const u32* staged_at, const i64* rows) {
  const Tile tile;
  const u32 i = tile_number();
  const i64 number = i < count ? rows[i] : kNoRow;
  const bool writes = number != kNoRow;
  const Missed missed = missed_key(bags, table_count, *missing, i, writes);
  const Table table = tables[missed.table];
  const u32 at = staged_at[missed.number];
  // The tiles of a warp vote together, so they take one form after another. A tile of another form reads the first
  // row of this form, because a row of its own may be shorter.
  for (u32 left = __ballot_sync(kAllLanes, writes); left;) {
    const u32 form = __shfl_sync(kAllLanes, table.form, __ffs(left) - 1);
    const u32 first = __shfl_sync(kAllLanes, at, __ffs(left) - 1);
    const bool takes_part = writes && table.form == form;
    const u8* row = staged + rows::kUnitBytes * static_cast<i64>(takes_part ? at : first);
    with_form(form, [&](auto of_rows) {
      fill_slot<decltype(of_rows)>(table, tile, missed.key, number, reinterpret_cast<const float*>(row), takes_part);
    });
    left &= ~__ballot_sync(kAllLanes, takes_part);
  }
}
