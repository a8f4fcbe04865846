// The types in which a table keeps its rows of float32[D].
//
//   type    bytes    layout                                       column c, in float32
//   fp32    4 D      float32[D]                                   x[c]
//   fp16    2 D      IEEE 754 binary16[D]                         x[c]
//   bf16    2 D      bfloat16[D], the upper halves of float32     x[c]
//   int8    4 + D    float32 scale, int8 q[D]                     q[c] * scale
//   uint8   8 + D    float32 scale, float32 offset, uint8 q[D]    q[c] * scale + offset
//
// How a row is encoded (row_encode.cpp). Each operation rounds to float32, ties to even:
//
//   fp16, bf16   the nearest value of the type; NaN stays a NaN, an infinity an infinity, subnormals are kept
//   int8         scale = max|x| / 127           q = clamp(round(x / scale), -127, 127)
//   uint8        offset = min x, scale = (max x - min x) / 255
//                                               q = clamp(round((x - offset) / scale), 0, 255)
//
// If the scale is 0 (a row of zeros, or of equal values for uint8), so is every q. The clamp acts only where the
// scale is so small that it is a subnormal. Eight-bit codes with float32 parameters per row are what FBGEMM and
// TorchRec call row-wise quantization; -128 is left out so that int8 is symmetric.
//
// A finite value that would become infinite is refused, and for int8 and uint8 so are NaN and infinity. Clipping would
// silently change every answer that uses the weight.
//
// Strides. fp32, fp16 and bf16: a row of at most 64 bytes takes a power of two, so that it lies in one cache line; a
// longer row takes a multiple of 32 bytes. int8 and uint8: a multiple of 4 bytes. These types save memory, and a cache
// line for each int8 row of 32 columns would waste 28 of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotrow {

enum class RowType : uint8_t { kFp32, kFp16, kBf16, kInt8, kUint8 };

// By the number of the type.
constexpr const char* kRowTypeNames[] = {"fp32", "fp16", "bf16", "int8", "uint8"};
constexpr size_t kRowTypes = sizeof(kRowTypeNames) / sizeof(kRowTypeNames[0]);

constexpr const char* row_type_name(RowType type) { return kRowTypeNames[static_cast<size_t>(type)]; }

// Whether rows have parameters of their own.
constexpr bool is_row_wise(RowType type) { return type == RowType::kInt8 || type == RowType::kUint8; }

constexpr size_t row_bytes(RowType type, uint32_t dim) {
  switch (type) {
    case RowType::kFp32: return size_t{dim} * 4;
    case RowType::kFp16:
    case RowType::kBf16: return size_t{dim} * 2;
    case RowType::kInt8: return sizeof(float) + dim;
    case RowType::kUint8: return 2 * sizeof(float) + dim;
  }
  return 0;
}

// From one row of a table to the next.
constexpr size_t row_stride_bytes(RowType type, uint32_t dim) {
  const size_t bytes = row_bytes(type, dim);
  if (is_row_wise(type)) return (bytes + 3) / 4 * 4;
  if (bytes > 64) return (bytes + 31) / 32 * 32;
  size_t stride = sizeof(float);
  while (stride < bytes) stride *= 2;
  return stride;
}

}  // namespace hotrow
