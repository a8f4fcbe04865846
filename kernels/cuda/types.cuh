// Types and constants that every kernel uses. Intrinsics only: no toolkit header is needed or wanted.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kBlockThreads = 256;  // of every kernel, except where its launch says otherwise

// Lane of the calling thread in its warp. Blocks are one-dimensional, in whole warps.
__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kWarp; }

// The same pointer, known to be of global memory. Otherwise the compiler's atomics try shared memory too.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A bijection of 64 bits in which each bit of the argument moves about half of the result's (MurmurHash3's finalizer).
__device__ __forceinline__ u64 mix(u64 x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}
