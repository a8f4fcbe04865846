// Zeroed memory straight from the system: aligned, on huge pages if the system has them, already touched.
//
// Every page is touched at construction, by several threads. The first touch of a huge page clears 2 MiB while the
// thread waits, so an arena that is first touched while it serves would slow down the slowest answers.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "memory/pages.hpp"

namespace hotrow {

class HugeArray {
 public:
  // Throws std::bad_alloc when the system refuses. With `lent`: memory of at least so many bytes that another owns.
  explicit HugeArray(size_t bytes, std::byte* lent = nullptr)
      : data_(lent), bytes_(rounded(bytes)), is_lent_(lent != nullptr) {
    if (is_lent_) return;
    data_ = grown_pages(nullptr, 0, bytes_);
    touch(0);
  }

  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  ~HugeArray() {
    if (!is_lent_) munmap(data_, bytes_);
  }

  // Make the array larger. Its pages move without a copy, see grown_pages. Throws std::bad_alloc. Not for lent memory.
  void grow(size_t bytes) {
    const size_t before = bytes_;
    data_ = grown_pages(data_, before, rounded(bytes));
    bytes_ = rounded(bytes);
    touch(before);
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // What an array of `bytes` bytes takes from the system.
  static size_t rounded(size_t bytes) {
    return whole_units(std::max<size_t>(bytes, 1));
  }

 private:
  void touch(size_t first) {
    for_parts(data_ + first, bytes_ - first, [](std::byte* part, size_t bytes) {
      for (size_t at = 0; at < bytes; at += kPage) *reinterpret_cast<volatile std::byte*>(part + at) = std::byte{0};
    });
  }

  std::byte* data_;
  size_t bytes_;
  const bool is_lent_;
};

}  // namespace hotrow
