// Find the rows of a block's keys.
#pragma once

#include "table.cuh"

constexpr u32 kTileKeys = 4;  // that a tile works on at a time

// Votes. Write the rows of the keys of the caller's tile into `numbers`. The block's tiles take kTileKeys keys each.
__device__ __forceinline__ void find_tile(const Table& table, const i64* keys, u32 count, i64* numbers) {
  const Tile tile;
  const u32 first = threadIdx.x / kTileLanes * kTileKeys;
  i64 mine[kTileKeys], found[kTileKeys];
#pragma unroll
  for (u32 k = 0; k < kTileKeys; ++k) mine[k] = first + k < count ? __ldg(keys + first + k) : kNoKey;
  find_rows(table, tile, mine, found);
  if (tile.lane == 0) {
#pragma unroll
    for (u32 k = 0; k < kTileKeys; ++k) numbers[first + k] = found[k];
  }
}
