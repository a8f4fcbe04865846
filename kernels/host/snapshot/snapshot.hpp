// One table's rows in a file that is mapped read-only (snapshot_format.hpp), read by the host table's own loops.
//
// Every method may be called from any thread. Nothing is ever written, so there are no epochs. If the file is
// truncated, written to or unreadable, calls fail with FileFault. They never end the process (mapped_reads.hpp) and
// never return a row of such a file, because each call checks for changes after it read the rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lookup/lookup.hpp"
#include "memory/mapped_file.hpp"
#include "memory/mapped_reads.hpp"
#include "snapshot/snapshot_format.hpp"

namespace hotrow {

class Snapshot {
 public:
  static constexpr bool kReadsMayWait = true;  // for the disk

  // Throws FileFault, std::bad_alloc.
  explicit Snapshot(const std::string& path);

  uint32_t dim() const { return header_.dim; }
  RowType row_type() const { return static_cast<RowType>(header_.row_type); }
  uint64_t rows() const { return header_.rows; }
  const std::string& path() const { return file_.path(); }
  const SnapshotHeader& header() const { return header_; }
  size_t file_bytes() const { return file_.bytes(); }

  // See HostTable. After a FileFault `out` and `found` are undefined.
  void fetch(const int64_t* keys, size_t n, float* out, bool* found);
  void fetch_pooled(const int64_t* keys, const Bags& bags, float* out, bool* found);

  // Keys and, unless `out` is null, rows by number: [first, first + n) -> keys[n], out[n][dim]. first + n <= rows().
  // Checks their pages: a copy of the whole table must not spread damage.
  void read_rows(uint64_t first, size_t n, int64_t* keys, float* out) const;

  // Bring a part of the file into memory (MappedFile::populate) and check its pages of the index, so that lookups need
  // not. Lookups report damaged pages.
  void populate(size_t begin, size_t bytes);

  // Read the whole index. Throws FileFault if a page is damaged.
  void check_index();

  // Also read all keys and rows, and find every key in its place.
  void check_content();

 private:
  static constexpr uint64_t kSound = UINT64_MAX;  // no page is damaged

  // The result of the pieces of one lookup. Relaxed: the end of the last piece publishes it.
  struct Outcome {
    std::atomic<bool> was_read{true};
    std::atomic<uint64_t> damaged{kSound};
  };

  TableView view() const;
  const uint32_t* checksums() const { return at<const uint32_t>(layout_.checksums); }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(file_.data() + offset);
  }
  // Run `read`, which keeps the rules of read_mapped; false if the file could not be read.
  template <class Read>
  bool try_read(const Read& read) const {
    return read_mapped(file_.data(), file_.bytes(), read);
  }
  // As above, and trust what it read.
  template <class Read>
  void guarded(const Read& read) const {
    believe(try_read(read));
  }
  void believe(bool was_read) const;

  bool has_checksum(uint64_t page) const;
  bool is_sound(uint64_t page) const;
  bool leads_on(uint64_t page) const;
  uint64_t check_from(uint64_t page);
  void mark_checked(uint64_t page);
  uint64_t check_homes(const int64_t* keys, size_t n);
  template <class Read>
  void read_piece(const int64_t* keys, size_t n, Outcome& outcome, const Read& read);
  template <class ReadPiece>
  void look_up(const int64_t* keys, size_t n, const ReadPiece& read_piece_of);
  template <class IsRight>
  uint64_t first_damaged(uint64_t begin, uint64_t end, const IsRight& is_right) const;
  void check_pages(uint64_t begin, uint64_t end) const;
  void check_bytes(uint64_t at, uint64_t bytes) const;
  uint64_t keys_in(uint64_t page) const;
  void check_numbers() const;
  [[noreturn]] void fail(const std::string& reason) const;
  [[noreturn]] void raise_damaged(uint64_t page) const;

  void prefetch(const int64_t* keys, size_t n);
  bool read_soon(std::vector<uint64_t>& pages) const;

  const MappedFile file_;
  const SnapshotHeader header_;
  const KeyHash hash_;
  const SnapshotLayout layout_;
  // Whether each page of the index was found sound. A probe that begins in a sound page meets only sound pages.
  // Relaxed: nobody writes the pages.
  const std::unique_ptr<std::atomic<bool>[]> is_checked_;
  std::atomic<uint64_t> unchecked_pages_;
  // Whether the last lookup that checked met pages that are not in memory. Then the next lookup prefetches. Relaxed: it
  // is a guess.
  std::atomic<bool> is_cold_{true};
};

}  // namespace hotrow
