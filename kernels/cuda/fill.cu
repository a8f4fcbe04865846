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
#include "table.cuh"

constexpr u32 kBlockThreads = 256;
constexpr u32 kBlockTiles = kBlockThreads / kTileLanes;

// At least 4 blocks: see claim_static.
extern "C" __global__ void __launch_bounds__(256, 4)
    fill(const Table* tables, const i64* keys, u32 count, const i64* numbers, const float* rows) {
  const Table table = *tables;
  const Tile tile;
  const u32 i = blockIdx.x * kBlockTiles + threadIdx.x / kTileLanes;
  const i64 number = i < count ? numbers[i] : kNoRow;
  const bool writes = number != kNoRow;
  bool fits = true;
  with_form(table.form, [&](auto form) {
    using Form = decltype(form);
    const float* row = rows + static_cast<i64>(writes ? i : 0) * Form::dim;
    rows::Parameters parameters;
    fits = Form::template measure<kTileLanes>(row, tile.lane, parameters);
    if (!writes || !fits) return;
    uint4* slab = reinterpret_cast<uint4*>(table.rows + number * Form::stride_bytes);
    for (u32 unit = tile.lane; unit < Form::units; unit += kTileLanes)
      __stcg(slab + unit, Form::encode(row, unit, parameters));
  });
  __syncwarp();     // all lanes have written their parts of the row,
  __threadfence();  // which are visible before the key, which one lane writes
  const bool unfit = writes && !fits;
  if (writes && tile.lane == 0) {
    const Word word = unfit ? kEmpty : static_cast<Word>(keys[i]);
    atomicExch(word_of_slot(line_of_row(table, number), slot_of_row(number)), word);
    if (unfit) atomicAdd(counter_at(table, kRowsHeld), ~0ull);  // minus one
  }
  count_lanes(table, kRowsUnfit, unfit && tile.lane == 0);
}
