// Warp collectives and the block's barrier. Masks count: the lanes of a mask wait for each other and for no other lane.
// Only __syncwarp orders memory, as CUDA's documentation says, and the race check relies on that.
#pragma once
#include <cstring>

#include "thread.h"

#define CPU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // of the call in the .cu file

namespace cpu {

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8, "a collective takes values of at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  const uint64_t bits = cpu_collective(Collective::shuffle, mask, bits_of(value), source, file, line);
  T result;
  memcpy(&result, &bits, sizeof(T));
  return result;
}

// The source of a shuffle: `lane` if it lies in the caller's segment of `width` lanes, otherwise the caller itself.
inline int within_segment(int lane, int width) {
  const int mine = static_cast<int>(cpu_thread()->lane);
  return (lane & ~(width - 1)) == (mine & ~(width - 1)) ? lane : mine;
}

}  // namespace cpu

inline void __syncthreads(CPU_PLACE) { cpu_barrier(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, CPU_PLACE) {
  cpu_collective(cpu::Collective::sync, mask, 0, 0, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CPU_PLACE) {
  return static_cast<unsigned>(cpu_collective(cpu::Collective::ballot, mask, predicate != 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, CPU_PLACE) {
  return static_cast<int>(cpu_collective(cpu::Collective::any, mask, predicate != 0, 0, file, line));
}
inline int __all_sync(unsigned mask, int predicate, CPU_PLACE) {
  return static_cast<int>(cpu_collective(cpu::Collective::all, mask, predicate != 0, 0, file, line));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CPU_PLACE) {
  return static_cast<unsigned>(
      cpu_collective(cpu::Collective::match_any, mask, cpu::bits_of(value), 0, file, line));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, CPU_PLACE) {
  return static_cast<unsigned>(cpu_collective(cpu::Collective::add, mask, value, 0, file, line));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, CPU_PLACE) {
  return static_cast<unsigned>(cpu_collective(cpu::Collective::minimum, mask, value, 0, file, line));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, CPU_PLACE) {
  return static_cast<unsigned>(cpu_collective(cpu::Collective::maximum, mask, value, 0, file, line));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CPU_PLACE) {
  const int segment = static_cast<int>(cpu_thread()->lane) & ~(width - 1);
  return cpu::shuffle(mask, value, segment | (source & (width - 1)), file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CPU_PLACE) {
  const int mine = static_cast<int>(cpu_thread()->lane), source = mine ^ lanes;
  const bool beyond = (source & ~(width - 1)) > (mine & ~(width - 1));  // may read earlier segments, not later segments
  return cpu::shuffle(mask, value, beyond ? mine : source, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, CPU_PLACE) {
  const int source = static_cast<int>(cpu_thread()->lane + lanes);
  return cpu::shuffle(mask, value, cpu::within_segment(source, width), file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, CPU_PLACE) {
  const int source = static_cast<int>(cpu_thread()->lane) - static_cast<int>(lanes);
  return cpu::shuffle(mask, value, cpu::within_segment(source, width), file, line);
}
inline unsigned __activemask() { cpu_fail("__activemask depends on the schedule: say which lanes take part"); }
#undef CPU_PLACE
