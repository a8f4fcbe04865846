// Loads and stores with cache hints, and fences. An uncached access is a preemption point, and it is atomic in words of
// 8 bytes: on a GPU, other threads may write there at the same time.
//
// The race check takes an uncached load of an atomically exchanged word as order: the loading thread sees everything
// that the exchanging thread did before its last fence. So a writer publishes a key after its row. Readers need no
// fence, because the row's address depends on the load.
#pragma once
#include <sched.h>

#include <cstring>

#include "thread.h"

namespace cpu {

#if defined(__SANITIZE_THREAD__)
// The tag is the word's aligned 8 bytes, because one load may read all of them.
inline void* order_of(const void* word) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(word) & ~uintptr_t{7}); }
inline void publish(void* word) { cpu_publish(order_of(word)); }
inline void consume(const void* word) { cpu_consume(order_of(word)); }
#else
inline void publish(void*) {}
inline void consume(const void*) {}
#endif

template <class Word, class T>
T load_words(const T* from) {
  T value;
  for (size_t i = 0; i < sizeof(T) / sizeof(Word); ++i) {
    const Word* at = reinterpret_cast<const Word*>(from) + i;
    const Word word = __atomic_load_n(at, __ATOMIC_RELAXED);
    consume(at);
    memcpy(reinterpret_cast<char*>(&value) + i * sizeof(Word), &word, sizeof(Word));
  }
  return value;
}

template <class T>
T load_uncached(const T* from) {
  cpu_preemption_point();
  if constexpr (sizeof(T) % 8 == 0) return load_words<uint64_t>(from);
  if constexpr (sizeof(T) % 8 == 4) return load_words<uint32_t>(from);
  if constexpr (sizeof(T) % 4 == 2) return load_words<uint16_t>(from);
  if constexpr (sizeof(T) % 2 == 1) return load_words<uint8_t>(from);
}

}  // namespace cpu

inline bool __isGlobal(const void*) { return true; }
template <class T>
T __ldg(const T* from) {  // read-only data: with a plain load, the race check reports writers
  return *from;
}
template <class T>
T __ldca(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return cpu::load_uncached(from);
}
template <class T>
T __ldcv(const T* from) {
  return cpu::load_uncached(from);
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stcg(T* to, T value) {
  cpu_preemption_point();
  *to = value;
}
template <class T>
void __stwt(T* to, T value) {
  cpu_preemption_point();
  *to = value;
}
inline void __threadfence() { cpu_fence(); }
inline void __threadfence_block() { cpu_fence(); }
inline void __threadfence_system() { cpu_fence(); }
inline void __nanosleep(unsigned) {  // the awaited thread may be in another block, on another OS thread
  sched_yield();
  cpu_give_turn();
}
