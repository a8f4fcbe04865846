// Kernels that wait for the host, so tests control what runs in parallel.
//
//   flag  int32[1]   pinned: the host writes it while the kernel runs
//   out   int32[N]

// Launch: one thread.
extern "C" __global__ void await_flag(const int* flag) {
  while (__ldcv(flag) == 0) __nanosleep(100);
}

// out[i] = out[i] * factor + term. Launch: grid = N, block = 1.
extern "C" __global__ void affine(int* out, int factor, int term) {
  out[blockIdx.x] = out[blockIdx.x] * factor + term;
}
