// A snapshot: one embedding table in a file that is mapped and read in place. Everything is little-endian.
//
//   header      4,096 bytes   SnapshotHeader, then zeros
//   index       64 B          B buckets exactly as in bucket.hpp: key -> row number, 0 to V - 1
//   keys        8 C           int64 keys by row number; serving never reads them
//   rows        (C + 1) S     rows of row_type.hpp, S bytes apart, by row number; the last row, of absent keys, is 0
//   checksums   4 P           CRC-32 of each of the P pages of index, keys and rows, in this order
//
// The file has V rows and capacity for C; C is greater if the writer expected more rows than it got. Each section
// begins on a page of 4,096 bytes and is padded with zeros to whole pages. All offsets and the file's size follow from
// the header, so a truncated file is found at once.
//
// Checks. Opening checks the header by its CRC-32, the file's size, and the checksums of the index's
// pages by their CRC-32 in the header: 0.1 % of the index. The first lookup that reads a page of the index checks the
// page's checksum and contents (is_sound in snapshot.cpp) before it uses them. So a table of any size opens in the time
// of a few page reads, and a damaged index never gives a wrong row. Rows and keys are checked on demand and when they
// are read by number, as for a load; lookups do not check them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows/row_type.hpp"
#include "snapshot/crc32.hpp"
#include "table/bucket.hpp"

namespace hotrow {

constexpr size_t kSnapshotPage = 4096;
constexpr size_t kBucketsPerPage = kSnapshotPage / sizeof(Bucket);
constexpr char kSnapshotMagic[8] = {'H', 'R', 'S', 'N', 'A', 'P', '\r', '\n'};  // a copy in text mode changes it
constexpr uint32_t kSnapshotFormat = 2;
constexpr uint32_t kUnseededSnapshotFormat = 1;  // its header ends before the seed
constexpr size_t kSourceBytes = 32;
constexpr uint64_t kMostSnapshotRows = 3'500'000'000;  // as in a host table
constexpr uint32_t kMostSnapshotDim = 1u << 16;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are read as they lie");

struct SnapshotHeader {
  char magic[8];
  uint32_t format;
  uint32_t header_checksum;   // CRC-32 of this structure, with 0 here
  uint32_t dim;
  uint32_t row_type;          // RowType
  uint32_t key_bytes;         // 8
  uint32_t index_checksum;    // CRC-32 of the checksums of the index's pages
  uint32_t content_checksum;  // CRC-32 of the checksums of the pages of keys and rows
  uint32_t unused;            // 0
  uint64_t rows;              // V
  uint64_t capacity_rows;     // C
  uint64_t bucket_count;      // B
  unsigned char source[kSourceBytes];  // names the source of the rows
  uint64_t seed;              // of the index's hash; 0 in format 1, which has zeros here

  uint32_t checksum() const {
    SnapshotHeader copy = *this;
    copy.header_checksum = 0;
    return crc32(&copy, format == kUnseededSnapshotFormat ? offsetof(SnapshotHeader, seed) : sizeof copy);
  }
};
static_assert(sizeof(SnapshotHeader) == 104, "no padding that nobody sets");

// Where the sections lie, in bytes from the file's beginning.
struct SnapshotLayout {
  uint64_t index, keys, rows, checksums, file_bytes;

  static constexpr uint64_t whole_pages(uint64_t bytes) {
    return (bytes + kSnapshotPage - 1) / kSnapshotPage * kSnapshotPage;
  }

  SnapshotLayout(uint32_t dim, RowType row_type, uint64_t capacity_rows, uint64_t bucket_count) {
    index = kSnapshotPage;
    keys = index + whole_pages(bucket_count * sizeof(Bucket));
    rows = keys + whole_pages(capacity_rows * sizeof(int64_t));
    checksums = rows + whole_pages((capacity_rows + 1) * row_stride_bytes(row_type, dim));
    file_bytes = checksums + pages() * sizeof(uint32_t);
  }

  uint64_t pages() const { return (checksums - index) / kSnapshotPage; }
  uint64_t index_pages() const { return (keys - index) / kSnapshotPage; }
};

}  // namespace hotrow
