// The reading loops. Included by lookup_avx2.cpp and lookup_portable.cpp, each time in a namespace of its own, after
// defining HOTROW_TARGET (the function attribute that chooses the instruction set) and
//
//   unsigned matches(const Bucket&, int64_t key)   bit s is set where slot s holds the key
//
// A lookup misses the caches twice, one miss after the other: its bucket, then its row. The loops hide both by running
// ahead: when row i is used, row i + rows_ahead is being fetched and so is bucket i + rows_ahead + kBucketsAhead. They
// are fetched into the second-level cache (locality 2, prefetcht1 on x86): the first level can have far fewer misses
// under way, and filling it directly halves the rate (measured on Zen 4: 33 M rows/s against 68 at dim 32).
//
// Sums are plain float32 additions in key order, starting from +0, one chain per column, never fused with a
// multiplication. Vector width does not change them, so every path gives the same bits (of a NaN only that it is one:
// which payload comes out depends on the order in which the compiler writes down the operands of a sum).

constexpr size_t kBucketsAhead = 32;

// Fewer rows ahead where a row has many lines.
constexpr size_t rows_ahead(uint32_t dim) { return dim == 0 || dim > 64 ? 16 : 32; }

HOTROW_TARGET inline void prefetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }

// Eight columns at once; the compiler lowers it to what the target has.
typedef float Lane8 __attribute__((vector_size(32), aligned(4), may_alias));

HOTROW_TARGET inline Lane8& lane8(float* at) { return *reinterpret_cast<Lane8*>(at); }
HOTROW_TARGET inline const Lane8& lane8(const float* at) { return *reinterpret_cast<const Lane8*>(at); }

// In every loop: a call per key costs a sixth of the rate.
HOTROW_TARGET inline __attribute__((always_inline)) uint32_t find_row(const IndexView& index, uint64_t home,
                                                                      int64_t key) {
  uint64_t b = home;
  do {
    const Bucket& bucket = index.buckets[b];
    while (const unsigned slots = matches(bucket, key)) {
      const uint32_t row = bucket.row_of(key, __builtin_ctz(slots));
      if (__builtin_expect(row != kNoRow, 1)) return row;
      // No row belongs to a free slot's mark. Callers check for it, but their array may have changed since.
      if (key == kEmpty) return kNoRow;
      // A writer took the key away while we looked; it may have put it back in another slot: look again.
    }
    // relaxed: a key whose insertion happened before this lookup brought its counts along; others may be missed.
    if (__builtin_expect(bucket.passed.load(std::memory_order_relaxed) == 0, 1)) return kNoRow;
    b = index.after(b);
  } while (b != home);
  return kNoRow;
}

HOTROW_TARGET inline __attribute__((always_inline)) void prefetch_row(const float* row, size_t bytes) {
  const char* line = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < bytes; at += 64) prefetch_line(line + at);
}

// Turns keys into row pointers, one by one, with the memory fetched ahead. kDim is 0 where the dim is not known.
template <uint32_t kDim>
class RowStream {
 public:
  HOTROW_TARGET RowStream(const TableView& table, const int64_t* keys, size_t n, bool* found)
      : index_(table.index), rows_(table.rows), row_bytes_(table.dim * sizeof(float)), keys_(keys),
        n_(n), found_(found) {
    for (size_t i = 0; i < kBucketsAhead && i < n_; ++i) start(i);
    for (size_t i = 0; i < kRowsAhead && i < n_; ++i) resolve(i);
  }

  // The next key's row; zeros if it is absent.
  HOTROW_TARGET const float* next() {
    const float* row = ring_[at_ % kRowsAhead];
    if (at_ + kRowsAhead < n_) resolve(at_ + kRowsAhead);
    ++at_;
    return row;
  }

 private:
  static constexpr size_t kRowsAhead = rows_ahead(kDim);

  HOTROW_TARGET void start(size_t i) {
    const uint64_t home = index_.home(keys_[i]);
    homes_[i % kBucketsAhead] = home;
    prefetch_line(index_.buckets + home);
  }

  HOTROW_TARGET void resolve(size_t i) {
    const uint64_t home = homes_[i % kBucketsAhead];
    if (i + kBucketsAhead < n_) start(i + kBucketsAhead);
    const uint32_t number = find_row(index_, home, keys_[i]);
    found_[i] = number != kNoRow;
    const float* row = rows_.at(number);
    prefetch_row(row, kDim ? kDim * sizeof(float) : row_bytes_);
    ring_[i % kRowsAhead] = row;
  }

  const IndexView index_;
  const RowsView rows_;
  const size_t row_bytes_;
  const int64_t* const keys_;
  const size_t n_;
  bool* const found_;
  size_t at_ = 0;
  uint64_t homes_[kBucketsAhead];
  const float* ring_[kRowsAhead];
};

template <uint32_t kDim>
HOTROW_TARGET inline void copy_row(float* out, const float* row, uint32_t any_dim) {
  const uint32_t dim = kDim ? kDim : any_dim;
  uint32_t c = 0;
  for (; c + 8 <= dim; c += 8) lane8(out + c) = lane8(row + c);
  for (; c < dim; ++c) out[c] = row[c];
}

template <uint32_t kDim>
HOTROW_TARGET void fetch(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found) {
  RowStream<kDim> rows(table, keys, n, found);
  const size_t dim = kDim ? kDim : table.dim;
  for (size_t i = 0; i < n; ++i) copy_row<kDim>(out + i * dim, rows.next(), table.dim);
}

