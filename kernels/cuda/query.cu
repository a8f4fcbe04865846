// Look up the rows of keys in a table.
//
//   tables              Table[1]
//   keys                int64[N]     any order, duplicates allowed; a key that no line can hold is a miss
//   out                 float32[N, D]  row of each key; for a missing key, the table's default value
//   missing_keys        int64[N]     the first M are the missing keys, with duplicates; blocks in any order
//   missing_positions   int32[N]     the position of each missing key in `keys`
//   progress            uint64[1]    misses so far and, in the upper half, how many blocks have counted theirs: 0 before
//                                    the first launch and again after each
//   missing_count       int32[1]     M, written by the last block; may be the host's memory
//
// Launch: grid = N / kBlockKeys rounded up, block = kBlockThreads. Keys are found by tiles of 4 or 8 lanes, four keys
// at a time each; then the block's threads share the copying of all rows found.
//
// Readers take no lock. The order on streams protects them from writers: see gpu_cache/readers.py.
#include "find.cuh"
#include "gather.cuh"

constexpr u32 kBlockKeys = kBlockThreads / kTileLanes * kTileKeys;
constexpr u32 kBlockWarps = kBlockThreads / kWarp;
static_assert(kBlockKeys <= kBlockThreads, "one thread per key lists the misses");

__device__ __forceinline__ u32 sum_of(const u32* values, u32 count) {
  u32 sum = 0;
  for (u32 i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// By one thread of each block: count the block's hits and misses. Returns the former value of `progress`: the misses of
// the blocks that counted before, which are listed before this block's misses, and the number of those blocks. One
// atomic has both, so that no fence must order two.
__device__ __forceinline__ u64 count_block(const Table& table, u32 hits, u32 misses, u64* progress) {
  atomicAdd(counter_at(table, kKeysFound), u64(hits));
  if (misses) atomicAdd(counter_at(table, kKeysMissed), u64(misses));
  return atomicAdd(progress, u64(1) << 32 | misses);
}

// Blocks that a multiprocessor shall hold: as many as the registers for the units being loaded allow. Without a number
// the assembler aims higher and spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // these need a few more registers
constexpr u32 kMostBlocks = 4;
#else
constexpr u32 kMostBlocks = 5;
#endif
constexpr u32 kBlocks = most_unit_columns() == 4 ? kMostBlocks : most_unit_columns() == 8 ? 4 : 3;

extern "C" __global__ void __launch_bounds__(256, kBlocks)
    query(const Table* tables, const i64* keys, u32 count, float* out, i64* missing_keys, int* missing_positions,
          u64* progress, int* missing_count) {
  __shared__ i64 numbers[kBlockKeys];
  __shared__ u32 warp_misses[kBlockWarps];
  __shared__ u32 begin;  // of the block's misses in the list
  const u32 i = threadIdx.x, warp = i / kWarp;
  const u32 first = blockIdx.x * kBlockKeys;
  const u32 mine = min(count - first, kBlockKeys);
  const Table table = *tables;
  find_tile(table, keys + first, mine, numbers);
  __syncthreads();
  const bool missing = i < mine && numbers[i] == kNoRow;
  const u32 votes = __ballot_sync(kAllLanes, missing);
  if (lane_id() == 0) warp_misses[warp] = __popc(votes);
  __syncthreads();
  const u32 misses = sum_of(warp_misses, kBlockWarps);
  // Queued here and read after the rows: copying them hides the latency of the atomic.
  const u64 before = i == 0 ? count_block(table, mine - misses, misses, progress) : 0;
  with_form(table.form, [&](auto row) {
    gather_rows<decltype(row)>(table, numbers, mine, out + static_cast<i64>(first) * row.dim);
  });
  if (i == 0) {
    begin = static_cast<u32>(before);
    if ((before >> 32) + 1 == gridDim.x) {  // all blocks have counted
      *missing_count = static_cast<int>(begin + misses);
      atomicExch(progress, u64(0));
    }
  }
  if (misses == 0) return;
  __syncthreads();
  if (!missing) return;
  const u32 at = begin + sum_of(warp_misses, warp) + __popc(votes & ((1u << lane_id()) - 1));
  missing_keys[at] = keys[first + i];
  missing_positions[at] = static_cast<int>(first + i);
}
