// The team of a launch: the blocks that together do the work that must wait until all blocks are done.
//
// If the last block did this work alone, the rest of the device would idle. A second kernel would cost a few
// microseconds even if there is nothing to do. So a block that knows of such work stays when it is done, and the blocks
// that stay are the team. If no block stays, the last block is the team.
//
//   every block    start ... its part of the launch ... join ─┬─ has no reason to stay: gone
//   the team                                                  └─ waits for all blocks ... meets ... leaves
//
// A block stays only if all blocks of the launch have started. Then it waits for blocks that run, and that do not wait
// themselves before they are done. So no launch hangs, whatever its grid and however few blocks run at a time. In a
// grid that does not fit at once, the blocks that stay are the last ones, which still fill the device.
//
// One thread fences for its block: the barrier before it orders the writes of the other threads, and the barrier after
// it orders their later reads, which go past L1. A fence that releases and acquires is enough, because every wait here is
// for one word; __threadfence also orders all fences of the device, which takes longer.
//
// A block without a reason to stay does not wait. Each block pays two fences, two barriers and one atomic addition
// whose result it reads.
#pragma once

#include "types.cuh"

constexpr u32 kMostMembers = 64;  // enough to saturate the bus with the list for the host

// In device memory; zeros before a launch and again after it.
struct __align__(8) Team {
  u64 done;     // lower half: blocks that are done; upper half: how many of them stayed
  u32 started;  // blocks
  u32 arrived;  // members, summed over all meetings so far
  u32 left;     // members
  u32 unused;
  u32 sums[kMostMembers];
};
static_assert(sizeof(Team) == 24 + 4 * kMostMembers, "TEAM_WORDS of gpu_cache/bag_layout.py");

// A block's part, in its shared memory.
struct Member {
  u32 rank;
  u32 size;      // of the team; the block is a member if its rank is less
  u32 meetings;  // so far
};

// No intrinsic does this.
__device__ __forceinline__ void fence() {
#ifdef HOTROW_RUNNER
  __threadfence();
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// By one thread of every block, before its work.
__device__ __forceinline__ void start_block(Team& team) { atomicAdd(&global(&team)->started, 1u); }

// By all threads of each of `blocks` blocks, after its work: whether the block is in the team. For the team, all blocks
// are done, and their writes are visible. `has_reason` counts for the first thread only. Barriers.
__device__ __forceinline__ bool join_team(Team& team, u32 blocks, bool has_reason, Member& me) {
  __syncthreads();
  if (threadIdx.x == 0) {
    fence();
    const bool stays = has_reason && __ldcg(&team.started) == blocks;
    u64 done = atomicAdd(&global(&team)->done, stays ? (1ull << 32) + 1 : 1ull);
    const bool is_last = static_cast<u32>(done) + 1 == blocks;
    me.rank = static_cast<u32>(done >> 32);
    me.size = is_last && me.rank == 0 ? 1 : 0;
    me.meetings = 0;
    if (stays && me.rank < kMostMembers) {
      while (static_cast<u32>(done = __ldcg(&team.done)) < blocks) __nanosleep(100);
      me.size = min(static_cast<u32>(done >> 32), kMostMembers);
    }
    fence();
  }
  __syncthreads();
  return me.rank < me.size;
}

// By all threads of the team: wait until all have arrived; then their writes are visible. Barriers.
__device__ __forceinline__ void meet(Team& team, Member& me) {
  if (me.size == 1) {
    __syncthreads();
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fence();
    const u32 awaited = ++me.meetings * me.size;
    atomicAdd(&global(&team)->arrived, 1u);
    while (__ldcg(&team.arrived) < awaited) __nanosleep(100);
    fence();
  }
  __syncthreads();
}

// By all threads of this many blocks, at the end: true for the first thread of the last block, when the team is ready
// for the next launch. Barriers.
__device__ __forceinline__ bool leaves_last(Team& team, u32 blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  fence();
  Team* all = global(&team);
  if (atomicAdd(&all->left, 1u) + 1 < blocks) return false;
  atomicExch(&all->done, 0ull);
  atomicExch(&all->started, 0u);
  atomicExch(&all->arrived, 0u);
  atomicExch(&all->left, 0u);
  fence();
  return true;
}

// By all threads of a block of kThreads: the sum of the values of the threads before the caller. Barriers.
template <u32 kThreads>
__device__ __forceinline__ u32 sum_before(u32 value) {
  __shared__ u32 sums[kThreads];
  sums[threadIdx.x] = value;
  __syncthreads();
  for (u32 apart = 1; apart < kThreads; apart *= 2) {
    const u32 before = threadIdx.x >= apart ? sums[threadIdx.x - apart] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  return sums[threadIdx.x] - value;
}

// The same sum over all threads of the team, with blocks in the order of their ranks. Once per launch. Meets.
template <u32 kThreads>
__device__ __forceinline__ u32 sum_before_in_team(Team& team, Member& me, u32 value) {
  static_assert(kMostMembers <= kThreads, "a thread per member");
  __shared__ u32 of_blocks;  // the sum of the blocks before this block
  const u32 before = sum_before<kThreads>(value);
  if (threadIdx.x == 0) of_blocks = 0;
  if (threadIdx.x == kThreads - 1) team.sums[me.rank] = before + value;
  meet(team, me);
  if (threadIdx.x < me.rank) atomicAdd(&of_blocks, __ldcg(team.sums + threadIdx.x));
  __syncthreads();
  return of_blocks + before;
}
