// The reading loops for AVX2. Only these functions are compiled for it: the rest of the program runs on any CPU.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "lookup/lanes.hpp"
#include "lookup/lookup.hpp"

#define HOTROW_TARGET __attribute__((target("avx2,f16c")))

namespace hotrow {
namespace {
namespace avx2 {

#if defined(__SANITIZE_THREAD__)
// A vector load is no atomic operation of C++. On x86 each of its aligned eight-byte lanes is read whole and in order
// with other loads. That is enough: atomic loads confirm a match (Bucket::row_of and row_at_one_look), and a key that
// is present all the time is seen. The thread sanitizer knows only C++, so it skips this load.
#define HOTROW_PROBE HOTROW_TARGET __attribute__((no_sanitize("thread"), noinline))
#else
#define HOTROW_PROBE HOTROW_TARGET inline
#endif

HOTROW_PROBE unsigned matches(const Bucket& bucket, int64_t key) {
  const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(&bucket.keys[0]));
  const __m256i equal = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(key));
  const unsigned fifth = bucket.keys[4].load(std::memory_order_relaxed) == key;
  const unsigned slots = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) | fifth << 4;
  std::atomic_signal_fence(std::memory_order_acquire);  // keep the compiler from moving later loads up; x86 does not
  return slots;
}

HOTROW_TARGET inline Lane8 from_halves(const std::byte* halves) {
  return reinterpret_cast<Lane8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))));
}

// GCC splits narrow vectors into numbers before it widens them.
HOTROW_TARGET inline Lane8 from_upper_halves(const std::byte* halves) {
  const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
  return reinterpret_cast<Lane8>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}

HOTROW_TARGET inline Lane8 from_signed_bytes(const int8_t* bytes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return reinterpret_cast<Lane8>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
}

HOTROW_TARGET inline Lane8 from_bytes(const uint8_t* bytes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return reinterpret_cast<Lane8>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)));
}

#include "lookup/lookup_loops.inl"

}  // namespace avx2
}  // namespace

const LookupLoops& avx2_loops() {
  static constexpr LookupLoops loops{
      "avx2",          avx2::first_outside,    avx2::find,          avx2::holds,
      avx2::fetch_any, avx2::fetch_pooled_any, avx2::pool_rows_any, avx2::decode_any};
  return loops;
}

}  // namespace hotrow

#endif
