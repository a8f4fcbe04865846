// The reading loops, compiled twice: for AVX2 and for any CPU (lookup_loops.inl). The program chooses once, at its
// start. Both give the same bits, except NaN payloads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "rows/row_type.hpp"
#include "table/bucket.hpp"
#include "table/row_arena.hpp"
#include "table/row_stamps.hpp"

namespace hotrow {

enum class Combiner { kSum, kMean, kSqrtN };

// A table as its readers see it.
struct TableView {
  IndexView index;
  RowsView rows;
  uint32_t dim;
  RowType row_type;
  StampsView stamps = {};
};

// Consecutive bags of keys or of rows.
struct Bags {
  const int64_t* row_ptrs;  // [count + 1]
  size_t count;
  Combiner combiner;
  const float* weights;  // one per key, or nullptr
};

// The loops of one instruction set. Callers refuse reserved keys; a reserved key is absent.
struct LookupLoops {
  const char* name;

  // Position of the first key that is not between these two, or n.
  size_t (*first_outside)(const int64_t* keys, size_t n, int64_t smallest, int64_t largest);

  // keys[n] -> rows[n], -1 where absent.
  void (*find)(const IndexView& index, const int64_t* keys, size_t n, int64_t* rows);

  // held[n]: whether the key is there.
  void (*holds)(const IndexView& index, const int64_t* keys, size_t n, bool* held);

  // keys[n] -> out[n][dim], zeros where absent; found[n].
  void (*fetch)(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found);

  // Bags [begin, end) of the keys: out[bags][dim], found per key.
  void (*fetch_pooled)(const TableView& table, const int64_t* keys, const Bags& bags, size_t begin, size_t end,
                       float* out, bool* found);

  // The same pooling, of rows[n][dim] that lie one after the other in key order.
  void (*pool_rows)(const float* rows, uint32_t dim, const Bags& bags, float* out);

  // n stored rows, stride_bytes apart, -> out[n][dim].
  void (*decode)(RowType type, const std::byte* rows, size_t stride_bytes, uint32_t dim, size_t n, float* out);
};

const LookupLoops& portable_loops();
#if defined(__x86_64__)
const LookupLoops& avx2_loops();
#endif

// AVX2 (with F16C) if the CPU has it and HOTROW_DISABLE_AVX2 is not set to 1.
const LookupLoops& lookup_loops();

// For tests: switch to AVX2 or to the portable loops. Returns whether AVX2 is now used.
bool use_avx2(bool enabled);

}  // namespace hotrow
