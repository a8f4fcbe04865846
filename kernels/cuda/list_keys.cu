// List the keys that some lines of a table hold, in no particular order. Runs between writes, in parallel with queries.
//
//   table     Table[1]
//   keys      int64[lines * kLineKeys]   the first `listed` are the keys held
//   numbers   int64[lines * kLineKeys]   their row numbers
//   listed    uint32[1]                  must be 0 before
//
// Launch: grid = lines / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each line from
// `first_line` on.
#include "table.cuh"

extern "C" __global__ void __launch_bounds__(256)
    list_keys(const Table* table, u32 first_line, u32 lines, i64* keys, i64* numbers, u32* listed) {
  const Tile tile;
  const u32 i = tile_number();
  const u64 line = static_cast<u64>(first_line) + i;
  const Unit unit = i < lines ? load_unit(table->lines + line, tile) : Unit();
  const u32 without = slots_holding(tile, unit, kEmpty) | slots_holding(tile, unit, kLocked);
  const u32 held = i < lines ? kSlots & ~without : 0;
  u32 begin = 0;
  if (held && tile.lane == 0) begin = atomicAdd(listed, static_cast<u32>(__popc(held)));
  begin = tile.from(begin, 0);
#pragma unroll
  for (u32 k = 0; k < kUnitWords; ++k) {
    const u32 slot = k * kTileLanes + tile.lane;
    if (!(held >> slot & 1)) continue;
    const u32 at = begin + __popc(held & ((1u << slot) - 1));
    keys[at] = static_cast<i64>(static_cast<Key>(word_at(unit, k)));
    numbers[at] = static_cast<i64>(line * kLineKeys + slot);
  }
}
