// Erase keys of a table. Rows stay unchanged until their slots are claimed again, so a launch that found a row before
// may still read it. An absent key is no longer absent.
//
//   tables  Table[1]
//   keys    int64[N]    any; keys that are not held are ignored
//
// Launch: grid = N / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each key.
#include "absent.cuh"

extern "C" __global__ void __launch_bounds__(256) erase(const Table* tables, const i64* keys, u32 count) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const i64 key[1] = {i < count ? keys[i] : kNoKey};
  i64 row[1];
  find_rows<false>(table, tile, key, row);
  bool erased = false;
  if (row[0] != kNoRow && tile.lane == 0) {
    // Only once, even if a key is given twice.
    erased = free_slot(line_of_row(table, row[0]), slot_of_row(row[0]), static_cast<Word>(key[0]));
    if (erased) atomicAdd(counter_at(table, kRowsHeld), ~0ull);  // minus one
  }
  if (tile.lane == 0) forget_absent(table, key[0]);
  count_lanes(table, kRowsErased, erased);
}
