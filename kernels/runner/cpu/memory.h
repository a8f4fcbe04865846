// Loads and stores with cache hints, and fences. An uncached access is a place where other threads may run in between,
// and is atomic in words of 8 bytes: on a GPU other threads write there meanwhile.
//
// To the race check, an uncached load that follows an atomic exchange of the same word, and is followed by what it leads
// to, makes order: what the exchanging thread did before its last fence is seen by the loading one. So a key is published
// after its row, and readers need no fence, since the row's address comes from the load.
#pragma once
#include <sched.h>

#include <cstring>

#include "thread.h"

namespace cpu {

#if defined(__SANITIZE_THREAD__)
// By the 8 bytes that a word is in, which may be loaded at once.
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
T __ldg(const T* from) {  // read-only data: a plain load, so that the race check sees who writes it
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
inline void __nanosleep(unsigned) {  // whoever is waited for may be in another block, on another OS thread
  sched_yield();
  cpu_give_turn();
}
