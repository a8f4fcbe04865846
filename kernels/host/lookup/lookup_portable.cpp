// The reading loops in plain C++, for any CPU, and the choice between them and the AVX2 ones.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "lookup/lanes.hpp"
#include "lookup/lookup.hpp"

#define HOTROW_TARGET
#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as return values: the functions are inlined

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

// Doubles the width step by step and converts signed numbers to floats, as vector instructions do. GCC splits a
// conversion in one step into single numbers.
typedef int16_t Short8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t Int8 __attribute__((vector_size(32)));

// from_half, eight times.
inline Lane8 from_halves(const std::byte* halves) {
  const Short8& shorts = *reinterpret_cast<const Short8*>(halves);
  const auto bits = reinterpret_cast<Words8>(__builtin_convertvector(shorts, Int8));  // the upper halves do not matter
  const Words8 moved = (bits & 0x7FFF) << 13;
  const auto size = reinterpret_cast<Words8>(reinterpret_cast<Lane8>(moved) * 0x1p112f);
  // All bits or none. GCC would split a comparison into single numbers.
  const Int8 is_finite = (reinterpret_cast<Int8>(moved) - 0x0F800000) >> 31;
  const auto special = reinterpret_cast<Words8>(~is_finite) & 0x7F800000;
  return reinterpret_cast<Lane8>(size | special | (bits & 0x8000) << 16);
}

inline Lane8 from_upper_halves(const std::byte* halves) {
  return reinterpret_cast<Lane8>(__builtin_convertvector(*reinterpret_cast<const Halves8*>(halves), Words8) << 16);
}

inline Lane8 from_shorts(const Short8& shorts) {
  return __builtin_convertvector(__builtin_convertvector(shorts, Int8), Lane8);
}

inline Lane8 from_signed_bytes(const int8_t* bytes) {
  return from_shorts(__builtin_convertvector(*reinterpret_cast<const SignedBytes8*>(bytes), Short8));
}

inline Lane8 from_bytes(const uint8_t* bytes) {
  return from_shorts(__builtin_convertvector(*reinterpret_cast<const Bytes8*>(bytes), Short8));
}

#include "lookup/lookup_loops.inl"

}  // namespace portable

#if defined(__x86_64__)
// Whether the CPU has F16C. Some compilers' __builtin_cpu_supports does not know the name.
bool converts_halves() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const LookupLoops* chosen(bool avx2) {
#if defined(__x86_64__)
  if (avx2 && __builtin_cpu_supports("avx2") && converts_halves()) return &avx2_loops();
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
  static constexpr LookupLoops loops{
      "portable",          portable::first_outside,    portable::find,          portable::holds,
      portable::fetch_any, portable::fetch_pooled_any, portable::pool_rows_any, portable::decode_any};
  return loops;
}

const LookupLoops& lookup_loops() { return *current().load(std::memory_order_relaxed); }

bool use_avx2(bool enabled) {
  current().store(chosen(enabled), std::memory_order_relaxed);
  return &lookup_loops() != &portable_loops();
}

}  // namespace hotrow
