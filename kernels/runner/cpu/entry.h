// The scheduler calls a kernel with an array of the addresses of its arguments, as cuLaunchKernel does.
#pragma once
#include <type_traits>
#include <utility>

#include "thread.h"

namespace cpu {

template <class... Parameters, size_t... I>
void call_kernel(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
}

template <class... Parameters>
void call_kernel(void (*kernel)(Parameters...), void** arguments) {
  call_kernel(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

static thread_local char shared_memory_anchor;  // static: each library has its own

}  // namespace cpu

// Creates this library's shared memory on the calling OS thread. Otherwise the first thread of a block that touches it
// would create it, and the race check would report that as a write.
extern "C" __attribute__((visibility("default"), used)) inline void hotrow_prepare() {
  asm volatile("" ::"r"(&cpu::shared_memory_anchor));
}
