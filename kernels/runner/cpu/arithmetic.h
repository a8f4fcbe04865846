// Bit operations and floats. With -ffp-contract=off, each operation is rounded once as in IEEE 754, so the _rn
// intrinsics are plain operators.
#pragma once
#include <cmath>
#include <cstring>

#include "thread.h"

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64; }
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (value >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 8) result |= ((a >> shift & 0xff) == (b >> shift & 0xff) ? 0xffu : 0u) << shift;
  return result;
}

namespace cpu {
template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
}  // namespace cpu

inline float __int_as_float(int value) { return cpu::bits_as<float>(value); }
inline int __float_as_int(float value) { return cpu::bits_as<int>(value); }
inline float __uint_as_float(unsigned value) { return cpu::bits_as<float>(value); }
inline unsigned __float_as_uint(float value) { return cpu::bits_as<unsigned>(value); }
inline double __longlong_as_double(long long value) { return cpu::bits_as<double>(value); }
inline long long __double_as_longlong(double value) { return cpu::bits_as<long long>(value); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double value) { return sqrt(value); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __ull2float_rn(unsigned long long value) { return static_cast<float>(value); }
inline float __ll2float_rn(long long value) { return static_cast<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }

template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
