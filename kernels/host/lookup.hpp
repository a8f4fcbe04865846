// The reading loops, compiled twice: for AVX2 and for any CPU (lookup_loops.inl). Which one runs is decided once, when
// the program starts. Both give the same bits, NaN payloads aside.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "bucket.hpp"
#include "row_arena.hpp"

namespace hotrow {

enum class Combiner { kSum, kMean };

// A table as its readers see it.
struct TableView {
  IndexView index;
  RowsView rows;
  uint32_t dim;
};

// One instruction set's loops. Callers refuse reserved keys with first_reserved; one that comes all the same is absent.
struct LookupLoops {
  const char* name;

  // Position of the first reserved key, or n.
  size_t (*first_reserved)(const int64_t* keys, size_t n);

  // keys[n] -> rows[n], -1 where absent.
  void (*find)(const IndexView& index, const int64_t* keys, size_t n, int64_t* rows);

  // keys[n] -> out[n][dim], zeros where absent; found[n].
  void (*fetch)(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found);

  // Bags [begin, end) of the keys: row_ptrs[bags + 1], out[bags][dim], found per key.
  void (*fetch_pooled)(const TableView& table, const int64_t* keys, const int64_t* row_ptrs, size_t begin, size_t end,
                       float* out, Combiner combiner, bool* found);

  // The same pooling, of rows[n][dim] that lie one after the other in key order.
  void (*pool_rows)(const float* rows, uint32_t dim, const int64_t* row_ptrs, size_t bags, float* out,
                    Combiner combiner);
};

const LookupLoops& portable_loops();
#if defined(__x86_64__)
const LookupLoops& avx2_loops();
#endif

// AVX2 where the CPU has it and HOTROW_DISABLE_AVX2 is not set to 1.
const LookupLoops& lookup_loops();

// For tests: go over to AVX2 or to the portable loops. Returns whether AVX2 now runs.
bool use_avx2(bool enabled);

}  // namespace hotrow
