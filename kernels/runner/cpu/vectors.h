// CUDA's vector types, with CUDA's alignments, so the sanitizers find an access that is misaligned on a GPU.
#pragma once
#include "thread.h"

#define CPU_VECTOR_TYPES(TYPE, NAME)                                                              \
  struct alignas(2 * sizeof(TYPE)) NAME##2 {                                                      \
    TYPE x, y;                                                                                    \
  };                                                                                              \
  struct alignas(4 * sizeof(TYPE) < 16 ? 4 * sizeof(TYPE) : 16) NAME##4 {                         \
    TYPE x, y, z, w;                                                                              \
  };                                                                                              \
  inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                                \
  inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }

CPU_VECTOR_TYPES(signed char, char)
CPU_VECTOR_TYPES(unsigned char, uchar)
CPU_VECTOR_TYPES(short, short)
CPU_VECTOR_TYPES(unsigned short, ushort)
CPU_VECTOR_TYPES(int, int)
CPU_VECTOR_TYPES(unsigned, uint)
CPU_VECTOR_TYPES(long long, longlong)
CPU_VECTOR_TYPES(unsigned long long, ulonglong)
CPU_VECTOR_TYPES(float, float)
CPU_VECTOR_TYPES(double, double)
#undef CPU_VECTOR_TYPES
