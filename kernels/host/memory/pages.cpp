#include "memory/pages.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hotrow {
namespace {

#if defined(__linux__)
// A lookup reads rows at random, so every core reads from every node. One node alone would limit the bandwidth, and
// could run out of memory.
void spread_over_nodes(std::byte* data, size_t bytes) {
  constexpr size_t kMostNodes = 1024, kBits = 8 * sizeof(unsigned long);
  int policy = MPOL_DEFAULT;
  unsigned long nodes[kMostNodes / kBits] = {};
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0) return;
  if (policy != MPOL_DEFAULT) return;  // the operator chose another, such as with numactl
  if (syscall(SYS_get_mempolicy, nullptr, nodes, kMostNodes, nullptr, MPOL_F_MEMS_ALLOWED) != 0) return;
  int count = 0;
  for (const unsigned long some : nodes) count += __builtin_popcountl(some);
  if (count > 1) syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, nodes, kMostNodes + 1, 0);
}
#else
void spread_over_nodes(std::byte*, size_t) {}
#endif

}  // namespace

std::byte* grown_pages(std::byte* data, size_t bytes, size_t grown_bytes) {
  const size_t unit = grown_bytes >= kHugePage ? kHugePage : kPage;
  // The new range begins on a huge-page border. It is reserved first, so nothing else can take it.
  void* reserved = mmap(nullptr, grown_bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<std::byte*>(reserved);
  const size_t skipped = (unit - reinterpret_cast<uintptr_t>(first) % unit) % unit;
  std::byte* target = first + skipped;
  if (skipped) munmap(first, skipped);
  munmap(target + grown_bytes, unit - skipped);
  const void* grown =
      data ? mremap(data, bytes, grown_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target)
           : mmap(target, grown_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  // A failed call may have given the range back, so it may be another thread's now. It is left alone.
  if (grown == MAP_FAILED) throw std::bad_alloc();
  if (unit == kHugePage) prepare_pages(target, grown_bytes);
  return target;
}

bool gives_way() {
#if defined(__linux__)
  return getpriority(PRIO_PROCESS, 0) > getpriority(PRIO_PROCESS, getpid());  // 0 is the calling thread
#else
  return false;
#endif
}

void prepare_pages(std::byte* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  spread_over_nodes(data, bytes);
}

}  // namespace hotrow
