// Fill the row of a slot that was locked, then its key: what fill.cu and insert.cu share.
#pragma once

#include "table.cuh"

// Votes. Write `row`, float32[D], into the caller's tile's slot `number` of the table and publish the key, if `writes`.
// If the form cannot hold the row, free the slot instead. All tiles of the warp pass the same form.
template <class Form>
__device__ __forceinline__ void fill_slot(const Table& table, Tile tile, i64 key, i64 number, const float* row,
                                          bool writes) {
  rows::Parameters parameters;
  const bool fits = Form::template measure<kTileLanes>(row, tile.lane, parameters);
  if (writes && fits) {
    uint4* slab = reinterpret_cast<uint4*>(table.rows + number * Form::stride_bytes);
    for (u32 unit = tile.lane; unit < Form::units; unit += kTileLanes)
      __stcg(slab + unit, Form::encode(row, unit, parameters));
  }
  __syncwarp();     // all lanes have written their parts of the row,
  __threadfence();  // which are visible before the key, which one lane writes
  if (!writes || tile.lane != 0) return;
  atomicExch(word_of_slot(line_of_row(table, number), slot_of_row(number)), fits ? static_cast<Word>(key) : kEmpty);
  if (fits) return;
  atomicAdd(counter_at(table, kRowsHeld), ~0ull);  // minus one
  atomicAdd(counter_at(table, kRowsUnfit), 1ull);
}
