// Atomics. They are relaxed, as in CUDA: only fences and barriers make order. An exchange after a fence publishes; see
// memory.h.
#pragma once
#include <type_traits>

#include "memory.h"

namespace cpu {

template <class T>
using Same = std::common_type_t<T>;  // the pointer alone decides the operand's type

// Replace *at by change(*at) in one step, for operations that have no instruction.
template <class T, class Change>
T exchange_by(T* at, Change change) {
  cpu_preemption_point();
  T old;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  for (;;) {
    T next = change(old);
    if (__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}

}  // namespace cpu

#define CPU_ATOMIC(NAME, BUILTIN)                                                \
  template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>           \
  T NAME(T* at, cpu::Same<T> operand) {                                          \
    cpu_preemption_point();                                                      \
    return BUILTIN(at, operand, __ATOMIC_RELAXED);                               \
  }
CPU_ATOMIC(atomicAdd, __atomic_fetch_add)
CPU_ATOMIC(atomicSub, __atomic_fetch_sub)
CPU_ATOMIC(atomicOr, __atomic_fetch_or)
CPU_ATOMIC(atomicAnd, __atomic_fetch_and)
CPU_ATOMIC(atomicXor, __atomic_fetch_xor)
#undef CPU_ATOMIC

inline float atomicAdd(float* at, float operand) {
  return cpu::exchange_by(at, [operand](float old) { return old + operand; });
}
template <class T>
T atomicMin(T* at, cpu::Same<T> operand) {
  return cpu::exchange_by(at, [operand](T old) { return operand < old ? operand : old; });
}
template <class T>
T atomicMax(T* at, cpu::Same<T> operand) {
  return cpu::exchange_by(at, [operand](T old) { return old < operand ? operand : old; });
}
template <class T>
T atomicExch(T* at, cpu::Same<T> value) {
  cpu_preemption_point();
  cpu::publish(at);
  T old;
  __atomic_exchange(at, &value, &old, __ATOMIC_RELAXED);
  return old;
}
// Returns the old value. It gives up its turn first, so a loop around it makes progress.
template <class T>
T atomicCAS(T* at, cpu::Same<T> expected, cpu::Same<T> value) {
  cpu_give_turn();
  __atomic_compare_exchange(at, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
