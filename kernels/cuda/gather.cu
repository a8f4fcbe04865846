// Copy rows of a table by number, as list_keys.cu lists them.
//
//   table     Table[1]
//   numbers   int64[N]         kNoRow gives the table's default value
//   listed    uint32[1]        how many numbers there are; nothing else is written
//   out       float32[N, D]
//
// Launch: grid = N / kBlockRows rounded up, block = 256.
#include "gather.cuh"

constexpr u32 kBlockRows = 256;

extern "C" __global__ void __launch_bounds__(256)
    gather(const Table* table, const i64* numbers, const u32* listed, float* out) {
  const u32 count = *listed;
  const u32 first = blockIdx.x * kBlockRows;
  if (first >= count) return;
  with_form(table->form, [&](auto row) {
    gather_rows<decltype(row)>(*table, numbers + first, min(count - first, kBlockRows),
                               out + static_cast<i64>(first) * row.dim);
  });
}
