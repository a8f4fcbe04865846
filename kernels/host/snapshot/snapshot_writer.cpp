#include "snapshot/snapshot_writer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace hotrow {
namespace {

void write_at(int descriptor, const void* data, size_t bytes, uint64_t offset) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = pwrite(descriptor, at, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw std::system_error(written < 0 ? errno : ENOSPC, std::generic_category());
    at += written;
    bytes -= static_cast<size_t>(written);
    offset += static_cast<uint64_t>(written);
  }
}

}  // namespace

void SnapshotWriter::Pages::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const size_t part = std::min(bytes, kBytes - pending_bytes_);
    std::memcpy(pending_.get() + pending_bytes_, at, part);
    pending_bytes_ += part;
    at += part;
    bytes -= part;
    if (pending_bytes_ == kBytes) flush();
  }
}

void SnapshotWriter::Pages::fill(uint64_t end) {
  static constexpr std::byte zeros[kSnapshotPage] = {};
  for (uint64_t left = end - (offset_ + pending_bytes_); left > 0;) {
    const size_t part = std::min<uint64_t>(left, sizeof zeros);
    write(zeros, part);
    left -= part;
  }
  flush();
}

void SnapshotWriter::Pages::flush() {
  for (size_t at = 0; at < pending_bytes_; at += kSnapshotPage)
    checksums_.push_back(crc32(pending_.get() + at, kSnapshotPage));
  write_at(descriptor_, pending_.get(), pending_bytes_, offset_);
  offset_ += pending_bytes_;
  pending_bytes_ = 0;
}

SnapshotWriter::SnapshotWriter(int descriptor, uint32_t dim, uint64_t capacity_rows, RowType row_type)
    : descriptor_(descriptor),
      dim_(dim),
      row_type_(row_type),
      capacity_rows_(capacity_rows),
      layout_(dim, row_type, capacity_rows, BucketIndex::buckets_for(capacity_rows)),
      index_(capacity_rows),
      keys_(descriptor, layout_.keys),
      row_pages_(descriptor, layout_.rows) {}

void SnapshotWriter::append(const int64_t* keys, const float* rows, size_t n) {
  constexpr size_t kBlockRows = 64;
  constexpr size_t kAhead = 32;
  const size_t bytes = row_bytes(row_type_, dim_), stride = row_stride_bytes(row_type_, dim_);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) index_.prefetch(keys[i + kAhead]);
    if (index_.find(keys[i])) throw RepeatedKey{keys[i]};
    index_.insert(keys[i], static_cast<uint32_t>(rows_ + i));
  }
  keys_.write(keys, n * sizeof(int64_t));
  std::vector<std::byte> encoded(kBlockRows * bytes), row(stride);
  for (size_t begin = 0; begin < n; begin += kBlockRows) {
    const size_t count = std::min(kBlockRows, n - begin);
    if (auto unfit = encode_rows(row_type_, rows + begin * dim_, dim_, count, encoded.data())) {
      unfit->row += begin;
      throw *unfit;
    }
    if (bytes == stride) {
      row_pages_.write(encoded.data(), count * bytes);
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(row.data(), encoded.data() + i * bytes, bytes);
      row_pages_.write(row.data(), stride);
    }
  }
  rows_ += n;
}

SnapshotHeader SnapshotWriter::make_header(const std::vector<uint32_t>& checksums, const unsigned char* source) const {
  SnapshotHeader header = {};
  std::memcpy(header.magic, kSnapshotMagic, sizeof header.magic);
  header.format = kSnapshotFormat;
  header.dim = dim_;
  header.row_type = static_cast<uint32_t>(row_type_);
  header.key_bytes = sizeof(int64_t);
  const uint64_t index_pages = layout_.index_pages();
  header.index_checksum = crc32(checksums.data(), index_pages * sizeof(uint32_t));
  header.content_checksum =
      crc32(checksums.data() + index_pages, (checksums.size() - index_pages) * sizeof(uint32_t));
  header.rows = rows_;
  header.capacity_rows = capacity_rows_;
  header.bucket_count = index_.bucket_count();
  header.seed = index_.seed();
  std::memcpy(header.source, source, kSourceBytes);
  header.header_checksum = header.checksum();
  return header;
}

void SnapshotWriter::finish(const unsigned char* source) {
  keys_.fill(layout_.rows);
  row_pages_.fill(layout_.checksums);
  Pages index(descriptor_, layout_.index);
  index.write(index_.view().buckets, index_.bucket_count() * sizeof(Bucket));
  index.fill(layout_.keys);
  std::vector<uint32_t> checksums = index.checksums();
  checksums.insert(checksums.end(), keys_.checksums().begin(), keys_.checksums().end());
  checksums.insert(checksums.end(), row_pages_.checksums().begin(), row_pages_.checksums().end());
  write_at(descriptor_, checksums.data(), checksums.size() * sizeof(uint32_t), layout_.checksums);

  std::byte page[kSnapshotPage] = {};
  const SnapshotHeader header = make_header(checksums, source);
  std::memcpy(page, &header, sizeof header);
  write_at(descriptor_, page, sizeof page, 0);
}

}  // namespace hotrow
