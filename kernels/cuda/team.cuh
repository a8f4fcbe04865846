// The team of a launch: blocks that together do what has to wait until all blocks are done.
//
// The last block could do it alone, while the rest of the device idles; a kernel launched behind would cost some
// microseconds where there is nothing to do. So a block that knows of such work stays when it is done, and those that
// stayed are the team. Where nobody stayed, the last block is.
//
//   every block    start ... its part of the launch ... join ─┬─ has no reason to stay: gone
//   the team                                                  └─ waits for all blocks ... meets ... leaves
//
// A block stays only where all blocks of the launch have started. Whom it waits for is running then, and waits for
// nobody before it is done: so nothing hangs, whatever the grid and however few blocks there is room for. Of a grid that
// does not fit at once these are the blocks of its end, which fill the device all the same.
//
// One thread fences for its block: what the others wrote is behind it by the barrier before, and what they read later,
// past L1, by the barrier after.
//
// Who has no reason to stay asks nothing and waits for nothing; what it costs a launch without such work is one addition
// per block whose result nobody waits for.
#pragma once

#include "types.cuh"

constexpr u32 kMostMembers = 64;  // enough for the bus, by which what they list leaves the device

// In device memory; zeros before a launch and again after it.
struct __align__(8) Team {
  u64 done;     // lower half: blocks that are done; upper half: how many of them stayed. One word: who is last knows both
  u32 started;  // blocks
  u32 arrived;  // members, at all of their meetings so far
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

// By one thread of every block, before its work.
__device__ __forceinline__ void start_block(Team& team) { atomicAdd(&team.started, 1u); }

// By all threads of each of `blocks` blocks, when it has done its work: whether it is of the team. All blocks are done
// then, and what they wrote is seen. `has_reason` is what the first thread says. Barriers.
__device__ __forceinline__ bool join_team(Team& team, u32 blocks, bool has_reason, Member& me) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool stays = has_reason && __ldcg(&team.started) == blocks;
    u64 done = atomicAdd(&team.done, stays ? (1ull << 32) + 1 : 1ull);
    const bool is_last = static_cast<u32>(done) + 1 == blocks;
    me.rank = static_cast<u32>(done >> 32);
    me.size = is_last && me.rank == 0 ? 1 : 0;
    me.meetings = 0;
    if (stays && me.rank < kMostMembers) {
      while (static_cast<u32>(done = __ldcg(&team.done)) < blocks) __nanosleep(100);
      me.size = min(static_cast<u32>(done >> 32), kMostMembers);
    }
    __threadfence();
  }
  __syncthreads();
  return me.rank < me.size;
}

// By all threads of the team: go on when all have come here, and what they wrote is seen. Barriers.
__device__ __forceinline__ void meet(Team& team, Member& me) {
  if (me.size == 1) {
    __syncthreads();
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const u32 awaited = ++me.meetings * me.size;
    atomicAdd(&team.arrived, 1u);
    while (__ldcg(&team.arrived) < awaited) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

// By all threads of so many blocks, at the end: the first thread of the last one is told so, when the team is ready for
// the next launch. Barriers.
__device__ __forceinline__ bool leaves_last(Team& team, u32 blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  __threadfence();
  if (atomicAdd(&team.left, 1u) + 1 < blocks) return false;
  atomicExch(&team.done, 0ull);
  atomicExch(&team.started, 0u);
  atomicExch(&team.arrived, 0u);
  atomicExch(&team.left, 0u);
  __threadfence();
  return true;
}

// By all threads of a block of kThreads: the sum of the values of threads before the calling one. Barriers.
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

// The same by all threads of the team, whose blocks count in the order of their ranks. Once per launch. Meets.
template <u32 kThreads>
__device__ __forceinline__ u32 sum_before_in_team(Team& team, Member& me, u32 value) {
  static_assert(kMostMembers <= kThreads, "a thread per member");
  __shared__ u32 of_blocks;  // of those before this one
  const u32 before = sum_before<kThreads>(value);
  if (threadIdx.x == 0) of_blocks = 0;
  if (threadIdx.x == kThreads - 1) team.sums[me.rank] = before + value;
  meet(team, me);
  if (threadIdx.x < me.rank) atomicAdd(&of_blocks, __ldcg(team.sums + threadIdx.x));
  __syncthreads();
  return of_blocks + before;
}
