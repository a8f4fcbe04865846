// Copy rows of a table, by number, into an array of float32.
#pragma once

#include "columns.cuh"
#include "rows.cuh"
#include "table.cuh"

// Store the columns of a unit that belong to the row: a unit may begin with the row's parameters, and the last unit may
// end in padding. Both are whole quads, except that the row's last quad may be short. `column(c)` returns a column of
// the unit. One quad at a time, because a unit may have more columns than there are registers.
template <class Row, class Column>
__device__ __forceinline__ void store_unit(float* row, u32 unit, Column column) {
  constexpr int quads = (Row::dim + 3) / 4;
  const int first = Row::first_column(unit) / 4;
#pragma unroll
  for (int q = 0; q < static_cast<int>(Row::unit_columns) / 4; ++q) {
    if (first + q < 0 || first + q >= quads) continue;
    const u32 c = 4 * q;
    store_quad<Row::dim>(row, first + q, make_float4(column(c), column(c + 1), column(c + 2), column(c + 3)));
  }
}

// Copy row `numbers[i]` to out + i * D for i < count, and the table's default value for kNoRow. All threads of the
// block call it together, after a barrier that follows the writing of `numbers`.
//
// The threads take the (row, unit) pairs in turn: every lane has work at any D, neighbours touch neighbouring bytes,
// and each thread starts several loads before it stores the first. Values that are not loaded are zero: if they kept
// their old value, a compiler might hold it in registers from round to round, for each form of a launch.
template <class Row>
__device__ __forceinline__ void gather_rows(const Table& table, const i64* numbers, u32 count, float* out) {
  constexpr u32 kUnderWay = 4;
  const u32 pairs = count * Row::units;
  for (u32 begin = threadIdx.x; begin < pairs; begin += kUnderWay * blockDim.x) {
    uint4 units[kUnderWay] = {};
    rows::Parameters parameters[kUnderWay] = {};
    bool held[kUnderWay];
#pragma unroll
    for (u32 k = 0; k < kUnderWay; ++k) {
      const u32 pair = begin + k * blockDim.x;
      const i64 number = pair < pairs ? numbers[pair / Row::units] : kNoRow;
      held[k] = number != kNoRow;
      if (!held[k]) continue;
      const u8* row = table.rows + number * Row::stride_bytes;
      parameters[k] = Row::load_parameters(row);
      units[k] = Row::load_unit(row, pair % Row::units);
    }
#pragma unroll
    for (u32 k = 0; k < kUnderWay; ++k) {
      const u32 pair = begin + k * blockDim.x;
      if (pair >= pairs) break;
      float* row = out + static_cast<i64>(pair / Row::units) * Row::dim;
      store_unit<Row>(row, pair % Row::units, [&](u32 c) {
        return held[k] ? Row::column(units[k], parameters[k], c) : table.default_value;
      });
    }
  }
}
