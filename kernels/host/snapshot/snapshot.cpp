#include "snapshot/snapshot.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lookup/lookup_pieces.hpp"
#include "memory/page_faults.hpp"

namespace hotrow {
namespace {

std::string place(uint64_t page) {
  return "the page of 4,096 bytes at offset " + std::to_string((page + 1) * kSnapshotPage);
}

// The header of a mapped file, checked on its own.
SnapshotHeader read_header(const MappedFile& file) {
  if (file.bytes() < kSnapshotPage)
    throw FileFault{file.path(), "expected a header of 4096 bytes, found a file of " + std::to_string(file.bytes())};
  SnapshotHeader header;
  if (!read_mapped(file.data(), kSnapshotPage, [&] { std::memcpy(&header, file.data(), sizeof header); }))
    throw FileFault{file.path(), "its header cannot be read"};
  if (std::memcmp(header.magic, kSnapshotMagic, sizeof kSnapshotMagic) != 0)
    throw FileFault{file.path(), "not a snapshot"};
  if (header.format != kSnapshotFormat && header.format != kUnseededSnapshotFormat)
    throw FileFault{file.path(), "format " + std::to_string(header.format) + ", expected " +
                                     std::to_string(kUnseededSnapshotFormat) + " or " + std::to_string(kSnapshotFormat)};
  if (header.checksum() != header.header_checksum) throw FileFault{file.path(), "its header is damaged: the checksum is wrong"};
  const bool possible = header.dim >= 1 && header.dim <= kMostSnapshotDim && header.row_type < kRowTypes &&
                        header.key_bytes == sizeof(int64_t) && header.rows <= header.capacity_rows &&
                        header.capacity_rows <= kMostSnapshotRows && header.bucket_count >= 1 &&
                        header.bucket_count <= 2 * kMostSnapshotRows &&
                        (header.format == kSnapshotFormat || header.seed == 0) &&
                        header.rows <= header.bucket_count * kSlots;
  if (!possible) throw FileFault{file.path(), "its header is inconsistent"};
  return header;
}

}  // namespace

Snapshot::Snapshot(const std::string& path)
    : file_(path),
      header_(read_header(file_)),
      hash_(header_.seed),
      layout_(header_.dim, row_type(), header_.capacity_rows, header_.bucket_count),
      is_checked_(new std::atomic<bool>[layout_.index_pages()]()),
      unchecked_pages_(layout_.index_pages()) {
  if (layout_.file_bytes != file_.bytes())
    fail("expected " + std::to_string(layout_.file_bytes) + " bytes by its header, found " +
                        std::to_string(file_.bytes()));
  const size_t bytes = layout_.index_pages() * sizeof(uint32_t);
  file_.will_need(layout_.checksums, bytes);
  uint32_t checksum = 0;
  guarded([&] { checksum = crc32(checksums(), bytes); });
  if (checksum != header_.index_checksum) fail("the checksums of its index are damaged");
}

TableView Snapshot::view() const {
  return {{at<const Bucket>(layout_.index), header_.bucket_count, hash_},
          {at<const std::byte>(layout_.rows), row_stride_bytes(row_type(), dim()),
           static_cast<uint32_t>(header_.capacity_rows)},
          dim(),
          row_type()};
}

void Snapshot::believe(bool was_read) const {
  const std::string change = file_.change();
  if (!change.empty()) fail(change);
  if (!was_read) fail("cannot be read: the system reports a bus error, for example from a failing disk");
}

void Snapshot::fail(const std::string& reason) const { throw FileFault{path(), reason}; }

void Snapshot::raise_damaged(uint64_t page) const {
  fail("is damaged: " + place(page) + " has wrong content");
}

bool Snapshot::has_checksum(uint64_t page) const {
  return crc32(file_.data() + (page + 1) * kSnapshotPage, kSnapshotPage) == checksums()[page];
}

// Whether a page of the index is as it was written and safe to read: every key has a row, and every row exists.
bool Snapshot::is_sound(uint64_t page) const {
  if (!has_checksum(page)) return false;
  const Bucket* buckets = view().index.buckets;
  const uint64_t end = std::min((page + 1) * kBucketsPerPage, header_.bucket_count);
  bool sound = true;
  for (uint64_t b = page * kBucketsPerPage; b < end; ++b)
    for (int slot = 0; slot < kSlots; ++slot) {
      const int64_t key = buckets[b].keys[slot].load(std::memory_order_relaxed);
      const uint32_t row = buckets[b].rows[slot].load(std::memory_order_relaxed);
      sound &= key == kEmpty ? row == kNoRow : !is_reserved(key) && row < header_.rows;
    }
  return sound;
}

// Whether a probe may go past the page's last bucket.
bool Snapshot::leads_on(uint64_t page) const {
  const uint64_t last = std::min((page + 1) * kBucketsPerPage, header_.bucket_count) - 1;
  return view().index.buckets[last].passed.load(std::memory_order_relaxed) != 0;
}

// Check a page of the index and the pages that its probes go on to; the first damaged page, or kSound. A page counts as
// checked only after the pages behind it, because other threads rely on it.
uint64_t Snapshot::check_from(uint64_t page) {
  const uint64_t pages = layout_.index_pages();
  uint64_t count = 0;
  for (uint64_t at = page; count < pages; at = (page + count) % pages) {
    if (is_checked_[at].load(std::memory_order_relaxed)) break;
    if (!is_sound(at)) return at;
    ++count;
    if (!leads_on(at)) break;
  }
  for (uint64_t i = count; i-- > 0;) mark_checked((page + i) % pages);
  return kSound;
}

void Snapshot::mark_checked(uint64_t page) {
  if (!is_checked_[page].exchange(true, std::memory_order_relaxed))
    unchecked_pages_.fetch_sub(1, std::memory_order_relaxed);
}

// Check the pages that probes for these keys may read; the first damaged page, or kSound.
uint64_t Snapshot::check_homes(const int64_t* keys, size_t n) {
  if (unchecked_pages_.load(std::memory_order_relaxed) == 0) return kSound;
  const IndexView index = view().index;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t page = index.home(keys[i]) / kBucketsPerPage;
    if (is_checked_[page].load(std::memory_order_relaxed)) continue;
    if (const uint64_t damaged = check_from(page); damaged != kSound) return damaged;
  }
  return kSound;
}

