// Plain C++ that compilers can vectorize: integer comparisons and no branch per column.
#include "rows/row_encode.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "lookup/lanes.hpp"
#include "lookup/lookup.hpp"

namespace hotrow {
namespace {

constexpr int32_t kInfinity = 0x7F800000;  // bits of float32

// Ordered like the magnitudes, with NaN above infinity.
int32_t magnitude(float value) { return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFF); }

// Ordered like the values. The function is its own inverse.
int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// The nearest whole number, ties to even, for magnitudes below 2^22: added to 1.5 * 2^23, a value loses its fraction.
float rounded(float value) {
  constexpr float kShift = 12582912.0f;
  return (value + kShift) - kShift;
}

// `yes` or `no` without a branch, so that compilers vectorize the loop.
uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

struct Half {
  static constexpr int32_t kFirstInfinite = 0x477FF000;  // 65520, halfway between the largest binary16 and 2^16

  static uint16_t of(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t size = bits & 0x7FFFFFFF;
    // Normal: re-bias the exponent and round the mantissa by what an addition carries.
    const uint32_t normal = (size - 0x38000000 + 0x0FFF + ((size >> 13) & 1)) >> 13;
    // Subnormal: 0.5 has the exponent at which the float32 mantissa counts in units of 2^-24; the addition rounds.
    const uint32_t subnormal = bits_of(from_bits(size) + 0.5f) - 0x3F000000;
    const uint32_t nan = 0x7E00 | ((size >> 13) & 0x03FF);
    uint32_t half = select(size < 0x38800000, subnormal, normal);
    half = select(size >= static_cast<uint32_t>(kFirstInfinite), 0x7C00, half);
    half = select(size > static_cast<uint32_t>(kInfinity), nan, half);
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
  }
};

struct Bfloat {
  static constexpr int32_t kFirstInfinite = 0x7F7F8000;

  static uint16_t of(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x0040;
    return static_cast<uint16_t>(select((bits & 0x7FFFFFFF) > static_cast<uint32_t>(kInfinity), nan, nearest));
  }
};

constexpr uint32_t kFits = UINT32_MAX;  // every column fits

// Each encoder writes one row and returns the column that does not fit, or kFits.
template <class Narrow>
uint32_t encode_narrow(const float* row, uint32_t dim, std::byte* out) {
  const auto overflows = [](float value) {
    return (magnitude(value) >= Narrow::kFirstInfinite) & (magnitude(value) < kInfinity);
  };
  auto* narrow = reinterpret_cast<Unaligned16*>(out);
  for (uint32_t c = 0; c < dim; ++c) narrow[c] = Narrow::of(row[c]);
  uint32_t unfit = 0;
  for (uint32_t c = 0; c < dim; ++c) unfit |= static_cast<uint32_t>(overflows(row[c]));
  return unfit ? static_cast<uint32_t>(std::find_if(row, row + dim, overflows) - row) : kFits;
}

uint32_t column_of_magnitude(const float* row, uint32_t dim, int32_t size) {
  return static_cast<uint32_t>(
      std::find_if(row, row + dim, [size](float value) { return magnitude(value) == size; }) - row);
}

uint32_t first_not_finite(const float* row, uint32_t dim) {
  return static_cast<uint32_t>(std::find_if(row, row + dim, [](float value) { return !std::isfinite(value); }) - row);
}

uint32_t encode_int8(const float* row, uint32_t dim, std::byte* out) {
  int32_t largest = 0;
  for (uint32_t c = 0; c < dim; ++c) largest = std::max(largest, magnitude(row[c]));
  if (largest >= kInfinity) return first_not_finite(row, dim);
  const float scale = from_bits(static_cast<uint32_t>(largest)) / 127.0f;
  if (!std::isfinite(127.0f * scale)) return column_of_magnitude(row, dim, largest);
  std::memcpy(out, &scale, sizeof scale);
  auto* codes = reinterpret_cast<int8_t*>(out + sizeof scale);
  const float divisor = scale == 0.0f ? INFINITY : scale;
  for (uint32_t c = 0; c < dim; ++c) {
    const float code = rounded(row[c] / divisor);
    codes[c] = static_cast<int8_t>(static_cast<int32_t>(std::min(std::max(code, -127.0f), 127.0f)));
  }
  return kFits;
}

uint32_t encode_uint8(const float* row, uint32_t dim, std::byte* out) {
  int32_t largest = 0, highest = INT32_MIN, lowest = INT32_MAX;
  for (uint32_t c = 0; c < dim; ++c) {
    const int32_t order = ordered(static_cast<int32_t>(bits_of(row[c])));
    largest = std::max(largest, magnitude(row[c]));
    highest = std::max(highest, order);
    lowest = std::min(lowest, order);
  }
  if (largest >= kInfinity) return first_not_finite(row, dim);
  const float offset = from_bits(static_cast<uint32_t>(ordered(lowest)));
  const float scale = (from_bits(static_cast<uint32_t>(ordered(highest))) - offset) / 255.0f;
  if (!std::isfinite(255.0f * scale + offset)) return column_of_magnitude(row, dim, largest);
  std::memcpy(out, &scale, sizeof scale);
  std::memcpy(out + sizeof scale, &offset, sizeof offset);
  auto* codes = reinterpret_cast<uint8_t*>(out + 2 * sizeof scale);
  const float divisor = scale == 0.0f ? INFINITY : scale;
  for (uint32_t c = 0; c < dim; ++c) {
    const float code = rounded((row[c] - offset) / divisor);
    codes[c] = static_cast<uint8_t>(static_cast<int32_t>(std::min(std::max(code, 0.0f), 255.0f)));
  }
  return kFits;
}

uint32_t encode_fp32(const float* row, uint32_t dim, std::byte* out) {
  std::memcpy(out, row, dim * sizeof(float));
  return kFits;
}

}  // namespace

std::optional<UnfitValue> encode_rows(RowType type, const float* rows, uint32_t dim, size_t n, std::byte* out) {
  using Encode = uint32_t (*)(const float*, uint32_t, std::byte*);
  static constexpr Encode encoders[kRowTypes] = {encode_fp32, encode_narrow<Half>, encode_narrow<Bfloat>, encode_int8,
                                                 encode_uint8};
  const Encode encode = encoders[static_cast<size_t>(type)];
  for (size_t i = 0; i < n; ++i) {
    const float* row = rows + i * dim;
    const uint32_t column = encode(row, dim, out + i * row_bytes(type, dim));
    if (column != kFits) return UnfitValue{i, column, row[std::min(column, dim - 1)]};
  }
  return std::nullopt;
}

std::optional<UnfitValue> round_rows(RowType type, const float* rows, uint32_t dim, size_t n, float* out) {
  constexpr size_t kBlockRows = 64;
  const size_t bytes = row_bytes(type, dim);
  const std::unique_ptr<std::byte[]> encoded(new std::byte[kBlockRows * bytes]);
  for (size_t begin = 0; begin < n; begin += kBlockRows) {
    const size_t count = std::min(kBlockRows, n - begin);
    if (auto unfit = encode_rows(type, rows + begin * dim, dim, count, encoded.get())) {
      unfit->row += begin;
      return unfit;
    }
    lookup_loops().decode(type, encoded.get(), bytes, dim, count, out + begin * dim);
  }
  return std::nullopt;
}

}  // namespace hotrow
