// Look up the bags of all tables of a request in their caches and pool each bag's rows into one.
//
//   pool               every bag of the request
//   pool_again         the bags with a missing key, from the caches and from rows that the host fetched meanwhile
//   forget             empties the set of missing keys before the next request
//   describe_missing   sets it up
//
//   tables       Table[T]
//   bags         TableBags[T], the request's head (bags.cuh); for pool_again a second head with the listed bags' number
//   table_count  T
//   request      start of the addresses in the heads
//   out          float32; each table's pooled rows float32[B, S, D] begin at TableBags::first_float, a multiple of 4
//   missing      MissingSet[1] (missing.cuh)
//   lacking      uint32; from TableBags::first_bag on, the table's bags with a missing key, in any order
//   listed       `lacking` of the launch before: the bags to be pooled again
//   staged       the rows that the host fetched, in float32
//   staged_at    uint32[M], by the number of a missing key: the place of its row in `staged`, in units of 16 bytes
//
// Launch: grid = any number of blocks, block = kBlockThreads; blocks beyond the number of items do nothing.
//
// If `pool` listed missing keys of a request, its next launch for the same request does nothing, because pool_again
// pools the incomplete bags. So one graph of `pool` and of the work that reads the rows may run again after pool_again.
//
// A bag's row is the sum, in key order, of its rows times their weights, each operation rounded to float32 and none
// fused. The mean divides the sum by the sum of the weights, sqrtn by the square root of the sum of their squares, also
// summed in key order; if the divisor is 0, the row is 0. The host's loops (kernels/host/lookup_loops.inl) have the
// same bits. A row whose norm is above max_norm is first scaled by max_norm / |row|, as TensorFlow's clip_by_norm does.
// Squares are summed by lane (parts l, l + 8, ... of the row; see Part), then across lanes.
//
// A missing key counts as a row of the table's default value until its bag is pooled again. An absent key (absent.cuh)
// and a reserved key always do, and are not listed. `pool` counts found rows as used, and counts found, missed and
// absent keys; pool_again counts nothing.
//
// How a block works: tiles of lanes find the rows of 256 keys, several at a time each. Then all threads share the (bag,
// part of a row) pairs, so every thread has work at any D. If a round has few long bags, all threads load their rows.
//
// A launch is compiled for the forms of all tables of a model, so here for many at once:
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 16) FORM(1, fp32, 33)
//   FORM(2, fp32, 128) FORM(3, fp16, 10) FORM(4, fp16, 64) FORM(5, bf16, 100) FORM(6, int8, 17) FORM(7, uint8, 10)
//   FORM(8, fp8, 64)"
// Compiled with: HOTROW_KEY=i64 HOTROW_LINE_KEYS=7 HOTROW_FORMS="FORM(0, fp32, 1) FORM(1, fp32, 64) FORM(2, fp16, 7)
//   FORM(3, bf16, 33) FORM(4, bf16, 64) FORM(5, int8, 64) FORM(6, uint8, 130) FORM(7, fp8, 10)"
// Compiled with: HOTROW_KEY=u32 HOTROW_LINE_KEYS=15 HOTROW_FORMS="FORM(0, fp32, 32) FORM(1, fp16, 100)
//   FORM(2, bf16, 10) FORM(3, int8, 1) FORM(4, uint8, 32) FORM(5, uint8, 64) FORM(6, fp8, 33)"
#include "part_sum.cuh"

constexpr u32 kTileKeys = 4;
constexpr u32 kLongBag = 16;  // keys of a round's average bag
constexpr u32 kFoundAtOnce = kBlockThreads / kTileLanes * kTileKeys;

// In shared memory, so that values that are rarely needed take no registers.
struct Shared {
  uint4 loaded[kLoadedUnits];
  Table table;
  TableBags bags;
  MissingSet set;
  Item item;
  Round round;
  float begun_totals[2];  // weights so far of the bag that goes on in the next round, in alternation
  u32 missed_keys;        // of the item
  u32 absent_keys;
  u32 lacking_bags;
  NewSlots fresh;         // of the round
  u32 first;              // place of the item's first bag in the list of all blocks
  u32 has_missed;         // whether any item of the block missed a key
  Member member;
};

