// Zeroed memory straight from the system: aligned, on huge pages if the system has them, already touched.
//
// Every page is touched at construction, by several threads. The first touch of a huge page clears 2 MiB while the
// thread waits, so an arena that is first touched while it serves would slow down the slowest answers.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#include "memory/pages.hpp"

namespace hotrow {

class HugeArray {
 public:
  // Throws std::bad_alloc when the system refuses. With `lent`: memory of at least so many bytes that another owns.
  explicit HugeArray(size_t bytes, std::byte* lent = nullptr)
      : data_(lent), bytes_(rounded(bytes)), is_lent_(lent != nullptr) {
    if (is_lent_) return;
    const size_t slack = bytes_ >= kHugePage ? kHugePage : 0;  // to start on a huge-page border
    void* mapped = mmap(nullptr, bytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* first = static_cast<std::byte*>(mapped);
    const size_t skipped = slack ? (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage : 0;
    data_ = first + skipped;
    if (skipped) munmap(first, skipped);
    if (slack > skipped) munmap(data_ + bytes_, slack - skipped);
    if (slack) prepare_pages(data_, bytes_);
    for_parts(data_, bytes_, [](std::byte* part, size_t bytes) {
      for (size_t at = 0; at < bytes; at += kPage) *reinterpret_cast<volatile std::byte*>(part + at) = std::byte{0};
    });
  }

  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  ~HugeArray() {
    if (!is_lent_) munmap(data_, bytes_);
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // What an array of `bytes` bytes takes from the system.
  static size_t rounded(size_t bytes) {
    const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
    return (bytes + unit - 1) / unit * unit + (bytes == 0 ? unit : 0);
  }

 private:
  std::byte* data_;
  size_t bytes_;
  const bool is_lent_;
};

}  // namespace hotrow
