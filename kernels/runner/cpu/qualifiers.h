// CUDA's keywords and built-in variables.
#pragma once
#include "thread.h"

#define HOTROW_RUNNER 1

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local  // a block runs on one OS thread, one block at a time
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition) static_cast<void>(condition)

#define threadIdx (cpu_thread()->index)
#define blockIdx (cpu_thread()->block_index)
#define blockDim (cpu_thread()->block_dim)
#define gridDim (cpu_thread()->grid_dim)
#define warpSize 32

// `extern __shared__` has no counterpart: a kernel says HOTROW_DYNAMIC_SHARED(type, name), see cuda/dynamic_shared.cuh.
inline unsigned char* cpu_dynamic_shared() { return cpu_thread()->dynamic_shared; }
