// The hash of keys. Clients choose the keys, so it has a secret: without the secret nobody can choose keys that share a
// bucket.
#pragma once

#include <cstdint>
#include <random>

namespace hotrow {

// Map a 64-bit hash to [0, bucket_count) without a division (Lemire's fastrange).
inline uint64_t fastrange(uint64_t hash, uint64_t bucket_count) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * bucket_count) >> 64);
}

// Spreads a key over 64 bits. fastrange uses the upper bits, so those must depend on every bit of the key: the first
// shift brings the upper half down for ids such as (slot << 40 | id), the multiplications carry everything up.
//
// The secret is both factors. Each step is a bijection, so two keys differ before the last multiplication; with a
// random odd factor the upper bits of their products then agree with a probability of at most 2 / buckets (Dietzfelbinger
// et al., 1997). The first factor hides what a set of keys looks like before the last multiplication.
struct KeyHash {
  uint64_t first_factor, last_factor;  // odd

  // 0 stands for the fixed factors of files that were written before there was a seed.
  explicit KeyHash(uint64_t seed)
      : first_factor(seed ? spread(seed) | 1 : 0x9E3779B97F4A7C15u),
        last_factor(seed ? spread(~seed) | 1 : 0xD6E8FEB86659FD93u) {}

  uint64_t operator()(int64_t key) const {
    uint64_t h = static_cast<uint64_t>(key);
    h ^= h >> 32;
    h *= first_factor;
    h ^= h >> 29;
    h *= last_factor;
    return h;
  }

 private:
  // splitmix64.
  static uint64_t spread(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
};

// From the system's random numbers; never 0. Each table draws its own: rows that are read in the order of one table's
// buckets and written into a smaller table with the same hash would fill it from one end.
inline uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace hotrow
