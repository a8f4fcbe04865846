// Look up the keys of all tables of a request in their caches, a row for each: as pool.cu, without bags.
//
//   lookup         every key of the request
//   lookup_again   the keys that were missing, from rows that the host fetched meanwhile
//
//   tables       Table[T]
//   bags         TableBags[T], the request's head (bags.cuh), where each key is a bag, without weights; for lookup_again
//                a second head with the number of listed keys
//   table_count  T
//   request      start of the addresses in the heads
//   out          float32; each table's rows float32[N, D] begin at TableBags::first_float, a multiple of 4
//   missing      MissingSet[1] (missing.cuh)
//   lacking      uint32; from TableBags::first_bag on, the numbers of the table's missing keys, in any order
//   listed       `lacking` of the launch before
//   staged       the rows that the host fetched, in float32
//   staged_at    uint32[M], by the number of a missing key: the place of its row in `staged`, in units of 16 bytes
//
// Launch: grid = any number of blocks up to the number of items, block = kBlockThreads; an item has kBlockKeys keys.
// Keys are found by tiles of 4 or 8 lanes, four keys at a time each; then the block's threads share the copying of
// rows.
//
// A row has the bits that its cache holds. A missing key has a row of the table's default value until it is looked up
// again. An absent key (absent.cuh) and a reserved key always have such a row, and are not listed. `lookup` counts found
// rows as used, and counts found, missed and absent keys; lookup_again asks no cache and counts nothing.
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
#include "find.cuh"
#include "gather.cuh"

constexpr u32 kBlockKeys = kBlockThreads / kTileLanes * kTileKeys;
static_assert(kBlockKeys <= kBlockThreads, "one thread per key lists the misses");

// In shared memory, so that values that are rarely needed take no registers.
struct Shared {
  Table table;
  TableBags bags;
  u32 table_number;
  u32 first, count;  // keys of the item, by number within the table
  i64 numbers[kBlockKeys];
  NewSlots fresh;
  u32 missed_keys;  // of the item
  u32 absent_keys;
  u32 place;        // of the item's first missing key in the table's list
  u32 has_missed;   // whether any item of the block missed a key
  Member member;
};

__device__ __forceinline__ const i64* keys_of(const TableBags& bags, const u8* request) {
  return reinterpret_cast<const i64*>(request + bags.keys_at);
}

// Read what the block needs of an item. Votes, barriers.
__device__ __forceinline__ void read_item(const Table* tables, const TableBags* bags, u32 table_count, u32 number,
                                          Shared& shared) {
  const u32 t = table_of_item(bags, table_count, number);
  if (threadIdx.x == 0) {
    shared.table = tables[t];
    shared.bags = bags[t];
    shared.table_number = t;
    shared.first = (number - shared.bags.first_item) * kBlockKeys;
    shared.count = min(shared.bags.keys - shared.first, kBlockKeys);
    shared.missed_keys = shared.absent_keys = shared.fresh.count = 0;
  }
  __syncthreads();
}

// List the item's missing keys. Called after a barrier; barriers.
__device__ __forceinline__ void list_lacking(const MissingSet& set, const u8* request, u32* lacking, Shared& shared) {
  const TableBags& bags = shared.bags;
  const u32 i = threadIdx.x;
  const i64 key = i < shared.count ? __ldg(keys_of(bags, request) + shared.first + i) : kNoKey;
  bool lacks = i < shared.count && shared.numbers[i] == kNoRow && !is_reserved(key);
  if (lacks && is_absent(shared.table, key)) {
    atomicAdd(&shared.absent_keys, 1u);
    lacks = false;
  }
  u32 place = 0;
  if (lacks) {
    place = atomicAdd(&shared.missed_keys, 1u);
    enter_missing(set, region_of(bags), key, bags.first_position + shared.first + i, shared.fresh);
  }
  __syncthreads();
  const u32 missed = shared.missed_keys;
  if (missed == 0) return;
  if (i == 0) {
    shared.has_missed = 1;
    MissingCounts* counts = global(set.counts) + shared.table_number;
    shared.place = atomicAdd(&counts->bags, missed);
    atomicAdd(&counts->keys, missed);
  }
  list_slots(set, shared.fresh);
  __syncthreads();
  if (lacks) lacking[bags.first_bag + shared.place + place] = shared.first + i;
}

