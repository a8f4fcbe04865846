// Rows of a table in training, or of an array: weights, then the states of the table's update rule in float32.
//
// A row's weights and states are neighbours, because a step reads and writes all of them. A row-wise state is elsewhere:
// one more float would move the rows out of their cache lines.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lookup/lookup.hpp"
#include "rows/row_encode.hpp"
#include "rows/row_type.hpp"

namespace hotrow {

struct TrainedRows {
  std::byte* data;
  size_t stride_bytes;
  uint32_t dim;
  RowType type;    // of the weights: fp32, fp16 or bf16
  float absent;    // every weight of a row that does not exist
  float max_norm;  // rows with a larger L2 norm are scaled to it when they are pooled; 0: none
  std::byte* states_data;
  size_t states_stride_bytes;

  std::byte* row(int64_t number) const { return data + static_cast<size_t>(number) * stride_bytes; }
  float* states(int64_t number) const {
    return reinterpret_cast<float*>(states_data + static_cast<size_t>(number) * states_stride_bytes);
  }

  // Where the states begin in a row.
  static constexpr size_t states_offset(RowType type, uint32_t dim) { return (row_bytes(type, dim) + 3) / 4 * 4; }

  void prefetch(int64_t number, size_t bytes) const {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row(number) + at, 0, 2);  // see row_stream.inl
  }

  // The weights in float32: in place, or decoded into scratch[dim].
  const float* read(int64_t number, float* scratch) const {
    if (type == RowType::kFp32) return reinterpret_cast<const float*>(row(number));
    lookup_loops().decode(type, row(number), stride_bytes, dim, 1, scratch);
    return scratch;
  }

  // A weight that is too large for the type becomes infinite.
  void write(int64_t number, const float* weights) const { encode_rows(type, weights, dim, 1, row(number)); }

  // By how much pooling scales a row, and its L2 norm.
  float scale_of(const float* weights, float& norm) const {
    double squares = 0;
    for (uint32_t c = 0; c < dim; ++c) squares += static_cast<double>(weights[c]) * weights[c];
    norm = static_cast<float>(std::sqrt(squares));
    return norm > max_norm ? max_norm / norm : 1;
  }
};

}  // namespace hotrow