// One piece, on one thread, because a fault comes to the thread that reads.
template <class Read>
void Snapshot::read_piece(const int64_t* keys, size_t n, Outcome& outcome, const Read& read) {
  uint64_t damaged = kSound;
  const bool was_read = try_read([&] {
    damaged = check_homes(keys, n);
    if (damaged == kSound) read();
  });
  if (!was_read) outcome.was_read.store(false, std::memory_order_relaxed);
  if (damaged != kSound) outcome.damaged.store(damaged, std::memory_order_relaxed);
}

// After the last piece, one check finds out whether the file changed. Waits for the disk are counted only in the
// caller's own pieces.
template <class ReadPiece>
void Snapshot::look_up(const int64_t* keys, size_t n, const ReadPiece& read_piece_of) {
  if (is_cold_.load(std::memory_order_relaxed)) prefetch(keys, n);
  const PageFaults faults(n);
  Outcome outcome;
  do_in_pieces(n, [&](Piece piece) { read_piece_of(piece, outcome); });
  believe(outcome.was_read.load(std::memory_order_relaxed));
  if (const uint64_t damaged = outcome.damaged.load(std::memory_order_relaxed); damaged != kSound)
    raise_damaged(damaged);
  if (faults.have_waited()) is_cold_.store(true, std::memory_order_relaxed);
}

void Snapshot::fetch(const int64_t* keys, size_t n, float* out, bool* found) {
  look_up(keys, n, [&](Piece piece, Outcome& outcome) {
    const int64_t* some = keys + piece.begin;
    read_piece(some, piece.size(), outcome, [&] {
      lookup_loops().fetch(view(), some, piece.size(), out + piece.begin * dim(), found + piece.begin);
    });
  });
}

