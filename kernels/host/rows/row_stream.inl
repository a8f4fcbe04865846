// From keys to the addresses of their rows. Included by lookup_loops.inl.
//
// A lookup misses the caches twice, one miss after the other: its bucket, then its row. The stream hides both by
// running ahead: when row i is used, row i + rows_ahead is being fetched and so is bucket i + rows_ahead +
// kBucketsAhead. They are fetched into the second-level cache (locality 2, prefetcht1 on x86): the first level can have
// far fewer misses under way, and filling it directly halves the rate (measured on Zen 4: 33 M rows/s against 68 at
// dim 32).
//
// The fewer instructions a key takes, the more keys and misses the CPU works on at a time. So the common key takes few
// tests and no call, and only the rings of a stream are in memory. That is worth a tenth of the rate at dim 32.
//
// In a virtual machine whose host uses small pages, a line of another page also costs a walk of two page tables, with
// huge pages in the guest too. A prefetch takes its place in the CPU until the walk is over. On a Zen 3 with 10 M rows
// such a line cost 6 to 11 ns, and a line next to it 1.3 ns. A lookup takes two such lines per key, a gather of known
// rows one. Neither distances of 8 to 32 keys nor the cache level made a difference.

constexpr size_t kBucketsAhead = 32;

// Fewer rows ahead if a row has many lines.
constexpr size_t rows_ahead(RowType type, uint32_t dim) { return dim == 0 || row_bytes(type, dim) > 256 ? 16 : 32; }

HOTROW_TARGET inline void prefetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }

// The key's row in any bucket; kNoRow if the key is absent. The index is passed by value: if its address were taken,
// a caller's stream would be in memory instead of registers.
HOTROW_TARGET __attribute__((noinline)) uint32_t search(IndexView index, uint64_t home, int64_t key) {
  uint64_t b = home;
  do {
    const Bucket& bucket = index.buckets[b];
    while (const unsigned slots = matches(bucket, key)) {
      const uint32_t row = bucket.row_of(key, __builtin_ctz(slots));
      if (row != kNoRow) return row;
      // A free slot's mark has no row. Callers check for marks, but their array may have changed since.
      if (key == kEmpty) return kNoRow;
      // A writer removed the key during the look and may have put it into another slot: look again.
    }
    // relaxed: if a key's insertion happened before this lookup, so did its counts. Other keys may be missed.
    if (bucket.passed.load(std::memory_order_relaxed) == 0) return kNoRow;
    b = index.after(b);
  } while (b != home);
  return kNoRow;
}

// As above. For 49 of 50 keys one look at the home bucket is enough: the key is there, or no key went past it. Numbers
// below `rows` take one test; only a damaged file has others. Inlined in every loop: a call costs a sixth of the rate.
HOTROW_TARGET inline __attribute__((always_inline)) uint32_t find_row(const IndexView& index, uint64_t home,
                                                                      int64_t key, uint32_t rows) {
  const Bucket& bucket = index.buckets[home];
  const unsigned slots = matches(bucket, key);
  const uint32_t row = __builtin_expect(slots != 0, 1) ? bucket.row_at_one_look(key, __builtin_ctz(slots)) : kNoRow;
  if (__builtin_expect(row < rows, 1)) return row;
  if (slots == 0 && bucket.passed.load(std::memory_order_relaxed) == 0) return kNoRow;
  return search(index, home, key);
}

template <RowType kType>
HOTROW_TARGET inline __attribute__((always_inline)) void prefetch_row(const std::byte* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) prefetch_line(row + at);
  if constexpr (is_row_wise(kType)) prefetch_line(row + bytes - 1);  // such a row may begin anywhere in a line
}

// Turns keys into row pointers one by one and prefetches their memory. kDim is 0 if the dim is not known at compile
// time.
//
// In a table without stamps, a key with at least kAhead keys after it is plain: one test skips the special cases.
template <RowType kType, uint32_t kDim>
class RowStream {
 public:
  HOTROW_TARGET RowStream(const TableView& table, const int64_t* keys, size_t n, bool* found)
      : index_(table.index),
        rows_{table.rows.rows, kDim ? row_stride_bytes(kType, kDim) : table.rows.stride_bytes, table.rows.count},
        row_bytes_(row_bytes(kType, kDim ? kDim : table.dim)),
        keys_(keys),
        n_(n),
        plain_(table.stamps.stamps || n < kAhead ? 0 : n - kAhead),
        found_(found),
        stamps_(table.stamps) {
    for (size_t i = 0; i < kBucketsAhead && i < n_; ++i) start(i);
    for (size_t i = 0; i < kRowsAhead && i < n_; ++i) resolve_any(i);
  }

  // The next key's row; zeros if it is absent.
  HOTROW_TARGET Row<kType> next() {
    const std::byte* row = ring_[at_ % kRowsAhead];
    if (__builtin_expect(at_ < plain_, 1)) {
      resolve(at_ + kRowsAhead, restart(at_ + kAhead));
    } else {
      if (stamps_.stamps) stamps_.touch(numbers_[at_ % kRowsAhead]);
      if (at_ + kRowsAhead < n_) resolve_any(at_ + kRowsAhead);
    }
    ++at_;
    return Row<kType>(row);
  }

 private:
  static constexpr size_t kRowsAhead = rows_ahead(kType, kDim);
  static constexpr size_t kAhead = kRowsAhead + kBucketsAhead;

  HOTROW_TARGET void start(size_t i) {
    const uint64_t home = index_.home(keys_[i]);
    homes_[i % kBucketsAhead] = home;
    prefetch_line(index_.buckets + home);
  }

  // Start with key i; returns the home of the key whose place in the ring it takes.
  HOTROW_TARGET uint64_t restart(size_t i) {
    const uint64_t home = homes_[i % kBucketsAhead];
    start(i);
    return home;
  }

  HOTROW_TARGET uint32_t resolve(size_t i, uint64_t home) {
    const uint32_t number = find_row(index_, home, keys_[i], rows_.count);
    found_[i] = number != kNoRow;
    const std::byte* row = rows_.at(number);
    prefetch_row<kType>(row, row_bytes_);
    ring_[i % kRowsAhead] = row;
    return number;
  }

  // The same for a key near the end, or of a table with stamps.
  HOTROW_TARGET void resolve_any(size_t i) {
    const bool is_near_end = i + kBucketsAhead >= n_;
    const uint32_t number = resolve(i, is_near_end ? homes_[i % kBucketsAhead] : restart(i + kBucketsAhead));
    if (!stamps_.stamps) return;
    stamps_.prefetch(number);
    numbers_[i % kRowsAhead] = number;
  }

  const IndexView index_;
  const RowsView rows_;
  const size_t row_bytes_;
  const int64_t* const keys_;
  const size_t n_;
  const size_t plain_;  // keys before this one are plain
  bool* const found_;
  size_t at_ = 0;
  uint64_t homes_[kBucketsAhead];
  const std::byte* ring_[kRowsAhead];
  StampsView stamps_;
  uint32_t numbers_[kRowsAhead];  // of the rows in ring_, where there are stamps
};