// Read the round's keys and weights, one key per thread. Returns the number of the caller's key in its table.
__device__ __forceinline__ u32 read_round(const TableBags& bags, const u8* request, bool is_again, Shared& shared) {
  Round& round = shared.round;
  const u32 i = round.begin + threadIdx.x;
  if (i >= round.end) return 0;
  const u32 bag = is_again ? shared.item.bag_of(i) : 0;
  const u32 place = shared.item.begins[bag] + i - shared.item.begin_of(bag);
  round.keys[threadIdx.x] = __ldg(reinterpret_cast<const i64*>(request + bags.keys_at) + place);
  round.weights[threadIdx.x] =
      bags.weights_at ? __ldg(reinterpret_cast<const float*>(request + bags.weights_at) + place) : 1.0f;
  return place;
}

// Find the rows of the round's keys.
template <bool kIsReader>
__device__ __forceinline__ void find_round(const Table& table, Round& round) {
  const Tile tile;
  const u32 count = round.end - round.begin;
#pragma unroll 1
  for (u32 first = threadIdx.x / kTileLanes * kTileKeys; first < kRoundKeys; first += kFoundAtOnce) {
    if (first - threadIdx.x / kTileLanes * kTileKeys >= count) break;  // the same in all tiles: they vote
    i64 keys[kTileKeys], found[kTileKeys];
#pragma unroll
    for (u32 k = 0; k < kTileKeys; ++k) keys[k] = first + k < count ? round.keys[first + k] : kNoKey;
    find_rows<kIsReader>(table, tile, keys, found);
    if (tile.lane == 0) {
#pragma unroll
      for (u32 k = 0; k < kTileKeys; ++k) round.rows[first + k] = found[k];
    }
  }
}

// If the caller's key of the round is missing, enter it in the set, or find its fetched row.
template <bool kAgain>
__device__ __forceinline__ void miss(const Table& table, const TableBags& bags, u32 place, Shared& shared) {
  Round& round = shared.round;
  const u32 i = round.begin + threadIdx.x;
  if (i >= round.end || round.rows[threadIdx.x] != kNoRow) return;
  const i64 key = round.keys[threadIdx.x];
  if (is_reserved(key)) return;
  const Region region = region_of(bags);
  if (kAgain) {
    const u32 number = number_of(shared.set, region, key);
    if (number < kUnlisted) {
      round.rows[threadIdx.x] = staged_row(number);
      return;
    }
  }
  if (is_absent(table, key)) {
    atomicAdd(&shared.absent_keys, 1u);
    return;
  }
  atomicAdd(&shared.missed_keys, 1u);
  atomicOr(&shared.item.lacks[shared.item.bag_of(i)], 1u);
  enter_missing(shared.set, region, key, bags.first_position + place, shared.fresh);
}

// A bag's part of the round: the columns that one thread sums.
template <class Row>
struct Share {
  u32 part, begin, end;  // the bag's keys by number within the item
  float* row;

  __device__ __forceinline__ Share(const TableBags& bags, const Item& item, u32 first_bag, u32 pair, float* out) {
    const u32 bag = first_bag + pair / Part<Row>::count;
    part = pair % Part<Row>::count;
    begin = item.begin_of(bag);
    end = item.ends[bag];
    row = out + bags.first_float + static_cast<i64>(item.bags[bag]) * Row::dim;
  }

  // The bag's keys of the round, by number within the round.
  __device__ __forceinline__ u32 from(const Round& round) const { return max(begin, round.begin) - round.begin; }
  __device__ __forceinline__ u32 to(const Round& round) const { return min(end, round.end) - round.begin; }

  __device__ __forceinline__ PartSum<Row> resume(const Shared& shared) const {
    PartSum<Row> sum = {};
    const u32 turn = shared.round.begin / kRoundKeys % 2;
    if (begin < shared.round.begin) sum.resume(row, part, shared.begun_totals[turn]);
    return sum;
  }

  __device__ __forceinline__ void store(const TableBags& bags, PartSum<Row>& sum, Shared& shared) const {
    const u32 turn = shared.round.begin / kRoundKeys % 2;
    if (end <= shared.round.end)
      sum.divide(bags, end - begin);
    else if (part == 0)
      shared.begun_totals[1 - turn] = sum.total;
    Part<Row>::store(row, part, sum.columns);
  }
};

