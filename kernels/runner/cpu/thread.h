// One CUDA thread, as kernels and the scheduler see it. This is the interface between a .cu file, compiled with the
// headers of this folder, and libscheduler, compiled once from the .cpp files next to them.
//
// A CUDA thread is a fiber: it runs until it waits for other threads or gives up its turn. So a whole block runs on one
// OS thread. `Thread` stays at one address for the life of the fiber, so `cpu_thread` may be declared const.
#pragma once
#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
};

namespace cpu {

struct Thread {
  uint3 index, block_index;
  dim3 block_dim, grid_dim;
  unsigned lane;                  // place in its warp of 32
  bool fuzzed;                    // turns end at random places
  unsigned accesses;              // uncached accesses since the thread last gave up its turn
  unsigned char* dynamic_shared;  // of the block; 16-byte aligned
};

enum class Collective : int { sync, ballot, any, all, shuffle, match_any, add, minimum, maximum };

}  // namespace cpu

extern "C" {
__attribute__((const)) cpu::Thread* cpu_thread();
// Let other threads of the block run; this thread stays ready.
void cpu_give_turn();
// Another thread may run here: in a fuzzed schedule at random, and in every schedule after many such points. So a loop
// that waits for a value ends.
void cpu_preemption_point();
void cpu_barrier(const char* file, int line);
// A memory fence, as the race check sees it.
void cpu_fence();
// For the race check: the thread is about to write a word. A thread that reads the new value by an uncached load is
// ordered after everything that the writer did before its last fence.
void cpu_publish(void* word);
void cpu_consume(const void* word);
// Wait for the lanes of `mask`, then return this lane's result of the collective. `source` is the lane a shuffle reads.
uint64_t cpu_collective(cpu::Collective kind, unsigned mask, uint64_t value, int source, const char* file, int line);
[[noreturn]] void cpu_fail(const char* message);
}
