// The reading loops in plain C++, for any CPU, and the choice between them and the AVX2 ones.
#include <cstdlib>
#include <cstring>

#include "lookup.hpp"

#define HOTROW_TARGET

namespace hotrow {
namespace {
namespace portable {

inline unsigned matches(const Bucket& bucket, int64_t key) {
  unsigned slots = 0;
  // acquire: a key seen is followed by the row it was published with.
  for (int slot = 0; slot < kSlots; ++slot)
    slots |= static_cast<unsigned>(bucket.keys[slot].load(std::memory_order_acquire) == key) << slot;
  return slots;
}

#include "lookup_loops.inl"

}  // namespace portable

const LookupLoops* chosen(bool avx2) {
#if defined(__x86_64__)
  if (avx2 && __builtin_cpu_supports("avx2")) return &avx2_loops();
#else
  (void)avx2;
#endif
  return &portable_loops();
}

bool avx2_is_allowed() {
  const char* disabled = std::getenv("HOTROW_DISABLE_AVX2");
  return !disabled || std::strcmp(disabled, "1") != 0;
}

// Written by tests only; relaxed, as both choices are right at any time.
std::atomic<const LookupLoops*>& current() {
  static std::atomic<const LookupLoops*> loops{chosen(avx2_is_allowed())};
  return loops;
}

}  // namespace

const LookupLoops& portable_loops() {
  static constexpr LookupLoops loops{"portable",          portable::first_reserved,   portable::find,
                                     portable::fetch_any, portable::fetch_pooled_any, portable::pool_rows_any};
  return loops;
}

const LookupLoops& lookup_loops() { return *current().load(std::memory_order_relaxed); }

bool use_avx2(bool enabled) {
  current().store(chosen(enabled), std::memory_order_relaxed);
  return &lookup_loops() != &portable_loops();
}

}  // namespace hotrow
