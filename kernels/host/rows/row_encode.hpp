// Encode float32 rows to a table's row type (row_type.hpp), and round them by encoding and decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "rows/row_type.hpp"

namespace hotrow {

// A value that a row type cannot hold.
struct UnfitValue {
  size_t row;
  uint32_t column;
  float value;
};

// rows[n][dim] -> out[n][row_bytes(type, dim)]; `out` need not be aligned. Stops at the first row with a value that
// does not fit and returns the row's first such value, or its largest in magnitude if the row's range is at fault.
std::optional<UnfitValue> encode_rows(RowType type, const float* rows, uint32_t dim, size_t n, std::byte* out);

// rows[n][dim] -> out[n][dim] as a table of this type would return them; `out` may be `rows`. Returns the same as
// encode_rows. Rows before the unfit row may have been written.
std::optional<UnfitValue> round_rows(RowType type, const float* rows, uint32_t dim, size_t n, float* out);

}  // namespace hotrow