// Pool a round of few long bags, whose sums keep few threads busy: all threads load the rows into shared memory, and
// those with a share sum them from there, in the same order. Between barriers; barriers.
template <class Row>
__device__ __forceinline__ void pool_long_bags(const Table& table, const TableBags& bags, const Staged& staged,
                                               Shared& shared, u32 first_bag, u32 pairs, float* out) {
  constexpr u32 kRows = kLoadedUnits / Row::units;
  const Round& round = shared.round;
  const u32 keys = round.end - round.begin;
  const bool sums = threadIdx.x < pairs;
  const Share<Row> share(bags, shared.item, first_bag, sums ? threadIdx.x : 0, out);
  PartSum<Row> sum = share.resume(shared);
#pragma unroll 1
  for (u32 first = 0; first < keys; first += kRows) {
    const u32 end = min(first + kRows, keys);
    __syncthreads();
    load_rows<Row>(table, round, first, end, shared.loaded);
    __syncthreads();
    if (sums)
      sum.add_loaded_rows(table, bags, round, staged, shared.loaded, first, max(share.from(round), first),
                          min(share.to(round), end), share.part);
  }
  if (sums) share.store(bags, sum, shared);
}

// Pool the round's keys. Bags that end in the round are finished; a bag that goes on leaves its sums in `out`. Between
// barriers.
template <class Row>
__device__ __forceinline__ void pool_round(const Table& table, const TableBags& bags, const Staged& staged,
                                           Shared& shared, u32 first_bag, float* out) {
  const Item& item = shared.item;
  const Round& round = shared.round;
  const u32 ended = item.bag_of(round.end), last = ended < item.count ? ended : item.count - 1;
  const u32 count = last + 1 - first_bag, pairs = count * Part<Row>::count;
  if constexpr (Row::units * kLongBag <= kLoadedUnits) {
    if (pairs <= kBlockThreads / 4 && round.end - round.begin >= count * kLongBag) {
      pool_long_bags<Row>(table, bags, staged, shared, first_bag, pairs, out);
      return;
    }
  }
#pragma unroll 1
  for (u32 pair = threadIdx.x; pair < pairs; pair += kBlockThreads) {
    const Share<Row> share(bags, item, first_bag, pair, out);
    PartSum<Row> sum = share.resume(shared);
    sum.add_rows(table, bags, round, staged, share.from(round), share.to(round), share.part);
    share.store(bags, sum, shared);
  }
}

__device__ __forceinline__ void pool_found(const Table& table, const TableBags& bags, const Staged& staged,
                                           Shared& shared, u32 first_bag, float* out) {
  with_form(table.form, [&](auto row) {
    using Row = decltype(row);
    if (bags.max_norm > 0.0f) {
      measure_norms<Row>(table, bags.max_norm, staged, shared.round);
      __syncthreads();
    }
    pool_round<Row>(table, bags, staged, shared, first_bag, out);
  });
}

// List the item's bags with a missing key, and count the missing keys. Between barriers.
__device__ __forceinline__ void list_bags(const TableBags& bags, MissingCounts* counts, Shared& shared, u32* lacking) {
  if (shared.missed_keys == 0) return;
  Item& item = shared.item;
  u32 place = 0;
  const bool lacks = threadIdx.x < item.count && item.lacks[threadIdx.x];
  if (lacks) place = atomicAdd(&shared.lacking_bags, 1u);
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.has_missed = 1;
    shared.first = atomicAdd(&global(counts)->bags, shared.lacking_bags);
    atomicAdd(&global(counts)->keys, shared.missed_keys);
  }
  __syncthreads();
  if (lacks) lacking[bags.first_bag + shared.first + place] = item.bags[threadIdx.x];
}

template <bool kAgain>
__device__ __forceinline__ void pool_item(const Table& table, const TableBags& bags, const u8* request,
                                          const MissingSet& set, const Staged& staged, Shared& shared,
                                          float* out) {
  Round& round = shared.round;
  const u32 keys = shared.item.keys();
  u32 first_bag = 0, begin = 0;
  do {
    if (threadIdx.x == 0) {
      round.begin = begin;
      round.end = min(begin + kRoundKeys, keys);
      shared.fresh.count = 0;
    }
    __syncthreads();
    const u32 place = read_round(bags, request, kAgain, shared);
    __syncthreads();
    find_round<!kAgain>(table, round);
    __syncthreads();
    miss<kAgain>(table, bags, place, shared);
    __syncthreads();
    list_slots(shared.set, shared.fresh);
    pool_found(table, bags, staged, shared, first_bag, out);
    first_bag = shared.item.bag_of(round.end);
    begin += kRoundKeys;
    __syncthreads();
  } while (begin < keys);
}

