// The scheduler's calls to the sanitizers. ThreadSanitizer sees each CUDA thread as a separate thread, ordered only by
// barriers, __syncwarp and fences. This makes it a race check for shared and global memory. The scheduler itself is
// compiled without instrumentation; only these calls depend on the sanitizer.
#pragma once
#include <cstddef>
#include <mutex>
#include <vector>

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
constexpr unsigned unordered = 1;  // a switch makes no order between the two fibers
inline void* current() { return __tsan_get_current_fiber(); }
inline void* create() { return __tsan_create_fiber(0); }
inline void destroy(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, unordered); }
inline void acquire(void* tag) { __tsan_acquire(tag); }
inline void release(void* tag) { __tsan_release(tag); }

// Fibers are slow to create, so a thread that ends leaves those of its block to later threads. They keep the order that
// they have seen: work of another stream before that end is then no race for this block, only for the others.
inline std::mutex spare_mutex;
inline std::vector<void*>& spare_fibers = *new std::vector<void*>;  // never destroyed: threads may end later
inline void leave(const std::vector<void*>& fibers) {
  std::lock_guard lock(spare_mutex);
  spare_fibers.insert(spare_fibers.end(), fibers.begin(), fibers.end());
}
inline void* take() {
  std::lock_guard lock(spare_mutex);
  if (spare_fibers.empty()) return create();
  void* fiber = spare_fibers.back();
  spare_fibers.pop_back();
  return fiber;
}
#else
inline void* current() { return nullptr; }
inline void* create() { return nullptr; }
inline void destroy(void*) {}
inline void switch_to(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void leave(const std::vector<void*>&) {}
inline void* take() { return nullptr; }
#endif

// Abandoned fibers leave the red zones of their frames on these stacks, where later fibers would trip over them.
inline void forget_frames([[maybe_unused]] void* stacks, [[maybe_unused]] size_t bytes) {
#if defined(HOTROW_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(stacks, bytes);
#endif
}

}  // namespace cpu::sanitizer
