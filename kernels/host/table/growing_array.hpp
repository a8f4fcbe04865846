// Zeroed memory that grows without a copy: the system moves its pages to a larger range of addresses.
//
// So a table that doubles needs no memory for the old and the new array at the same time, and room that nothing has
// written yet takes no memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

  // Give room beyond `count` items back to the system.
  void shrink(size_t count) {
    const size_t kept = std::max(whole_units(count * sizeof(T)), kPage);
    if (kept >= bytes_) return;
    munmap(data_ + kept, bytes_ - kept);
    bytes_ = kept;
  }

  T* data() const { return reinterpret_cast<T*>(data_); }
  T& operator[](size_t item) const { return data()[item]; }

 private:
  void swap(GrowingArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void grow(size_t needed) {
    const size_t bytes = whole_units(needed);
    data_ = grown_pages(data_, bytes_, bytes);
    bytes_ = bytes;
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hotrow
