// How a large mapping gets its pages: huge if the system has them, on all NUMA nodes, and by several threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "lookup/core_pool.hpp"

namespace hotrow {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

// How many bytes the system gives for `bytes` bytes.
constexpr size_t whole_units(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}

// Move a mapping to a larger range of addresses. Its pages move, and nothing is copied. New pages are zeros. Without
// `data`, the mapping is new. Both sizes are whole units. Throws std::bad_alloc if the system refuses.
std::byte* grown_pages(std::byte* data, size_t bytes, size_t grown_bytes);

// Choose the pages of a mapping that has none yet. The system may refuse; any page works.
void prepare_pages(std::byte* data, size_t bytes);

// Whether the calling thread has a lower priority than the process: it gives way to threads that answer requests.
bool gives_way();

// Call work(data, bytes) for each part of the memory, from several threads if there is much of it. A thread that gives
// way works alone: the pool's threads have the priority of lookups, and lookups need them.
template <class Work>
void for_parts(std::byte* data, size_t bytes, const Work& work) {
  constexpr size_t kPart = size_t{64} << 20;
  if (gives_way()) return work(data, bytes);
  CorePool::shared().run((bytes + kPart - 1) / kPart, [&](size_t part) {
    work(data + part * kPart, std::min(kPart, bytes - part * kPart));
  });
}

}  // namespace hotrow
