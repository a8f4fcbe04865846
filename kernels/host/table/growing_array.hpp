// Zeroed memory that grows without a copy: the system moves its pages to a larger range of addresses.
//
// So a table that doubles needs no memory for the old and the new array at the same time, and room that nothing has
// written yet takes no memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "memory/pages.hpp"

namespace hotrow {

template <class T>
class GrowingArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  GrowingArray() = default;
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;
  GrowingArray(GrowingArray&& other) noexcept { swap(other); }
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    GrowingArray(std::move(other)).swap(*this);
    return *this;
  }
  ~GrowingArray() {
    if (data_) munmap(data_, bytes_);
  }

  // Make room for `count` items. Items keep their values, and move. Throws std::bad_alloc when the system refuses.
  void reserve(size_t count) {
    if (count * sizeof(T) > bytes_) grow(std::max(count * sizeof(T), 2 * bytes_));
  }

  T* data() const { return reinterpret_cast<T*>(data_); }
  T& operator[](size_t item) const { return data()[item]; }

 private:
  void swap(GrowingArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void grow(size_t needed) {
    const size_t unit = needed >= kHugePage ? kHugePage : kPage;
    const size_t bytes = (needed + unit - 1) / unit * unit;
    // The new range begins on a huge-page border. It is reserved first, so nothing else can take it.
    void* reserved = mmap(nullptr, bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) throw std::bad_alloc();
    auto* first = static_cast<std::byte*>(reserved);
    const size_t skipped = (unit - reinterpret_cast<uintptr_t>(first) % unit) % unit;
    std::byte* target = first + skipped;
    if (skipped) munmap(first, skipped);
    munmap(target + bytes, unit - skipped);
    const void* grown =
        data_ ? mremap(data_, bytes_, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target)
              : mmap(target, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    // A failed call may have given the range back, so it may be another thread's now. It is left alone.
    if (grown == MAP_FAILED) throw std::bad_alloc();
    if (unit == kHugePage) prepare_pages(target, bytes);
    data_ = target;
    bytes_ = bytes;
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hotrow
