// The forms in which a table keeps its rows of float32[D] on a device; kernels/host/row_type.hpp has the same for RAM.
//
//   form     row in 32-bit words                                  column c, in float32
//   fp32     float32[D]                                           x[c]
//   fp16     IEEE 754 binary16[D]                                 x[c]
//   bf16     bfloat16[D], the upper halves of float32             x[c]
//   int8     float32 scale, int8 q[D]                             q[c] * scale
//   uint8    float32 scale, float32 offset, uint8 q[D]            q[c] * scale + offset
//   fp8      float32 scale, E4M3 q[D]                             q[c] * scale
//
// A row begins at a multiple of 16 bytes and is followed by zeros up to the next row. A lane reads or writes a unit: 16
// bytes.
//
// Rows follow the host's rules, each operation rounded to float32, ties to even. fp16 and bf16 are the nearest value.
// int8 has scale = max|x| / 127, uint8 has offset = min x and scale = (max x - min x) / 255, and q is the whole number
// nearest to (x - offset) / scale, clamped to -127..127 or 0..255. E4M3, which the host does not have, is the format of
// "FP8 Formats for Deep Learning" (arXiv 2209.05433): no infinity, up to 448. scale = max|x| / 448, and q is the E4M3
// value nearest to x / scale, clamped to -448..448. If the scale is 0, every q is 0.
//
// A row does not fit if a finite value, or an fp8 or eight-bit range, would become infinite, or if a form with a scale
// gets NaN or infinity. Nothing is ever saturated. Writers leave such a row out.
//
// Subnormals are kept, so nothing here may be compiled with --ftz=true. Sums and products use intrinsics, because a
// fused multiply-add would round differently from the host.
#pragma once

#include "types.cuh"

namespace rows {

constexpr u32 kUnitBytes = 16;
constexpr u32 kInfinity = 0x7f800000;  // bits of float32

// A row's parameters. Forms without a scale ignore them.
struct Parameters {
  float scale;
  float offset;
};

// The range of a row's columns.
struct Range {
  u32 largest;         // bits of the largest magnitude; NaN is above infinity
  u32 largest_finite;  // the same among the finite ones
  int lowest, highest; // by `ordered`
};

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

// Bits of a float32, ordered as the values are; its own inverse.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The nearest whole number of a magnitude below 2^22, ties to even: added to 1.5 * 2^23, a value loses its fraction.
__device__ __forceinline__ float rounded(float value) { return __fadd_rn(__fadd_rn(value, 12582912.0f), -12582912.0f); }

// x / scale rounded to a whole number and clamped; x / 0 is 0.
__device__ __forceinline__ float whole_code(float value, float scale, float least, float most) {
  const float code = scale == 0.0f ? 0.0f : rounded(__fdiv_rn(value, scale));
  return fminf(fmaxf(code, least), most);
}

// A code is the form of a column: its bytes, the words before the columns, and how columns are read and written.

struct Float32 {
  static constexpr u32 kBytes = 4, kHeadWords = 0;
  static __device__ __forceinline__ float decode(u32 bits, Parameters) { return __uint_as_float(bits); }
  static __device__ __forceinline__ u32 encode(float value, Parameters) { return __float_as_uint(value); }
  static __device__ __forceinline__ bool fits(const Range&, Parameters&) { return true; }
};

struct Float16 {
  static constexpr u32 kBytes = 2, kHeadWords = 0;
  static constexpr u32 kFirstInfinite = 0x477ff000;  // 65520, halfway between the largest value and 2^16

  // The shifted bits are the value times 2^-112, also for subnormals. The upper exponent bits of infinities and NaN are
  // then missing.
  static __device__ __forceinline__ float decode(u32 bits, Parameters) {
    const u32 moved = (bits & 0x7fff) << 13;
    u32 value = __float_as_uint(__fmul_rn(__uint_as_float(moved), 0x1p112f));
    if (moved >= 0x0f800000) value |= kInfinity;
    return __uint_as_float(value | (bits & 0x8000) << 16);
  }
  static __device__ __forceinline__ u32 encode(float value, Parameters) {
    const u32 size = magnitude(value);
    u32 half = (size - 0x38000000 + 0x0fff + (size >> 13 & 1)) >> 13;
    // At 0.5 a float32 counts in units of 2^-24, the smallest subnormal: the addition rounds.
    if (size < 0x38800000) half = __float_as_uint(__fadd_rn(__uint_as_float(size), 0.5f)) - 0x3f000000;
    if (size >= kFirstInfinite) half = 0x7c00;
    if (size > kInfinity) half = 0x7e00 | (size >> 13 & 0x03ff);
    return half | (__float_as_uint(value) >> 16 & 0x8000);
  }
  static __device__ __forceinline__ bool fits(const Range& range, Parameters&) {
    return range.largest_finite < kFirstInfinite;
  }
};

struct Bfloat16 {
  static constexpr u32 kBytes = 2, kHeadWords = 0;
  static constexpr u32 kFirstInfinite = 0x7f7f8000;

