// Copy rows with known numbers: a lookup without the search. The ceiling of query.cu.
//
//   slab      uint4[V, ROW_UNITS]    rows in the layout of a cache, in units of 16 bytes
//   numbers   int64[N]
//   out       uint4[N, OUT_UNITS]    the size of the rows in float32; unit u is the row's unit
//                                    u * ROW_UNITS / OUT_UNITS, not decoded
//
// Launch: grid = N * OUT_UNITS / (4 * 256) rounded up, block = 256. A thread has four loads in flight.
//
// Compiled with: ROW_UNITS=8 OUT_UNITS=8
// Compiled with: ROW_UNITS=3 OUT_UNITS=8
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_known_rows(const uint4* slab, const i64* numbers, u32 count, uint4* out) {
  constexpr u32 kUnderWay = 4;
  const u64 pairs = static_cast<u64>(count) * OUT_UNITS;
  const u64 first = static_cast<u64>(blockIdx.x) * kUnderWay * blockDim.x + threadIdx.x;
  uint4 units[kUnderWay];
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    const u64 pair = first + k * blockDim.x;
    if (pair >= pairs) break;
    const u32 unit = static_cast<u32>(pair % OUT_UNITS) * ROW_UNITS / OUT_UNITS;
    units[k] = __ldcg(slab + __ldg(numbers + pair / OUT_UNITS) * ROW_UNITS + unit);
  }
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    const u64 pair = first + k * blockDim.x;
    if (pair >= pairs) break;
    out[pair] = units[k];
  }
}

// Copy memory: the bandwidth limit of all other kernels.
//
//   source, target   uint4[N]
//
// Launch: grid = N / (4 * 256) rounded up, block = 256.
extern "C" __global__ void __launch_bounds__(256) copy_units(const uint4* source, u64 count, uint4* target) {
  constexpr u32 kUnderWay = 4;
  const u64 first = static_cast<u64>(blockIdx.x) * kUnderWay * blockDim.x + threadIdx.x;
  uint4 units[kUnderWay];
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    if (first + k * blockDim.x < count) units[k] = __ldcg(source + first + k * blockDim.x);
  }
#pragma unroll
  for (u32 k = 0; k < kUnderWay; ++k) {
    if (first + k * blockDim.x < count) target[first + k * blockDim.x] = units[k];
  }
}

// Does nothing: the floor of a launch. Launch: one thread.
extern "C" __global__ void nothing() {}

// Pauses the stream for some microseconds, so that the host can queue the timed work without a gap.
// Launch: one thread.
extern "C" __global__ void rest_stream(u32 us) {
  for (u32 i = 0; i < us; ++i) __nanosleep(1000);
}
