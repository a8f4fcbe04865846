// The reading loops. Included by lookup_avx2.cpp and lookup_portable.cpp, each time in a namespace of its own, after
// defining HOTROW_TARGET (the function attribute that chooses the instruction set) and
//
//   unsigned matches(const Bucket&, int64_t key)   bit s is set if slot s holds the key
//
// and what row_decode.inl asks for.
//
// A loop inlines everything that it calls (flatten): with so many loops, the compiler would otherwise stop inlining,
// which costs a quarter of the rate.
//
// Sums are plain float32 additions in key order, starting from +0, one chain per column; a row is de-quantized and
// weighted by operations that round one by one, never fused. Vector width does not change them, so every path gives the
// same bits (of a NaN only that it is one: which payload comes out depends on the order in which the compiler writes
// down the operands of a sum).

#define HOTROW_LOOP HOTROW_TARGET __attribute__((flatten))

HOTROW_TARGET inline Lane8& lane8(void* at) { return *static_cast<Lane8*>(at); }
HOTROW_TARGET inline const Lane8& lane8(const void* at) { return *static_cast<const Lane8*>(at); }

#include "rows/row_decode.inl"
#include "rows/row_stream.inl"

// The order in which a row's lanes are read: its last ones first. Read from front to back, a row of several cache lines
// looks like a stream, and the CPU fetches lines beyond its end that are not needed. Measured on Zen 4 with float32
// rows beyond the caches, pooling goes from 28 to 44 M rows/s at dim 128, from 45 to 79 at dim 64, from 18 to 27 at
// dim 100; at dim 256 the stream helps: 19 against 12.
constexpr uint32_t first_lane(uint32_t lanes) { return lanes > 2 && lanes <= 16 ? lanes - 2 : 0; }
constexpr uint32_t lane_after(uint32_t lane, uint32_t lanes) { return lane + 1 == lanes ? 0 : lane + 1; }

template <RowType kType, uint32_t kDim>
HOTROW_TARGET inline void write_row(float* out, const Row<kType>& row, uint32_t any_dim) {
  const uint32_t dim = kDim ? kDim : any_dim, lanes = dim / 8;
  for (uint32_t c = 8 * lanes; c < dim; ++c) out[c] = row.at(c);
#pragma GCC unroll 16
  for (uint32_t i = 0, lane = first_lane(lanes); i < lanes; ++i, lane = lane_after(lane, lanes))
    lane8(out + 8 * lane) = row.lanes(8 * lane);
}

template <RowType kType, uint32_t kDim>
HOTROW_LOOP void fetch(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found) {
  RowStream<kType, kDim> rows(table, keys, n, found);
  const size_t dim = kDim ? kDim : table.dim;
  for (size_t i = 0; i < n; ++i) write_row<kType, kDim>(out + i * dim, rows.next(), table.dim);
}

// Rows that already lie in key order, with RowStream's face.
struct DenseRows {
  const float* row;
  size_t dim;
  HOTROW_TARGET Row<RowType::kFp32> next() {
    const float* current = row;
    row += dim;
    return Row<RowType::kFp32>(reinterpret_cast<const std::byte*>(current));
  }
};

// How a bag weights each of its rows, and the divisor of its sum; 0 stands for a bag of zeros.
struct Unweighted {
  Combiner combiner;
  HOTROW_TARGET void begin_bag() {}
  HOTROW_TARGET void next() {}
  HOTROW_TARGET void add(Lane8& sum, const Lane8& row) const { sum += row; }
  HOTROW_TARGET void add(float& sum, float row) const { sum += row; }
  HOTROW_TARGET float divisor(int64_t count) const {
    if (combiner == Combiner::kSum || count <= 1) return 1.0f;
    const auto rows = static_cast<float>(count);
    return combiner == Combiner::kMean ? rows : std::sqrt(rows);
  }
};

struct Weighted {
  Combiner combiner;
  const float* weights;  // of the next key on
  float weight = 0.0f;
  float total = 0.0f;  // of the bag's weights; for kSqrtN, of their squares
  HOTROW_TARGET void begin_bag() { total = 0.0f; }
  HOTROW_TARGET void next() {
    weight = *weights++;
    total += combiner == Combiner::kSqrtN ? weight * weight : weight;
  }
  HOTROW_TARGET void add(Lane8& sum, const Lane8& row) const { sum += row * weight; }
  HOTROW_TARGET void add(float& sum, float row) const { sum += row * weight; }
  HOTROW_TARGET float divisor(int64_t) const {
    if (combiner == Combiner::kSum) return 1.0f;
    return combiner == Combiner::kMean ? total : std::sqrt(total);
  }
};

