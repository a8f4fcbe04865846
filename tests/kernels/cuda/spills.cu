// A kernel that cannot keep its values in registers: the check of compiled kernels must refuse it.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = in[threadIdx.x * 96 + i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[threadIdx.x * 96 + i] = values[i] * values[95 - i];
}
