// One kernel for each warp collective, and for atomics.
//
//   values  int32[32]
//   out     uint32[32]   the result of each lane of `mask`
//
// Launch: grid = 1, block = 32, one thread per lane; the last three kernels say how they are launched.
#define MINE const unsigned lane = threadIdx.x; if (!(mask >> lane & 1u)) return

extern "C" __global__ void ballot(const int* values, unsigned* out, unsigned mask) {
  MINE;
  out[lane] = __ballot_sync(mask, values[lane] > 2);
}
extern "C" __global__ void any_and_all(const int* values, unsigned* out, unsigned mask) {
  MINE;
  const int any = __any_sync(mask, values[lane] > 2), all = __all_sync(mask, values[lane] > 2);
  out[lane] = (any != 0) + 2 * (all != 0);
}
extern "C" __global__ void match(const int* values, unsigned* out, unsigned mask) {
  MINE;
  out[lane] = __match_any_sync(mask, values[lane]);
}
extern "C" __global__ void sum(const int* values, unsigned* out, unsigned mask) {
  MINE;
  out[lane] = __reduce_add_sync(mask, static_cast<unsigned>(values[lane]));
}
extern "C" __global__ void shuffle(const int* values, unsigned* out, unsigned mask, int by, int width) {
  out[threadIdx.x] = __shfl_sync(mask, values[threadIdx.x], by, width);
}
extern "C" __global__ void shuffle_up(const int* values, unsigned* out, unsigned mask, int by, int width) {
  out[threadIdx.x] = __shfl_up_sync(mask, values[threadIdx.x], by, width);
}
extern "C" __global__ void shuffle_down(const int* values, unsigned* out, unsigned mask, int by, int width) {
  out[threadIdx.x] = __shfl_down_sync(mask, values[threadIdx.x], by, width);
}
extern "C" __global__ void shuffle_xor(const int* values, unsigned* out, unsigned mask, int by, int width) {
  out[threadIdx.x] = __shfl_xor_sync(mask, values[threadIdx.x], by, width);
}
extern "C" __global__ void shuffle_wide(unsigned long long* out) {
  const unsigned long long mine = (static_cast<unsigned long long>(threadIdx.x) << 40) + 7;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, mine, 31);
}

// Thread t of all counts in word t % 3. Launch: any.
extern "C" __global__ void count_by_add(unsigned long long* counts) {
  atomicAdd(counts + threadIdx.x % 3, 1ull);
}
extern "C" __global__ void count_by_compare_and_swap(unsigned long long* counts) {
  unsigned long long* const word = counts + threadIdx.x % 3;
  unsigned long long seen = __ldcg(word), expected;
  do {
    expected = seen;
    seen = atomicCAS(word, expected, expected + 1);
  } while (seen != expected);
}

// Launch: one thread.
extern "C" __global__ void each_atomic(int* words, int* old) {
  old[0] = atomicAdd(words + 0, 3);
  old[1] = atomicSub(words + 1, 3);
  old[2] = atomicAnd(words + 2, 6);
  old[3] = atomicOr(words + 3, 3);
  old[4] = atomicXor(words + 4, 5);
  old[5] = atomicMin(words + 5, 4);
  old[6] = atomicMax(words + 6, 20);
  old[7] = atomicCAS(words + 7, 10, 99);
  old[8] = atomicCAS(words + 8, 11, 99);
}
