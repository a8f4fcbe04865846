// Form a team, whose threads add up their numbers.
//
//   team      Team[1]
//   reasons   uint32[grid]             whether each block has one to stay
//   together  whether no block begins before all have started: there is room for all of them at once
//   values    uint32[grid, kThreads]
//   written   uint32[grid, kThreads]   the values again, written by every block before it joins; 0s before
//   seen      uint32[grid, kThreads]   of members: what a thread sees there, of all blocks, added up; columns backwards
//   ranks     uint32[grid]             of members; others are left alone
//   sizes     uint32[grid]             of the team; 0: the block was no member
//   before    uint32[grid, kThreads]   of members: the sum of the values before each thread's, members going by rank
//   arrivals  uint32[grid + 1]         of members: how many of them had come to a meeting when it was over; 0s before
//
// Launch: grid = any, block = kThreads.
#include "team.cuh"

constexpr u32 kThreads = 64;

extern "C" __global__ void share(Team* team, const u32* reasons, bool together, const u32* values, u32* written,
                                 u32* seen, u32* ranks, u32* sizes, u32* before, u32* arrivals) {
  __shared__ Member me;
  const u32 place = blockIdx.x * kThreads + threadIdx.x;
  if (threadIdx.x == 0) {
    start_block(*team);
    while (together && __ldcg(&team->started) < gridDim.x) __nanosleep(100);
  }
  __syncthreads();
  written[place] = values[place];
  const bool is_member = join_team(*team, gridDim.x, reasons[blockIdx.x], me);
  if (threadIdx.x == 0) sizes[blockIdx.x] = is_member ? me.size : 0;
  if (!is_member) return;
  if (threadIdx.x == 0) ranks[blockIdx.x] = me.rank;
  for (u32 block = 0; block < gridDim.x; ++block)
    seen[place] += __ldcg(written + block * kThreads + kThreads - 1 - threadIdx.x);
  before[place] = sum_before_in_team<kThreads>(*team, me, values[place]);
  if (threadIdx.x == 0) atomicAdd(arrivals + gridDim.x, 1u);
  meet(*team, me);
  if (threadIdx.x == 0) arrivals[blockIdx.x] = __ldcg(arrivals + gridDim.x);
  leaves_last(*team, me.size);
}
