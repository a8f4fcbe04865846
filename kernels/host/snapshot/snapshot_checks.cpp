// Checks of a whole snapshot: whether it has the bytes that were written. snapshot.cpp checks what lookups read.
#include <algorithm>
#include <vector>

#include "lookup/lookup.hpp"
#include "snapshot/snapshot.hpp"

namespace hotrow {
namespace {

constexpr size_t kWindowPages = 512;  // read ahead of a walk through the file: 2 MiB

}  // namespace

// The first page of [begin, end) that `is_right` refuses, or kSound. Reads in order, and the disk reads ahead.
template <class IsRight>
uint64_t Snapshot::first_damaged(uint64_t begin, uint64_t end, const IsRight& is_right) const {
  uint64_t damaged = kSound;
  for (uint64_t at = begin; at < end && damaged == kSound; at += kWindowPages) {
    file_.will_need((at + 1) * kSnapshotPage, std::min(2 * kWindowPages, end - at) * kSnapshotPage);
    guarded([&] {
      for (uint64_t page = at; page < std::min(at + kWindowPages, end) && damaged == kSound; ++page)
        if (!is_right(page)) damaged = page;
    });
  }
  return damaged;
}

// Raise if a page of [begin, end) is damaged.
void Snapshot::check_pages(uint64_t begin, uint64_t end) const {
  const uint64_t damaged = first_damaged(begin, end, [&](uint64_t page) { return has_checksum(page); });
  if (damaged != kSound) raise_damaged(damaged);
}

// As above, for the pages of a part of the file. The header's page has no number.
void Snapshot::check_bytes(uint64_t at, uint64_t bytes) const {
  check_pages(at / kSnapshotPage - 1, SnapshotLayout::whole_pages(at + bytes) / kSnapshotPage - 1);
}

uint64_t Snapshot::keys_in(uint64_t page) const {
  const Bucket* buckets = view().index.buckets;
  const uint64_t end = std::min((page + 1) * kBucketsPerPage, header_.bucket_count);
  uint64_t keys = 0;
  for (uint64_t b = page * kBucketsPerPage; b < end; ++b)
    for (const auto& key : buckets[b].keys) keys += key.load(std::memory_order_relaxed) != kEmpty;
  return keys;
}

void Snapshot::check_index() {
  const uint64_t pages = layout_.index_pages();
  uint64_t keys = 0;
  const uint64_t damaged = first_damaged(0, pages, [&](uint64_t page) {
    keys += keys_in(page);
    return is_sound(page);
  });
  if (damaged != kSound) raise_damaged(damaged);
  if (keys != rows()) fail("its index has " + std::to_string(keys) + " keys, expected " + std::to_string(rows()));
  for (uint64_t page = 0; page < pages; ++page) mark_checked(page);
}

void Snapshot::check_content() {
  check_index();
  const uint64_t begin = layout_.index_pages(), end = layout_.pages();
  file_.will_need(layout_.checksums, end * sizeof(uint32_t));
  uint32_t checksum = 0;
  guarded([&] { checksum = crc32(checksums() + begin, (end - begin) * sizeof(uint32_t)); });
  if (checksum != header_.content_checksum) fail("the checksums of its rows are damaged");
  check_pages(begin, end);
  check_numbers();
}

// Every key is found with its number, and absent keys read zeros.
void Snapshot::check_numbers() const {
  constexpr size_t kKeys = 8192;
  const TableView table = view();
  std::vector<int64_t> keys(kKeys), numbers(kKeys);
  for (uint64_t first = 0; first < rows(); first += kKeys) {
    const size_t n = std::min<uint64_t>(kKeys, rows() - first);
    read_rows(first, n, keys.data(), nullptr);
    guarded([&] { lookup_loops().find(table.index, keys.data(), n, numbers.data()); });
    for (size_t i = 0; i < n; ++i)
      if (numbers[i] != static_cast<int64_t>(first + i))
        fail("row " + std::to_string(first + i) + " is not the row of its key " + std::to_string(keys[i]));
  }
  bool is_zero = true;
  guarded([&] {
    for (size_t at = 0; at < table.rows.stride_bytes; ++at) is_zero &= table.rows.at(kNoRow)[at] == std::byte{0};
  });
  if (!is_zero) fail("the row of absent keys is not zero");
}

}  // namespace hotrow
