// Encode and decode rows in one form: -DHOTROW_ROW=rows::int8<16>.
//
//   rows     float32[N, D]
//   encoded  uint8[N, stride]
//   fits     uint8[N]
//
// Launch: grid = N / 32 rounded up, block = 256; eight lanes per row.
#include "rows.cuh"

using Row = HOTROW_ROW;
constexpr u32 kLanes = 8;

extern "C" __global__ void encode(const float* rows, u8* encoded, u8* fits, u32 count) {
  const u32 i = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const u32 row = min(i, count - 1);
  rows::Parameters parameters;
  const bool row_fits = Row::measure<kLanes>(rows + static_cast<i64>(row) * Row::dim, lane, parameters);
  if (i >= count) return;
  for (u32 unit = lane; unit < Row::units; unit += kLanes)
    reinterpret_cast<uint4*>(encoded)[static_cast<i64>(i) * Row::units + unit] =
        Row::encode(rows + static_cast<i64>(i) * Row::dim, unit, parameters);
  if (lane == 0) fits[i] = row_fits;
}

extern "C" __global__ void decode(const u8* encoded, float* rows, u32 count) {
  const u32 i = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (i >= count) return;
  const u8* row = encoded + static_cast<i64>(i) * Row::stride_bytes;
  for (u32 unit = threadIdx.x % kLanes; unit < Row::units; unit += kLanes) {
    float columns[Row::unit_columns];
    Row::decode(Row::load_unit(row, unit), Row::load_parameters(row), columns);
    for (u32 c = 0; c < Row::unit_columns; ++c) {
      const int column = Row::first_column(unit) + static_cast<int>(c);
      if (column >= 0 && column < static_cast<int>(Row::dim)) rows[static_cast<i64>(i) * Row::dim + column] = columns[c];
    }
  }
}