extern "C" __global__ void __launch_bounds__(256, 3)
    lookup(const Table* tables, const TableBags* bags, u32 table_count, const u8* request, const MissingSet* missing,
           u32* lacking, float* out) {
  __shared__ Shared shared;
  const TableBags& last = bags[table_count - 1];  // read again for each item, because one more register would be spilled
  if (blockIdx.x >= max(count_items(last), 1u)) return;
  if (__ldcg(missing->progress + kSlotsListed) != 0) return;  // for the same reason as in pool
  if (threadIdx.x == 0) {
    shared.has_missed = 0;
    start_block(*missing->team);
  }
#pragma unroll 1
  for (u32 number = blockIdx.x; number < count_items(last); number += gridDim.x) {
    const Table& table = shared.table;
    read_item(tables, bags, table_count, number, shared);
    find_tile(table, keys_of(shared.bags, request) + shared.first, shared.count, shared.numbers);
    __syncthreads();
    with_form(table.form, [&](auto row) {
      gather_rows<decltype(row)>(table, shared.numbers, shared.count,
                                 out + shared.bags.first_float + static_cast<i64>(shared.first) * row.dim);
    });
    list_lacking(*missing, request, lacking, shared);
    if (threadIdx.x == 0) {
      const u32 absent = shared.absent_keys, missed = shared.missed_keys;
      count_keys(table, missing->counts[shared.table_number], shared.count - missed - absent, missed, absent);
    }
    __syncthreads();
  }
  const u32 blocks = max(min(count_items(last), gridDim.x), 1u);
  if (!stays_to_list(*missing, blocks, shared.has_missed, shared.member)) return;
  list_missing<kBlockThreads>(*missing, shared.member, table_count, FirstPositions{bags, table_count});
}

// Copy fetched rows to their places in the answer: row i, of key keys[i], comes from unit places[i] of `staged`.
template <class Row>
__device__ __forceinline__ void copy_rows(const u8* staged, const u32* places, const u32* keys, u32 count, float* out) {
  constexpr u32 quads = (Row::dim + 3) / 4;
  for (u32 pair = threadIdx.x; pair < count * quads; pair += kBlockThreads) {
    const u32 i = pair / quads, quad = pair % quads;
    const u8* at = staged + rows::kUnitBytes * (static_cast<i64>(places[i]) + quad);
    store_quad<Row::dim>(out + static_cast<i64>(keys[i]) * Row::dim, quad,
                         __ldcg(reinterpret_cast<const float4*>(at)));
  }
}

// At least 3 blocks: without a number the assembler aims at 4 and spills registers.
extern "C" __global__ void __launch_bounds__(256, 3)
    lookup_again(const Table* tables, const TableBags* bags, u32 table_count, const u8* request,
                 const MissingSet* missing, const u8* staged, const u32* staged_at, const u32* listed, float* out) {
  __shared__ u32 places[kBlockKeys], keys[kBlockKeys];
  const u32 item_count = count_items(bags[table_count - 1]);
#pragma unroll 1
  for (u32 number = blockIdx.x; number < item_count; number += gridDim.x) {
    const u32 t = table_of_item(bags, table_count, number);
    const TableBags& mine = bags[t];
    const u32 first = (number - mine.first_item) * kBlockKeys, count = min(mine.bags - first, kBlockKeys);
    if (threadIdx.x < count) {
      const u32 key = __ldcg(listed + mine.first_bag + first + threadIdx.x);
      keys[threadIdx.x] = key;
      places[threadIdx.x] =
          __ldg(staged_at + number_of(*missing, region_of(mine), __ldg(keys_of(mine, request) + key)));
    }
    __syncthreads();
    with_form(tables[t].form, [&](auto row) {
      copy_rows<decltype(row)>(staged, places, keys, count, out + mine.first_float);
    });
    __syncthreads();
  }
}
