// Rows of callers in float32: D columns, without gaps between rows. A quad is four columns; a row's last quad may be
// shorter. If D is a multiple of 4, a quad moves as 16 bytes. The arrays begin at a multiple of 16 bytes.
#pragma once

#include "types.cuh"

// Streaming, because no kernel reads the row again before it leaves L2.
template <u32 kDim>
__device__ __forceinline__ void store_quad(float* row, u32 quad, float4 value) {
  float* at = row + 4 * quad;
  if (kDim % 4 == 0) {
    __stcs(reinterpret_cast<float4*>(at), value);
    return;
  }
  const u32 left = kDim - 4 * quad;
  __stcs(at, value.x);
  if (left > 1) __stcs(at + 1, value.y);
  if (left > 2) __stcs(at + 2, value.z);
  if (left > 3) __stcs(at + 3, value.w);
}
