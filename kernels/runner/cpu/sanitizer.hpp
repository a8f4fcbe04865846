// What the scheduler tells the sanitizers. To ThreadSanitizer each CUDA thread is a thread of its own that nothing but
// barriers, __syncwarp and fences orders, which makes it a race check for shared and for global memory. The scheduler
// itself is compiled without instrumentation; only its calls to the sanitizer's run-time library depend on the kind.
#pragma once
#include <cstddef>

#if defined(HOTROW_THREAD_SANITIZER)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#endif
#if defined(HOTROW_ADDRESS_SANITIZER)
extern "C" void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
#endif

namespace cpu::sanitizer {

#if defined(HOTROW_THREAD_SANITIZER)
constexpr unsigned unordered = 1;  // a switch to another fiber makes no order between the two
inline void* current() { return __tsan_get_current_fiber(); }
inline void* create() { return __tsan_create_fiber(0); }
inline void destroy(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, unordered); }
inline void acquire(void* tag) { __tsan_acquire(tag); }
inline void release(void* tag) { __tsan_release(tag); }
#else
inline void* current() { return nullptr; }
inline void* create() { return nullptr; }
inline void destroy(void*) {}
inline void switch_to(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
#endif

// Fibers that were given up leave their frames' red zones behind; the next ones on these stacks must not trip over them.
inline void forget_frames([[maybe_unused]] void* stacks, [[maybe_unused]] size_t bytes) {
#if defined(HOTROW_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(stacks, bytes);
#endif
}

}  // namespace cpu::sanitizer
