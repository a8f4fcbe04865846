// Hashes of the values of features. They have the bits of the published algorithms on every machine.
//
//   fingerprint64      FarmHash's Fingerprint64: tf.strings.to_hash_bucket_fast, Keras Hashing without a salt
//   siphash64          SipHash-2-4: tf.strings.to_hash_bucket_strong, Keras Hashing with a salt
//   murmur3_64         the first half of MurmurHash3_x64_128 with seed 0
//   xxh64              XXH64 with seed 0
//   cross              TensorFlow's FingerprintCat64: tf.sparse.cross_hashed, Keras HashedCrossing
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

namespace hotrow {
namespace hashes {

inline uint64_t load64(const char* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

inline uint32_t load32(const char* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}

inline uint64_t rotate_right(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }
inline uint64_t rotate_left(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }
inline uint64_t mix_high(uint64_t word) { return word ^ word >> 47; }

constexpr uint64_t kFarm0 = 0xc3a5c85c97cb3127, kFarm1 = 0xb492b66fbe98f273, kFarm2 = 0x9ae16a3b2f90404f;

inline uint64_t join(uint64_t u, uint64_t v, uint64_t multiplier) {
  const uint64_t a = mix_high((u ^ v) * multiplier);
  return mix_high((v ^ a) * multiplier) * multiplier;
}

inline uint64_t farm_to_16(const char* s, size_t n) {
  if (n >= 8) {
    const uint64_t multiplier = kFarm2 + n * 2, a = load64(s) + kFarm2, b = load64(s + n - 8);
    return join(rotate_right(b, 37) * multiplier + a, (rotate_right(a, 25) + b) * multiplier, multiplier);
  }
  if (n >= 4) return join(n + (uint64_t{load32(s)} << 3), load32(s + n - 4), kFarm2 + n * 2);
  if (n == 0) return kFarm2;
  const auto byte = [s](size_t at) { return static_cast<uint32_t>(static_cast<unsigned char>(s[at])); };
  const uint32_t y = byte(0) + (byte(n >> 1) << 8), z = static_cast<uint32_t>(n) + (byte(n - 1) << 2);
  return mix_high(y * kFarm2 ^ z * kFarm0) * kFarm2;
}

inline uint64_t farm_to_32(const char* s, size_t n) {
  const uint64_t multiplier = kFarm2 + n * 2, a = load64(s) * kFarm1, b = load64(s + 8);
  const uint64_t c = load64(s + n - 8) * multiplier, d = load64(s + n - 16) * kFarm2;
  return join(rotate_right(a + b, 43) + rotate_right(c, 30) + d, a + rotate_right(b + kFarm2, 18) + c, multiplier);
}

inline uint64_t farm_to_64(const char* s, size_t n) {
  const uint64_t multiplier = kFarm2 + n * 2, a = load64(s) * kFarm2, b = load64(s + 8);
  const uint64_t c = load64(s + n - 8) * multiplier, d = load64(s + n - 16) * kFarm2;
  const uint64_t y = rotate_right(a + b, 43) + rotate_right(c, 30) + d;
  const uint64_t z = join(y, a + rotate_right(b + kFarm2, 18) + c, multiplier);
  const uint64_t e = load64(s + 16) * multiplier, f = load64(s + 24);
  const uint64_t g = (y + load64(s + n - 32)) * multiplier, h = (z + load64(s + n - 24)) * multiplier;
  return join(rotate_right(e + f, 43) + rotate_right(g, 30) + h, e + rotate_right(f + a, 18) + g, multiplier);
}

// The state of a long text: 56 bytes, stirred by 64 bytes of the text at a time.
struct FarmState {
  using Pair = std::pair<uint64_t, uint64_t>;
  uint64_t x, y, z;
  Pair v, w;

  static Pair weak(const char* s, uint64_t a, uint64_t b) {
    a += load64(s);
    b = rotate_right(b + a + load64(s + 24), 21);
    const uint64_t c = a;
    a += load64(s + 8) + load64(s + 16);
    return {a + load64(s + 24), b + rotate_right(a, 44) + c};
  }

  void stir(const char* s, uint64_t multiplier, uint64_t factor) {
    x = rotate_right(x + y + v.first + load64(s + 8), 37) * multiplier;
    y = rotate_right(y + v.second + load64(s + 48), 42) * multiplier;
    x ^= w.second * factor;
    y += v.first * factor + load64(s + 40);
    z = rotate_right(z + w.first, 33) * multiplier;
    v = weak(s, v.second * multiplier, x + w.first);
    w = weak(s + 32, z + w.second, y + load64(s + 16));
    std::swap(z, x);
  }
};

inline uint64_t farm_long(const char* s, size_t n) {
  constexpr uint64_t kSeed = 81;
  FarmState state = {kSeed * kFarm2 + load64(s), kSeed * kFarm1 + 113, 0, {0, 0}, {0, 0}};
  state.z = mix_high(state.y * kFarm2 + 113) * kFarm2;
  const char* const last = s + n - 64;
  for (const char* const end = s + (n - 1) / 64 * 64; s != end; s += 64) state.stir(s, kFarm1, 1);
  const uint64_t multiplier = kFarm1 + ((state.z & 0xff) << 1);
  state.w.first += (n - 1) & 63;
  state.v.first += state.w.first;
  state.w.first += state.v.first;
  state.stir(last, multiplier, 9);
  return join(join(state.v.first, state.w.first, multiplier) + mix_high(state.y) * kFarm0 + state.z,
              join(state.v.second, state.w.second, multiplier) + state.x, multiplier);
}

}  // namespace hashes

inline uint64_t fingerprint64(std::string_view text) {
  const char* s = text.data();
  const size_t n = text.size();
  if (n <= 16) return hashes::farm_to_16(s, n);
  if (n <= 32) return hashes::farm_to_32(s, n);
  return n <= 64 ? hashes::farm_to_64(s, n) : hashes::farm_long(s, n);
}

// The hash of a fingerprint and one more fingerprint.
inline uint64_t cross(uint64_t hash, uint64_t fingerprint) {
  constexpr uint64_t kFactor = 0xc6a4a7935bd1e995;
  uint64_t result = hash ^ kFactor;
  result ^= hashes::mix_high(fingerprint * kFactor) * kFactor;
  result *= kFactor;
  return hashes::mix_high(hashes::mix_high(result) * kFactor);
}

inline uint64_t siphash64(std::string_view text, uint64_t key0, uint64_t key1) {
  using hashes::rotate_left;
  uint64_t v0 = key0 ^ 0x736f6d6570736575, v1 = key1 ^ 0x646f72616e646f6d;
  uint64_t v2 = key0 ^ 0x6c7967656e657261, v3 = key1 ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = rotate_left(v1, 13) ^ v0, v0 = rotate_left(v0, 32);
      v2 += v3, v3 = rotate_left(v3, 16) ^ v2;
      v0 += v3, v3 = rotate_left(v3, 21) ^ v0;
      v2 += v1, v1 = rotate_left(v1, 17) ^ v2, v2 = rotate_left(v2, 32);
    }
  };
  const auto take = [&](uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  const size_t whole = text.size() / 8 * 8;
  for (size_t at = 0; at < whole; at += 8) take(hashes::load64(text.data() + at));
  uint64_t last = uint64_t{text.size()} << 56;
  for (size_t at = whole; at < text.size(); ++at)
    last |= uint64_t{static_cast<unsigned char>(text[at])} << 8 * (at - whole);
  take(last);
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

inline uint64_t murmur3_64(std::string_view text) {
  using hashes::rotate_left;
  constexpr uint64_t c1 = 0x87c37b91114253d5, c2 = 0x4cf5ad432745937f;
  const auto finish = [](uint64_t k) {
    k = (k ^ k >> 33) * 0xff51afd7ed558ccd;
    k = (k ^ k >> 33) * 0xc4ceb9fe1a85ec53;
    return k ^ k >> 33;
  };
  uint64_t h1 = 0, h2 = 0;
  const size_t whole = text.size() / 16 * 16, rest = text.size() - whole;
  for (size_t at = 0; at < whole; at += 16) {
    h1 ^= rotate_left(hashes::load64(text.data() + at) * c1, 31) * c2;
    h1 = (rotate_left(h1, 27) + h2) * 5 + 0x52dce729;
    h2 ^= rotate_left(hashes::load64(text.data() + at + 8) * c2, 33) * c1;
    h2 = (rotate_left(h2, 31) + h1) * 5 + 0x38495ab5;
  }
  char tail[16] = {};
  std::memcpy(tail, text.data() + whole, rest);
  if (rest > 8) h2 ^= rotate_left(hashes::load64(tail + 8) * c2, 33) * c1;
  if (rest) h1 ^= rotate_left(hashes::load64(tail) * c1, 31) * c2;
  h1 ^= text.size();
  h2 ^= text.size();
  h1 += h2;
  h2 += h1;
  return finish(h1) + finish(h2);
}

inline uint64_t xxh64(std::string_view text) {
  using hashes::rotate_left;
  constexpr uint64_t p1 = 0x9e3779b185ebca87, p2 = 0xc2b2ae3d27d4eb4f, p3 = 0x165667b19e3779f9;
  constexpr uint64_t p4 = 0x85ebca77c2b2ae63, p5 = 0x27d4eb2f165667c5;
  const auto round = [](uint64_t sum, uint64_t word) { return rotate_left(sum + word * p2, 31) * p1; };
  const char *at = text.data(), *const end = at + text.size();
  uint64_t hash = p5;
  if (text.size() >= 32) {
    uint64_t sums[4] = {p1 + p2, p2, 0, 0 - p1};
    for (; end - at >= 32; at += 32)
      for (int i = 0; i < 4; ++i) sums[i] = round(sums[i], hashes::load64(at + 8 * i));
    hash = rotate_left(sums[0], 1) + rotate_left(sums[1], 7) + rotate_left(sums[2], 12) + rotate_left(sums[3], 18);
    for (const uint64_t sum : sums) hash = (hash ^ round(0, sum)) * p1 + p4;
  }
  hash += text.size();
  for (; end - at >= 8; at += 8) hash = rotate_left(hash ^ round(0, hashes::load64(at)), 27) * p1 + p4;
  if (end - at >= 4) hash = rotate_left(hash ^ hashes::load32(at) * p1, 23) * p2 + p3, at += 4;
  for (; at < end; ++at) hash = rotate_left(hash ^ static_cast<unsigned char>(*at) * p5, 11) * p1;
  hash = (hash ^ hash >> 33) * p2;
  hash = (hash ^ hash >> 29) * p3;
  return hash ^ hash >> 32;
}

}  // namespace hotrow
