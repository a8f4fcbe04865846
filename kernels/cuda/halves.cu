// Float32 values as binary16, for products that read halves.
//
//   values  float32[N]
//   halves  binary16[N]   the nearest, ties to even; a value from 65520 on, which would become infinite, becomes NaN
//
// NaN rather than infinity: a sum over infinities may end, behind a sigmoid, in a probability that looks like one.
//
// Launch: grid = up to N / 256 rounded up, block = 256; blocks take the rest in turns.
#include "rows.cuh"

constexpr unsigned short kNotANumber = 0x7e00;

extern "C" __global__ void __launch_bounds__(256) round_to_half(const float* values, unsigned short* halves, i64 count) {
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float value = values[i];
    const bool fits = rows::magnitude(value) < rows::Float16::kFirstInfinite;
    halves[i] = fits ? static_cast<unsigned short>(rows::Float16::encode(value, {})) : kNotANumber;
  }
}