  static __device__ __forceinline__ float decode(u32 bits, Parameters) { return __uint_as_float(bits << 16); }
  static __device__ __forceinline__ u32 encode(float value, Parameters) {
    const u32 bits = __float_as_uint(value);
    if (magnitude(value) > kInfinity) return bits >> 16 | 0x0040;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static __device__ __forceinline__ bool fits(const Range& range, Parameters&) {
    return range.largest_finite < kFirstInfinite;
  }
};

struct Int8 {
  static constexpr u32 kBytes = 1, kHeadWords = 1;
  static __device__ __forceinline__ float decode(u32 bits, Parameters row) {
    return __fmul_rn(static_cast<float>(static_cast<int>(bits << 24) >> 24), row.scale);
  }
  static __device__ __forceinline__ u32 encode(float value, Parameters row) {
    return static_cast<u32>(static_cast<int>(whole_code(value, row.scale, -127.0f, 127.0f))) & 0xff;
  }
  static __device__ __forceinline__ bool fits(const Range& range, Parameters& row) {
    row.scale = __fdiv_rn(__uint_as_float(range.largest), 127.0f);
    return magnitude(__fmul_rn(127.0f, row.scale)) < kInfinity;
  }
};

struct Uint8 {
  static constexpr u32 kBytes = 1, kHeadWords = 2;
  static __device__ __forceinline__ float decode(u32 bits, Parameters row) {
    return __fadd_rn(__fmul_rn(static_cast<float>(bits & 0xff), row.scale), row.offset);
  }
  static __device__ __forceinline__ u32 encode(float value, Parameters row) {
    return static_cast<u32>(whole_code(__fsub_rn(value, row.offset), row.scale, 0.0f, 255.0f));
  }
  static __device__ __forceinline__ bool fits(const Range& range, Parameters& row) {
    row.offset = __int_as_float(ordered(range.lowest));
    row.scale = __fdiv_rn(__fsub_rn(__int_as_float(ordered(range.highest)), row.offset), 255.0f);
    return range.largest < kInfinity && magnitude(__fadd_rn(__fmul_rn(255.0f, row.scale), row.offset)) < kInfinity;
  }
};

struct Float8 {
  static constexpr u32 kBytes = 1, kHeadWords = 1;
  // As in Float16, times 2^-120. No row has all ones, which would be NaN.
  static __device__ __forceinline__ float decode(u32 bits, Parameters row) {
    const float size = __fmul_rn(__uint_as_float((bits & 0x7f) << 20), 0x1p120f);
    return __fmul_rn(__uint_as_float(__float_as_uint(size) | (bits & 0x80) << 24), row.scale);
  }
  static __device__ __forceinline__ u32 encode(float value, Parameters row) {
    const float quotient = row.scale == 0.0f ? 0.0f : __fdiv_rn(value, row.scale);
    const u32 size = __float_as_uint(fminf(__uint_as_float(magnitude(quotient)), 448.0f));
    u32 code = (size - (120u << 23) + 0x7ffff + (size >> 20 & 1)) >> 20;
    // At 2^14 a float32 counts in units of 2^-9, the smallest subnormal.
    if (size < 0x3c800000) code = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) - 0x46800000;
    return code | (__float_as_uint(value) >> 24 & 0x80);
  }
  static __device__ __forceinline__ bool fits(const Range& range, Parameters& row) {
    row.scale = __fdiv_rn(__uint_as_float(range.largest), 448.0f);
    return magnitude(__fmul_rn(448.0f, row.scale)) < kInfinity;
  }
};

__device__ __forceinline__ u32 word_of(const uint4& unit, u32 i) {
  return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}

// Rows of kDim columns, each in the form `Code`.
template <class Code, u32 kDim>
struct Form {
  static constexpr u32 dim = kDim;
  static constexpr u32 kHeadBytes = 4 * Code::kHeadWords;
  static constexpr u32 stride_bytes = (kHeadBytes + kDim * Code::kBytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  static constexpr u32 units = stride_bytes / kUnitBytes;
  static constexpr u32 unit_columns = kUnitBytes / Code::kBytes;
  static constexpr bool has_parameters = Code::kHeadWords > 0;

  // The first column of a unit, below 0 if the row's parameters come first. Columns below 0 and from `dim` on are
  // undefined numbers and must not be used.
  static __device__ __forceinline__ int first_column(u32 unit) {
    return static_cast<int>(unit * unit_columns) - static_cast<int>(kHeadBytes / Code::kBytes);
  }

  // Past L1, as rows are read: see line.cuh.
  static __device__ __forceinline__ Parameters load_parameters(const u8* row) {
    Parameters parameters = {};
    if (Code::kHeadWords > 0) parameters.scale = __ldcg(reinterpret_cast<const float*>(row));
    if (Code::kHeadWords > 1) parameters.offset = __ldcg(reinterpret_cast<const float*>(row) + 1);
    return parameters;
  }

  // The same of a row's first unit.
  static __device__ __forceinline__ Parameters parameters_in(const uint4& unit) {
    Parameters parameters = {};
    if (Code::kHeadWords > 0) parameters.scale = __uint_as_float(unit.x);
    if (Code::kHeadWords > 1) parameters.offset = __uint_as_float(unit.y);
    return parameters;
  }

  static __device__ __forceinline__ uint4 load_unit(const u8* row, u32 unit) {
    return __ldcg(reinterpret_cast<const uint4*>(row) + unit);
  }

  // Column `i` of a unit.
  static __device__ __forceinline__ float column(const uint4& unit, Parameters parameters, u32 i) {
    const u32 at = i * Code::kBytes;
    return Code::decode(word_of(unit, at / 4) >> at % 4 * 8, parameters);
  }

  static __device__ __forceinline__ void decode(const uint4& unit, Parameters parameters,
                                                float (&columns)[unit_columns]) {
#pragma unroll
    for (u32 i = 0; i < unit_columns; ++i) columns[i] = column(unit, parameters, i);
  }

  // Votes. Each group of kLanes neighbouring lanes, a power of 2, has one row; `lane` is the caller's number in its
  // group. Returns to all lanes of the group whether `row`, float32[kDim], fits the form, and its parameters.
  template <u32 kLanes>
  static __device__ __forceinline__ bool measure(const float* row, u32 lane, Parameters& parameters) {
    Range range = {0, 0, 0x7fffffff, static_cast<int>(0x80000000u)};
    for (u32 c = lane; c < kDim; c += kLanes) {
      const u32 size = magnitude(row[c]);
      range.largest = max(range.largest, size);
      if (size < kInfinity) range.largest_finite = max(range.largest_finite, size);
      const int order = ordered(__float_as_int(row[c]));
      range.lowest = min(range.lowest, order);
      range.highest = max(range.highest, order);
    }
#pragma unroll
    for (u32 apart = kLanes / 2; apart > 0; apart /= 2) {
      range.largest = max(range.largest, __shfl_xor_sync(kAllLanes, range.largest, apart));
      range.largest_finite = max(range.largest_finite, __shfl_xor_sync(kAllLanes, range.largest_finite, apart));
      range.lowest = min(range.lowest, __shfl_xor_sync(kAllLanes, range.lowest, apart));
      range.highest = max(range.highest, __shfl_xor_sync(kAllLanes, range.highest, apart));
    }
    parameters = {};
    return Code::fits(range, parameters);
  }

  // A unit of `row`, float32[kDim], which must fit the form, with the parameters found.
  static __device__ __forceinline__ uint4 encode(const float* row, u32 unit, Parameters parameters) {
    u32 words[4];
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
      const u32 word = unit * 4 + w;
      words[w] = 0;
      if (Code::kHeadWords > 0 && word == 0) words[w] = __float_as_uint(parameters.scale);
      if (Code::kHeadWords > 1 && word == 1) words[w] = __float_as_uint(parameters.offset);
#pragma unroll
      for (u32 i = 0; i < 4 / Code::kBytes; ++i) {
        const int column = first_column(unit) + static_cast<int>(w * (4 / Code::kBytes) + i);
        if (column >= 0 && column < static_cast<int>(kDim))
          words[w] |= Code::encode(row[column], parameters) << i * Code::kBytes * 8;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// The names in HOTROW_FORMS and in Python.
template <u32 kDim> using fp32 = Form<Float32, kDim>;
template <u32 kDim> using fp16 = Form<Float16, kDim>;
template <u32 kDim> using bf16 = Form<Bfloat16, kDim>;
template <u32 kDim> using int8 = Form<Int8, kDim>;
template <u32 kDim> using uint8 = Form<Uint8, kDim>;
template <u32 kDim> using fp8 = Form<Float8, kDim>;

}  // namespace rows