// Sum `count` rows into registers (at dim 128, all sixteen of AVX2), then write once.
template <uint32_t kDim, class Rows, class Weights>
HOTROW_TARGET inline void pool_bag_in_registers(Rows& rows, Weights& weights, int64_t count, float* out) {
  Lane8 sums[kDim / 8] = {};
  for (int64_t i = 0; i < count; ++i) {
    const auto row = rows.next();
    weights.next();
#pragma GCC unroll 16
    for (uint32_t i = 0, lane = first_lane(kDim / 8); i < kDim / 8; ++i, lane = lane_after(lane, kDim / 8))
      weights.add(sums[lane], row.lanes(8 * lane));
  }
  const float divisor = weights.divisor(count);
#pragma GCC unroll 16
  for (uint32_t lane = 0; lane < kDim / 8; ++lane)
    lane8(out + 8 * lane) = divisor == 0.0f ? Lane8{} : sums[lane] / divisor;
}

// Sum `count` rows into `out`, which stays in the nearest cache.
template <class Rows, class Weights>
HOTROW_TARGET inline void pool_bag_in_memory(Rows& rows, Weights& weights, uint32_t dim, int64_t count, float* out) {
  for (uint32_t c = 0; c < dim; ++c) out[c] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const auto row = rows.next();
    weights.next();
    const uint32_t lanes = dim / 8;
    for (uint32_t c = 8 * lanes; c < dim; ++c) weights.add(out[c], row.at(c));
    for (uint32_t i = 0, lane = first_lane(lanes); i < lanes; ++i, lane = lane_after(lane, lanes))
      weights.add(lane8(out + 8 * lane), row.lanes(8 * lane));
  }
  const float divisor = weights.divisor(count);
  if (divisor != 1.0f)
    for (uint32_t c = 0; c < dim; ++c) out[c] = divisor == 0.0f ? 0.0f : out[c] / divisor;
}

template <uint32_t kDim, class Rows, class Weights>
HOTROW_TARGET inline void pool_bags(Rows& rows, Weights weights, uint32_t any_dim, const int64_t* row_ptrs,
                                    size_t begin, size_t end, float* out) {
  const size_t dim = kDim ? kDim : any_dim;
  for (size_t bag = begin; bag < end; ++bag) {
    const int64_t count = row_ptrs[bag + 1] - row_ptrs[bag];
    weights.begin_bag();
    if constexpr (kDim > 0)
      pool_bag_in_registers<kDim>(rows, weights, count, out + bag * dim);
    else
      pool_bag_in_memory(rows, weights, static_cast<uint32_t>(dim), count, out + bag * dim);
  }
}

template <RowType kType, uint32_t kDim, class Weights>
HOTROW_LOOP void fetch_bags(const TableView& table, const int64_t* keys, Weights weights, const int64_t* row_ptrs,
                            size_t begin, size_t end, float* out, bool* found) {
  const int64_t first = row_ptrs[begin];
  RowStream<kType, kDim> rows(table, keys + first, static_cast<size_t>(row_ptrs[end] - first), found + first);
  pool_bags<kDim>(rows, weights, table.dim, row_ptrs, begin, end, out);
}

template <RowType kType, uint32_t kDim>
void fetch_pooled(const TableView& table, const int64_t* keys, const Bags& bags, size_t begin, size_t end, float* out,
                  bool* found) {
  const Combiner combiner = bags.combiner;
  const int64_t* row_ptrs = bags.row_ptrs;
  if (!bags.weights)
    return fetch_bags<kType, kDim>(table, keys, Unweighted{combiner}, row_ptrs, begin, end, out, found);
  const Weighted weights{combiner, bags.weights + row_ptrs[begin]};
  fetch_bags<kType, kDim>(table, keys, weights, row_ptrs, begin, end, out, found);
}

template <uint32_t kDim, class Weights>
HOTROW_LOOP void pool_dense_bags(DenseRows rows, Weights weights, const Bags& bags, float* out) {
  pool_bags<kDim>(rows, weights, static_cast<uint32_t>(rows.dim), bags.row_ptrs, 0, bags.count, out);
}

template <RowType, uint32_t kDim>
void pool_rows(const float* rows, uint32_t dim, const Bags& bags, float* out) {
  const DenseRows dense{rows, dim};
  if (!bags.weights) return pool_dense_bags<kDim>(dense, Unweighted{bags.combiner}, bags, out);
  pool_dense_bags<kDim>(dense, Weighted{bags.combiner, bags.weights}, bags, out);
}

template <RowType kType, uint32_t kDim>
HOTROW_LOOP void decode(const std::byte* rows, size_t stride_bytes, uint32_t dim, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) write_row<kType, kDim>(out + i * dim, Row<kType>(rows + i * stride_bytes), dim);
}

