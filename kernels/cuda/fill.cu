// The second half of a write: fill the rows of the slots that claim.cu locked, then the keys, so that readers find
// them.
//
//   tables    Table[1]
//   keys      int64[N]         as in the first half
//   numbers   int64[N]         from the first half
//   rows      float32[N, D]    row of each key
//
// If the table's form cannot hold a row, its slot is freed instead.
//
// Launch: grid = N / kBlockTiles rounded up, block = kBlockThreads; a tile of 4 or 8 lanes for each key.
#include "fill.cuh"

// At least 4 blocks: see claim_static.
extern "C" __global__ void __launch_bounds__(256, 4)
    fill(const Table* tables, const i64* keys, u32 count, const i64* numbers, const float* rows) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = tile_number();
  const i64 number = i < count ? numbers[i] : kNoRow;
  const bool writes = number != kNoRow;
  with_form(table.form, [&](auto form) {
    using Form = decltype(form);
    const u32 at = writes ? i : 0;
    fill_slot<Form>(table, tile, keys[at], number, rows + static_cast<i64>(at) * Form::dim, writes);
  });
}
