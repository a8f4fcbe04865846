// A line: the keys of one hash bucket and a word about them. Neighbouring lanes of a warp read it in one request.
//
//   HOTROW_KEY  HOTROW_LINE_KEYS   bytes   lanes of 16 bytes     (given by the compiler's options)
//   i64         15                 128     8
//   i64         7                  64      4
//   u32         15                 64      4
//
// Words 0 .. kLineKeys are the slots' keys and, last, the line's meta word:
//
//   bits 2s, 2s + 1    counter of slot s, 0 to 3: how often its row was found recently
//   bit 2 kLineKeys    overflow: a key whose chain has this line may be in the chain's next line (static tables only)
//   bits 32 to 63      marks of keys that were missed recently (policy.cuh); u32 lines have none
//
// The two largest values of the key type mark a slot without a key: kEmpty, and kLocked while its row is being written.
//
// Slots are numbered so that a ballot over the lanes of a tile gives bits in the order of the slots: slot s is word
// s / kTileLanes of the 16 bytes that lane s % kTileLanes reads. The meta word is slot kLineKeys, the last.
#pragma once

#include "types.cuh"

#if !defined(HOTROW_KEY) || !defined(HOTROW_LINE_KEYS)
#error "compile with -DHOTROW_KEY=i64 or u32 and -DHOTROW_LINE_KEYS=15 or 7"
#endif

template <class Key>
struct KeyWords;
template <>
struct KeyWords<i64> {
  using Word = u64;
  using Unit = ulonglong2;
  static constexpr Word kEmpty = 0x7fffffffffffffffull;
};
template <>
struct KeyWords<u32> {
  using Word = u32;
  using Unit = uint4;
  static constexpr Word kEmpty = 0xffffffffu;
};

using Key = HOTROW_KEY;
using Word = KeyWords<Key>::Word;
using Unit = KeyWords<Key>::Unit;  // what one lane reads of a line

constexpr u32 kLineKeys = HOTROW_LINE_KEYS;
constexpr u32 kUnitWords = sizeof(Unit) / sizeof(Word);
constexpr u32 kTileLanes = (kLineKeys + 1) / kUnitWords;  // lanes that read a line together
constexpr u32 kBlockTiles = kBlockThreads / kTileLanes;
constexpr u32 kSlots = (1u << kLineKeys) - 1;  // a bit for each slot

constexpr Word kEmpty = KeyWords<Key>::kEmpty;
constexpr Word kLocked = kEmpty - 1;
constexpr Word kOverflow = Word(1) << 2 * kLineKeys;
constexpr u32 kMostCount = 3;

static_assert((kLineKeys + 1) % kUnitWords == 0 && kWarp % kTileLanes == 0, "a line is a whole number of units");
static_assert(2 * kLineKeys < 8 * sizeof(Word), "the counters and the overflow bit fit into the meta word");

struct __align__(16) Line {
  Word words[kLineKeys + 1];
};

__device__ __forceinline__ Word word_at(const ulonglong2& unit, u32 i) { return i ? unit.y : unit.x; }
__device__ __forceinline__ Word word_at(const uint4& unit, u32 i) {
  return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}

// The word of a slot's key; slot kLineKeys is the meta word.
__device__ __forceinline__ Word* word_of_slot(Line* line, u32 slot) {
  return global(line)->words + slot % kTileLanes * kUnitWords + slot / kTileLanes;
}
__device__ __forceinline__ Word* meta_word(Line* line) { return word_of_slot(line, kLineKeys); }

// Whether a line may hold the key. Callers pass any int64; what a line cannot hold is a miss.
__device__ __forceinline__ bool is_holdable(i64 key) {
  if (sizeof(Key) == sizeof(u32)) return key >= 0 && key < static_cast<i64>(kLocked);
  return key < static_cast<i64>(kLocked) && key > static_cast<i64>(~kLocked);  // without the two smallest values
}

__device__ __forceinline__ u32 counter_of(Word meta, u32 slot) { return meta >> 2 * slot & 3; }

// The lanes of a warp that read one line. The tiles of a warp run the code together, so that their votes are one
// instruction: all 32 lanes call every function that votes.
struct Tile {
  u32 lane;   // within the tile
  u32 first;  // lane of the warp at which the tile begins

  __device__ __forceinline__ Tile() : lane(lane_id() % kTileLanes), first(lane_id() - lane) {}

  __device__ __forceinline__ u32 ballot(bool vote) const {
    return __ballot_sync(kAllLanes, vote) >> first & ((1u << kTileLanes) - 1);
  }
  template <class T>
  __device__ __forceinline__ T from(T value, u32 source) const {
    return __shfl_sync(kAllLanes, value, first + source);
  }
};

// Of the caller's tile among all tiles of the launch.
__device__ __forceinline__ u32 tile_number() { return blockIdx.x * kBlockTiles + threadIdx.x / kTileLanes; }

// The caller's part of a line. The load goes past L1, where a line could be older than the locks of an insert.
__device__ __forceinline__ Unit load_unit(const Line* line, Tile tile) {
  return __ldcg(reinterpret_cast<const Unit*>(line) + tile.lane);
}

// Votes. Bit s: slot s holds this word.
__device__ __forceinline__ u32 slots_holding(Tile tile, const Unit& unit, Word word) {
  u32 slots = 0;
#pragma unroll
  for (u32 i = 0; i < kUnitWords; ++i) slots |= tile.ballot(word_at(unit, i) == word) << i * kTileLanes;
  return slots & kSlots;
}

// Votes. The line's meta word, for all lanes of the tile.
__device__ __forceinline__ Word meta_of(Tile tile, const Unit& unit) {
  return tile.from(word_at(unit, kUnitWords - 1), kTileLanes - 1);
}

// By one lane of the tile: count one more use of a slot. There is one attempt, from the meta word that was read with
// the line: if another thread changes the word meanwhile, this use is not counted. A counter at its maximum is not
// written.
__device__ __forceinline__ void count_use(Line* line, Word meta, u32 slot) {
  if (counter_of(meta, slot) < kMostCount) atomicCAS(meta_word(line), meta, meta + (Word(1) << 2 * slot));
}

// By one thread: free a slot and clear its counter, if it still has the word. Returns whether it had.
__device__ __forceinline__ bool free_slot(Line* line, u32 slot, Word word) {
  if (atomicCAS(word_of_slot(line, slot), word, kEmpty) != word) return false;
  atomicAnd(meta_word(line), ~(Word(kMostCount) << 2 * slot));
  return true;
}