HOTROW_TARGET void find(const IndexView& index, const int64_t* keys, size_t n, int64_t* rows) {
  constexpr size_t kAhead = kBucketsAhead;
  for (size_t i = 0; i < kAhead && i < n; ++i) prefetch_line(index.buckets + index.home(keys[i]));
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_line(index.buckets + index.home(keys[i + kAhead]));
    const uint32_t row = find_row(index, index.home(keys[i]), keys[i], kNoRow);
    rows[i] = row == kNoRow ? -1 : static_cast<int64_t>(row);
  }
}

// In blocks, so that a key is hashed once. Most keys are absent and take one test.
HOTROW_TARGET void holds(const IndexView& index, const int64_t* keys, size_t n, bool* held) {
  constexpr size_t kBlock = 64;
  uint64_t homes[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = n - begin < kBlock ? n - begin : kBlock;
    for (size_t i = 0; i < count; ++i) {
      homes[i] = index.home(keys[begin + i]);
      prefetch_line(index.buckets + homes[i]);
    }
    std::memset(held + begin, 0, count);
    for (size_t i = 0; i < count; ++i) {
      const Bucket& bucket = index.buckets[homes[i]];
      const unsigned slots = matches(bucket, keys[begin + i]);
      if (__builtin_expect((slots | bucket.passed.load(std::memory_order_relaxed)) != 0, 0))
        held[begin + i] = search(index, homes[i], keys[begin + i]) != kNoRow;
    }
  }
}

HOTROW_TARGET size_t first_outside(const int64_t* keys, size_t n, int64_t smallest, int64_t largest) {
  constexpr size_t kGroup = 64;  // tested without a branch per key
  const uint64_t low = static_cast<uint64_t>(smallest), span = static_cast<uint64_t>(largest) - low;
  size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    uint64_t outside = 0;  // as wide as a key, or the loop would not be one of vectors
    for (size_t j = 0; j < kGroup; ++j) outside |= static_cast<uint64_t>(keys[i + j]) - low > span;
    if (outside) break;
  }
  while (i < n && static_cast<uint64_t>(keys[i]) - low <= span) ++i;
  return i;
}

// Call `f<type, dim>` for the dims that have loops of their own, `f<type, 0>` for all others.
#if defined(HOTROW_ANY_DIM_LOOPS_ONLY)  // the sanitizers take a minute to compile them all
#define HOTROW_BY_DIM(type, dim, f, ...) return f<type, 0>(__VA_ARGS__);
#else
#define HOTROW_BY_DIM(type, dim, f, ...)           \
  switch (dim) {                                   \
    case 8: return f<type, 8>(__VA_ARGS__);        \
    case 16: return f<type, 16>(__VA_ARGS__);      \
    case 32: return f<type, 32>(__VA_ARGS__);      \
    case 64: return f<type, 64>(__VA_ARGS__);      \
    case 128: return f<type, 128>(__VA_ARGS__);    \
    default: return f<type, 0>(__VA_ARGS__);       \
  }
#endif

#define HOTROW_BY_LAYOUT(type, dim, f, ...)                                      \
  switch (type) {                                                                \
    case RowType::kFp32: HOTROW_BY_DIM(RowType::kFp32, dim, f, __VA_ARGS__)      \
    case RowType::kFp16: HOTROW_BY_DIM(RowType::kFp16, dim, f, __VA_ARGS__)      \
    case RowType::kBf16: HOTROW_BY_DIM(RowType::kBf16, dim, f, __VA_ARGS__)      \
    case RowType::kInt8: HOTROW_BY_DIM(RowType::kInt8, dim, f, __VA_ARGS__)      \
    case RowType::kUint8: HOTROW_BY_DIM(RowType::kUint8, dim, f, __VA_ARGS__)    \
  }

void fetch_any(const TableView& table, const int64_t* keys, size_t n, float* out, bool* found) {
  HOTROW_BY_LAYOUT(table.row_type, table.dim, fetch, table, keys, n, out, found)
}

void fetch_pooled_any(const TableView& table, const int64_t* keys, const Bags& bags, size_t begin, size_t end,
                      float* out, bool* found) {
  HOTROW_BY_LAYOUT(table.row_type, table.dim, fetch_pooled, table, keys, bags, begin, end, out, found)
}

void pool_rows_any(const float* rows, uint32_t dim, const Bags& bags, float* out) {
  HOTROW_BY_DIM(RowType::kFp32, dim, pool_rows, rows, dim, bags, out)
}

void decode_any(RowType type, const std::byte* rows, size_t stride_bytes, uint32_t dim, size_t n, float* out) {
  HOTROW_BY_LAYOUT(type, dim, decode, rows, stride_bytes, dim, n, out)
}

#undef HOTROW_BY_LAYOUT
#undef HOTROW_BY_DIM
#undef HOTROW_LOOP
