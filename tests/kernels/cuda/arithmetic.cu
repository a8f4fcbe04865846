// Each exact float operation and bit operation once.
//
//   a, b, c  float32[N]
//   out      float32[6, N]   sum, difference, product, quotient, fused a * b + c, root of |a|
//   bits     uint32[N]
//   words    uint32[7, N]
//
// Launch: grid = N, block = 1.
extern "C" __global__ void floats(const float* a, const float* b, const float* c, float* out) {
  const int i = blockIdx.x, n = gridDim.x;
  out[0 * n + i] = __fadd_rn(a[i], b[i]);
  out[1 * n + i] = __fsub_rn(a[i], b[i]);
  out[2 * n + i] = __fmul_rn(a[i], b[i]);
  out[3 * n + i] = __fdiv_rn(a[i], b[i]);
  out[4 * n + i] = __fmaf_rn(a[i], b[i], c[i]);
  out[5 * n + i] = __fsqrt_rn(fabsf(a[i]));
}

// A product and a sum that no compiler may make into one operation. Launch: grid = N, block = 1.
extern "C" __global__ void not_fused(const float* a, const float* b, const float* c, float* out) {
  const int i = blockIdx.x;
  out[i] = a[i] * b[i] + c[i];
}

extern "C" __global__ void bit_tricks(const unsigned* bits, unsigned* words) {
  const int i = blockIdx.x, n = gridDim.x;
  const unsigned x = bits[i], y = bits[n - 1 - i];
  words[0 * n + i] = __popc(x);
  words[1 * n + i] = __ffs(static_cast<int>(x));
  words[2 * n + i] = __clz(static_cast<int>(x));
  words[3 * n + i] = __umulhi(x, y);
  words[4 * n + i] = static_cast<unsigned>(__umul64hi(static_cast<unsigned long long>(x) << 32 | y, 0x123456789abcdefull));
  words[5 * n + i] = __float_as_uint(__uint_as_float(x));
  words[6 * n + i] = __brev(x);
}