// Rows that already lie in key order, with RowStream's face.
struct DenseRows {
  const float* row;
  size_t dim;
  HOTROW_TARGET const float* next() {
    const float* current = row;
    row += dim;
    return current;
  }
};

// Sum `count` rows into registers (at dim 128, all sixteen of AVX2), then write once.
template <uint32_t kDim, class Rows>
HOTROW_TARGET inline void pool_bag_in_registers(Rows& rows, int64_t count, float divisor, float* out) {
  Lane8 sums[kDim / 8] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows.next();
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < kDim / 8; ++lane) sums[lane] += lane8(row + 8 * lane);
  }
#pragma GCC unroll 16
  for (uint32_t lane = 0; lane < kDim / 8; ++lane) lane8(out + 8 * lane) = sums[lane] / divisor;
}

// Sum `count` rows into `out`, which stays in the nearest cache.
template <class Rows>
HOTROW_TARGET inline void pool_bag_in_memory(Rows& rows, uint32_t dim, int64_t count, float divisor, float* out) {
  for (uint32_t c = 0; c < dim; ++c) out[c] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows.next();
    uint32_t c = 0;
    for (; c + 8 <= dim; c += 8) lane8(out + c) += lane8(row + c);
    for (; c < dim; ++c) out[c] += row[c];
  }
  if (divisor != 1.0f)
    for (uint32_t c = 0; c < dim; ++c) out[c] /= divisor;
}

template <uint32_t kDim, class Rows>
HOTROW_TARGET inline void pool_bags(Rows& rows, uint32_t any_dim, const int64_t* row_ptrs, size_t begin, size_t end,
                                    float* out, Combiner combiner) {
  const size_t dim = kDim ? kDim : any_dim;
  for (size_t bag = begin; bag < end; ++bag) {
    const int64_t count = row_ptrs[bag + 1] - row_ptrs[bag];
    const float divisor = combiner == Combiner::kMean && count > 1 ? static_cast<float>(count) : 1.0f;
    if constexpr (kDim > 0)
      pool_bag_in_registers<kDim>(rows, count, divisor, out + bag * dim);
    else
      pool_bag_in_memory(rows, static_cast<uint32_t>(dim), count, divisor, out + bag * dim);
  }
}

template <uint32_t kDim>
HOTROW_TARGET void fetch_pooled(const TableView& table, const int64_t* keys, const int64_t* row_ptrs, size_t begin,
                                size_t end, float* out, Combiner combiner, bool* found) {
  const int64_t first = row_ptrs[begin];
  RowStream<kDim> rows(table, keys + first, static_cast<size_t>(row_ptrs[end] - first), found + first);
  pool_bags<kDim>(rows, table.dim, row_ptrs, begin, end, out, combiner);
}

template <uint32_t kDim>
HOTROW_TARGET void pool_rows(const float* rows, uint32_t dim, const int64_t* row_ptrs, size_t bags, float* out,
                             Combiner combiner) {
  DenseRows dense{rows, dim};
  pool_bags<kDim>(dense, dim, row_ptrs, 0, bags, out, combiner);
}

HOTROW_TARGET void find(const IndexView& index, const int64_t* keys, size_t n, int64_t* rows) {
  constexpr size_t kAhead = kBucketsAhead;
  for (size_t i = 0; i < kAhead && i < n; ++i) prefetch_line(index.buckets + index.home(keys[i]));
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_line(index.buckets + index.home(keys[i + kAhead]));
    const uint32_t row = find_row(index, index.home(keys[i]), keys[i]);
    rows[i] = row == kNoRow ? -1 : static_cast<int64_t>(row);
  }
}

HOTROW_TARGET size_t first_reserved(const int64_t* keys, size_t n) {
  constexpr size_t kGroup = 64;  // tested without a branch per key
  size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    bool any = false;
    for (size_t j = 0; j < kGroup; ++j) any |= is_reserved(keys[i + j]);
    if (any) break;
  }
  while (i < n && !is_reserved(keys[i])) ++i;
  return i;
}

// Call `f<dim>` for the dims that have loops of their own, `f<0>` for all others.
#define HOTROW_BY_DIM(dim, f, ...)           \
  switch (dim) {                             \
    case 8: return f<8>(__VA_ARGS__);        \
    case 16: return f<16>(__VA_ARGS__);      \
    case 32: return f<32>(__VA_ARGS__);      \
    case 64: return f<64>(__VA_ARGS__);      \
    case 128: return f<128>(__VA_ARGS__);    \
    default: return f<0>(__VA_ARGS__);       \
  }

void fetch_any(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found) {
  HOTROW_BY_DIM(table.dim, fetch, table, keys, n, out, found)
}

void fetch_pooled_any(const TableView& table, const int64_t* keys, const int64_t* row_ptrs, size_t begin, size_t end,
                      float* out, Combiner combiner, bool* found) {
  HOTROW_BY_DIM(table.dim, fetch_pooled, table, keys, row_ptrs, begin, end, out, combiner, found)
}

void pool_rows_any(const float* rows, uint32_t dim, const int64_t* row_ptrs, size_t bags, float* out,
                   Combiner combiner) {
  HOTROW_BY_DIM(dim, pool_rows, rows, dim, row_ptrs, bags, out, combiner)
}

#undef HOTROW_BY_DIM
