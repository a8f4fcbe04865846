// Vectors of eight columns, which the compiler maps to the target's instructions, and single columns by their bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace hotrow {

// Templates and `auto` drop the alignment of such a type: name it wherever memory is read or written.
typedef float Lane8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Words8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Halves8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t Unaligned16 __attribute__((aligned(1), may_alias));
typedef int8_t SignedBytes8 __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint8_t Bytes8 __attribute__((vector_size(8), aligned(1), may_alias));

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// IEEE 754 binary16 -> float32, exactly. The bits moved into place are the value times 2^-112, subnormals included; an
// infinity or NaN then still needs the upper bits of its exponent.
inline float from_half(uint16_t half) {
  const uint32_t moved = uint32_t{half & 0x7FFFu} << 13;
  uint32_t bits = bits_of(from_bits(moved) * 0x1p112f);
  if (moved >= 0x0F800000) bits |= 0x7F800000;
  return from_bits(bits | uint32_t{half & 0x8000u} << 16);
}

}  // namespace hotrow
