// What a kernel and the scheduler beneath it know of one CUDA thread: the seam between the code of a .cu file, compiled
// with the headers of this folder, and libscheduler, compiled once from the .cpp files beside them.
//
// A CUDA thread is a fiber: it runs until it waits for others or gives its turn away, so a whole block runs on one OS
// thread. `Thread` stays at one address for the fiber's life, which is why `cpu_thread` counts as a constant.
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
  unsigned accesses;              // uncached accesses since the thread last gave its turn away
  unsigned char* dynamic_shared;  // of the block; 16-byte aligned
};

enum class Collective : int { sync, ballot, any, all, shuffle, match_any, add, minimum, maximum };

}  // namespace cpu

extern "C" {
__attribute__((const)) cpu::Thread* cpu_thread();
// Let other threads of the block run; this one is ready to go on.
void cpu_give_turn();
// Where another thread may run in between: always after many such places, so that a loop that waits for a value ends,
// and in a fuzzed schedule at random.
void cpu_preemption_point();
void cpu_barrier(const char* file, int line);
// A memory fence, as the race check sees it.
void cpu_fence();
// To the race check: what the thread did before its last fence is order for whoever finds what it is about to write to a
// word, by an uncached load.
void cpu_publish(void* word);
void cpu_consume(const void* word);
// Wait for the lanes of `mask`, then return what the collective gives this lane. `source` is the lane a shuffle reads.
uint64_t cpu_collective(cpu::Collective kind, unsigned mask, uint64_t value, int source, const char* file, int line);
[[noreturn]] void cpu_fail(const char* message);
}
