// Write a table's descriptor for other kernels. The caller keeps the arrays alive.
//
//   tables   Table[T]   entry `index` is written
//
// Launch: grid = 1, block = 1.
#include "table.cuh"

extern "C" __global__ void describe(Table* tables, u32 index, Line* lines, u8* rows, u64* counters,
                                    Line* absent_lines, u32 line_count, u32 absent_line_count, u32 form,
                                    u32 chain_lines, u32 seed, float default_value) {
  tables[index] = {lines, rows, counters,    absent_lines, line_count,    absent_line_count,
                   form,  chain_lines, seed, default_value, {}};
}
