// Convert float32 values to binary16, for products that read halves.
//
//   values  float32[N]
//   halves  binary16[N]   the nearest value, ties to even; from 65520 on, NaN instead of infinity
//
// NaN, because after a sigmoid a sum over infinities may look like a valid probability.
//
// Launch: grid = up to N / 256 rounded up, block = 256; blocks take the values in turns.
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