template <bool kAgain>
__device__ __forceinline__ void pool_items(const Table* tables, const TableBags* bags, u32 table_count,
                                           const u8* request, const MissingSet& missing, const Staged& staged,
                                           const u32* listed, u32* lacking, float* out) {
  __shared__ Shared shared;
  const MissingSet& set = shared.set;
  const u32 item_count = count_items(bags[table_count - 1]);
  const u32 blocks = max(min(item_count, gridDim.x), 1u);  // a graph's grid is larger than most requests
  if (blockIdx.x >= blocks) return;
  // All these blocks read the same value, because it is written when all of them are done.
  if (!kAgain && __ldcg(missing.progress + kSlotsListed) != 0) return;
  if (threadIdx.x == 0) {
    shared.set = missing;
    shared.has_missed = 0;
    start_block(*missing.team);
  }
#pragma unroll 1
  for (u32 number = blockIdx.x; number < item_count; number += gridDim.x) {
    const u32 t = table_of_item(bags, table_count, number);
    const Table& table = shared.table;
    const TableBags& mine = shared.bags;
    if (threadIdx.x == 0) {
      shared.table = tables[t];
      shared.bags = bags[t];
      shared.missed_keys = shared.absent_keys = shared.lacking_bags = 0;
    }
    __syncthreads();
    read_item(mine, request, listed ? listed + mine.first_bag : nullptr, number, shared.item);
    pool_item<kAgain>(table, mine, request, set, staged, shared, out);
    list_bags(mine, set.counts + t, shared, lacking);
    if (!kAgain && threadIdx.x == 0) {
      const u32 absent = shared.absent_keys, missed = shared.missed_keys;
      count_keys(table, set.counts[t], shared.item.keys() - missed - absent, missed, absent);
    }
    __syncthreads();
  }
  if (!stays_to_list(missing, blocks, shared.has_missed, shared.member)) return;
  list_missing<kBlockThreads>(set, shared.member, table_count, FirstPositions{bags, table_count});
}

extern "C" __global__ void __launch_bounds__(256, 3)
    pool(const Table* tables, const TableBags* bags, u32 table_count, const u8* request, const MissingSet* missing,
         u32* lacking, float* out) {
  pool_items<false>(tables, bags, table_count, request, *missing, {}, nullptr, lacking, out);
}

extern "C" __global__ void __launch_bounds__(256, 3)
    pool_again(const Table* tables, const TableBags* bags, u32 table_count, const u8* request,
               const MissingSet* missing,
               const u8* staged, const u32* staged_at, const u32* listed, u32* lacking, float* out) {
  pool_items<true>(tables, bags, table_count, request, *missing, {staged, staged_at}, listed, lacking, out);
}

// Launch: grid = any number of blocks, block = kBlockThreads.
extern "C" __global__ void __launch_bounds__(256) forget(const MissingSet* missing) {
  const MissingSet& set = *missing;
  const u32 used = __ldcg(set.progress + kSlotsUsed);
  for (u32 i = blockIdx.x * kBlockThreads + threadIdx.x; i < used; i += gridDim.x * kBlockThreads)
    set.slots[set.used[i]] = {kNoKey, kNoPosition, kUnlisted};
  if (leaves_last(*set.team, gridDim.x)) set.progress[kSlotsUsed] = set.progress[kSlotsListed] = 0;
}

// Write the descriptor of a request's set, and empty the set. The caller keeps the arrays alive.
//
//   slot_count   2 N
//   seed         of the hash
//
// All arrays except `slots` must be zeros before. Launch: as forget.
extern "C" __global__ void __launch_bounds__(256)
    describe_missing(MissingSet* missing, MissingSlot* slots, u32* used, u32* marks, u32* ranks, u32* progress,
                     Team* team, MissingCounts* counts, MissingReport* report, i64* keys, u32* times, u32 slot_count,
                     u64 seed) {
  const u32 thread = blockIdx.x * kBlockThreads + threadIdx.x;
  for (u32 i = thread; i < slot_count; i += gridDim.x * kBlockThreads) slots[i] = {kNoKey, kNoPosition, kUnlisted};
  if (thread == 0) *missing = {slots, used, marks, ranks, progress, team, counts, report, keys, times, seed};
}