void Snapshot::fetch_pooled(const int64_t* keys, const Bags& bags, float* out, bool* found) {
  look_up(keys, static_cast<size_t>(bags.row_ptrs[bags.count]), [&](Piece piece, Outcome& outcome) {
    const Piece some = bags_of(bags, piece);
    const int64_t begin = bags.row_ptrs[some.begin], end = bags.row_ptrs[some.end];
    read_piece(keys + begin, static_cast<size_t>(end - begin), outcome, [&] {
      if (some.size()) lookup_loops().fetch_pooled(view(), keys, bags, some.begin, some.end, out, found);
    });
  });
}

void Snapshot::populate(size_t begin, size_t bytes) {
  file_.populate(begin, bytes);
  const uint64_t end = std::min<uint64_t>(begin + bytes, layout_.keys);
  try_read([&] {
    for (uint64_t at = std::max<uint64_t>(begin, layout_.index); at < end; at += kSnapshotPage)
      check_from((at - layout_.index) / kSnapshotPage);
  });
}

void Snapshot::read_rows(uint64_t first, size_t n, int64_t* keys, float* out) const {
  const RowsView rows = view().rows;
  const uint64_t keys_at = layout_.keys + first * sizeof(int64_t), rows_at = layout_.rows + first * rows.stride_bytes;
  check_bytes(keys_at, n * sizeof(int64_t));
  if (out) check_bytes(rows_at, n * rows.stride_bytes);
  guarded([&] {
    std::memcpy(keys, file_.data() + keys_at, n * sizeof(int64_t));
    if (out) lookup_loops().decode(row_type(), file_.data() + rows_at, rows.stride_bytes, dim(), n, out);
  });
}

// Ask for the pages that a lookup of these keys reads, so that the disk reads many pages at a time: first the buckets,
// which say where the rows are, then the rows.
void Snapshot::prefetch(const int64_t* keys, size_t n) {
  const TableView table = view();
  std::vector<uint64_t> pages(n);
  for (size_t i = 0; i < n; ++i) pages[i] = 1 + table.index.home(keys[i]) / kBucketsPerPage;
  bool is_cold = read_soon(pages);
  std::vector<int64_t> numbers(n);
  uint64_t damaged = kSound;
  guarded([&] {
    damaged = check_homes(keys, n);
    if (damaged == kSound) lookup_loops().find(table.index, keys, n, numbers.data());
  });
  if (damaged != kSound) raise_damaged(damaged);
  pages.clear();
  for (const int64_t number : numbers) {
    if (number < 0) continue;
    const uint64_t begin = layout_.rows + static_cast<uint64_t>(number) * table.rows.stride_bytes;
    const uint64_t last = (begin + row_bytes(row_type(), dim()) - 1) / kSnapshotPage;
    for (uint64_t page = begin / kSnapshotPage; page <= last; ++page) pages.push_back(page);
  }
  is_cold |= read_soon(pages);
  is_cold_.store(is_cold, std::memory_order_relaxed);
}

// Ask for pages of the file, unless a sample of them is in memory. Returns whether a page of the sample was not.
bool Snapshot::read_soon(std::vector<uint64_t>& pages) const {
  constexpr size_t kSample = 32;
  const size_t step = std::max<size_t>(pages.size() / kSample, 1);
  bool all_resident = true;
  for (size_t i = 0; i < pages.size() && all_resident; i += step)
    all_resident = file_.is_resident(pages[i] * kSnapshotPage);
  if (all_resident) return false;
  std::sort(pages.begin(), pages.end());
  const auto end = std::unique(pages.begin(), pages.end());
  for (auto at = pages.begin(); at != end;) {
    auto next = at + 1;
    while (next != end && *next == *at + static_cast<uint64_t>(next - at)) ++next;
    file_.will_need(*at * kSnapshotPage, static_cast<size_t>(next - at) * kSnapshotPage);
    at = next;
  }
  return true;
}

}  // namespace hotrow
