// Writes a snapshot (snapshot_format.hpp) into an open file, from beginning to end, except the header, which comes
// last: an unfinished file has no header.
//
// It takes the memory of the index, 26 bytes per row, and a megabyte. One thread at a time may use it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "rows/row_encode.hpp"
#include "snapshot/snapshot_format.hpp"
#include "table/bucket_index.hpp"

namespace hotrow {

// A key that was written before.
struct RepeatedKey {
  int64_t key;
};

class SnapshotWriter {
 public:
  // Writes to `descriptor`, which stays the caller's, room for `capacity_rows` rows: 1 <= dim <= kMostSnapshotDim,
  // capacity_rows <= kMostSnapshotRows. Throws std::bad_alloc.
  SnapshotWriter(int descriptor, uint32_t dim, uint64_t capacity_rows, RowType row_type);

  uint32_t dim() const { return dim_; }
  uint64_t rows() const { return rows_; }
  uint64_t room() const { return capacity_rows_ - rows_; }
  RowType row_type() const { return row_type_; }

  // The next rows. No key is reserved, n <= room(). Throws RepeatedKey, UnfitValue, std::system_error; the snapshot is
  // then of no use.
  void append(const int64_t* keys, const float* rows, size_t n);

  // Write the rest. `source` (kSourceBytes) names the source of the rows. Throws std::system_error.
  void finish(const unsigned char* source);

 private:
  // Pages that are written in order from an offset on, and their checksums.
  class Pages {
   public:
    Pages(int descriptor, uint64_t offset) : descriptor_(descriptor), offset_(offset), pending_(new std::byte[kBytes]) {}
    void write(const void* data, size_t bytes);
    void fill(uint64_t end);  // zeros up to this offset
    const std::vector<uint32_t>& checksums() const { return checksums_; }

   private:
    static constexpr size_t kBytes = size_t{1} << 20;
    void flush();

    int descriptor_;
    uint64_t offset_;  // of the pending bytes
    size_t pending_bytes_ = 0;
    std::unique_ptr<std::byte[]> pending_;
    std::vector<uint32_t> checksums_;
  };

  SnapshotHeader make_header(const std::vector<uint32_t>& checksums, const unsigned char* source) const;

  const int descriptor_;
  const uint32_t dim_;
  const RowType row_type_;
  const uint64_t capacity_rows_;
  const SnapshotLayout layout_;
  BucketIndex index_;
  Pages keys_;
  Pages row_pages_;
  uint64_t rows_ = 0;
};

}  // namespace hotrow
