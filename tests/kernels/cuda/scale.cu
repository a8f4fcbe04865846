// The smallest kernels, for tests of devices.
//
//   in   float32[N]
//   out  float32[N]   in times factor
//
// One thread per value. Launch: grid = ceil(N / 256), block = 256.
extern "C" __global__ void __launch_bounds__(256) scale(const float* __restrict__ in, float* __restrict__ out, int n, float factor) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor;
}
