// Bags of keys, and the part of a request that a block works on at a time.
//
// A request is one piece of memory with one upload: TableBags[T], perhaps dense features, which this file ignores, then
// the row_ptrs, keys and perhaps weights of all tables. Table t's keys are in bags: bag b has the table's keys
// row_ptrs[b] .. row_ptrs[b + 1] - 1. A table whose bags all have equally many keys has no row_ptrs. A request of single
// keys has only the keys.
//
// An item is up to kItemBags bags of one table. In the first launch they are neighbours; when bags are pooled again,
// they come from the list of incomplete bags. The items of all tables are numbered, and blocks take them in turns, so
// the grid may have any size. The host chooses the bags per item by the number of their keys. A block works on an
// item's keys in rounds of kRoundKeys; a bag may begin in one round and end in another.
#pragma once

#include "missing.cuh"

constexpr u32 kItemBags = 128;
constexpr u32 kRoundKeys = 256;
static_assert(kItemBags <= kBlockThreads && kRoundKeys <= kBlockThreads, "a thread per bag, and per key of a round");

enum Combiner { kSum, kMean, kSqrtN };

// One per table; gpu_cache/bag_layout.py writes it. Addresses are bytes from the start of the request.
struct __align__(16) TableBags {
  i64 row_ptrs_at;    // int32[bags + 1]; 0 or below: none, because every bag has -row_ptrs_at keys
  i64 keys_at;        // int64[keys]
  i64 weights_at;     // float32[keys], or 0: every weight is 1
  i64 first_float;    // of the table's pooled rows, float32[bags, D], in the output
  u32 bags;           // all in the first launch, then the bags to be pooled again
  u32 first_item;     // ascending by table
  u32 item_bags;      // bags per item, 1 to kItemBags
  u32 first_bag;      // of the table, among all tables' bags
  u32 first_position; // of the table's keys, among all tables' keys
  u32 keys;
  u32 combiner;
  float max_norm;     // rows with a larger L2 norm are scaled to it; 0: none
};
static_assert(sizeof(TableBags) == 64, "as gpu_cache/bag_layout.py has it");

// Where a table's missing keys are.
__device__ __forceinline__ Region region_of(const TableBags& table) {
  return {2 * table.first_position, 2 * table.keys};
}

// The position of each table's first key, and for T the number of positions.
struct FirstPositions {
  const TableBags* bags;
  u32 table_count;

  __device__ __forceinline__ u32 operator()(u32 t) const {
    return t < table_count ? bags[t].first_position : bags[t - 1].first_position + bags[t - 1].keys;
  }
};

// An item's bags, in shared memory.
struct Item {
  u32 count;
  u32 bags[kItemBags];    // number within the table
  u32 begins[kItemBags];  // number of the first key, within the table
  u32 ends[kItemBags];    // number of the item's keys up to the end of the bag
  u32 lacks[kItemBags];   // whether a key of the bag was missing

  __device__ __forceinline__ u32 begin_of(u32 bag) const { return bag ? ends[bag - 1] : 0; }
  __device__ __forceinline__ u32 keys() const { return ends[count - 1]; }

  // The bag that has key `i` of the item: the number of bags that end at or before the key.
  __device__ __forceinline__ u32 bag_of(u32 i) const {
    u32 low = 0, high = count;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (ends[middle] <= i)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

// The items of all tables up to this one.
__device__ __forceinline__ u32 count_items(const TableBags& table) {
  return table.first_item + (table.bags + table.item_bags - 1) / table.item_bags;
}

// Votes. The table of an item; see table_of_block.
__device__ __forceinline__ u32 table_of_item(const TableBags* bags, u32 table_count, u32 item) {
  u32 begun = 0;
  for (u32 t = 0; t < table_count; t += kWarp) {
    const u32 mine = t + lane_id();
    begun += __popc(__ballot_sync(kAllLanes, mine < table_count && __ldg(&bags[mine].first_item) <= item));
  }
  return begun - 1;
}

// The number of the first key of a bag, within the table.
__device__ __forceinline__ u32 first_key(const TableBags& table, const u8* request, u32 bag) {
  if (table.row_ptrs_at <= 0) return bag * static_cast<u32>(-table.row_ptrs_at);
  return __ldg(reinterpret_cast<const int*>(request + table.row_ptrs_at) + bag);
}

// By all threads of the block, at least kItemBags of them. Without a list, the item's bags are neighbours. Barriers.
__device__ __forceinline__ void read_item(const TableBags& table, const u8* request, const u32* listed, u32 number,
                                          Item& item) {
  const u32 first = (number - table.first_item) * table.item_bags, i = threadIdx.x;
  const u32 count = min(table.item_bags, table.bags - first);
  if (i < count) {
    const u32 bag = listed ? __ldcg(listed + first + i) : first + i;
    const u32 begin = first_key(table, request, bag), end = first_key(table, request, bag + 1);
    item.bags[i] = bag;
    item.begins[i] = begin;
    item.ends[i] = listed ? end - begin : end - first_key(table, request, first);
    item.lacks[i] = 0;
  }
  if (i == 0) item.count = count;
  __syncthreads();
  if (!listed) return;
  u32 end = 0;
  for (u32 before = 0; before <= i && i < count; ++before) end += item.ends[before];
  __syncthreads();
  if (i < count) item.ends[i] = end;
  __syncthreads();
}
