// Divide the sum of a bag's rows, as the end of a pooled lookup does.
//
//   bags     TableBags[1]
//   keys     of the bag
//   total    of its weights, as far as they were added up
//   columns  float32[4], the sums; then the quotients
//
// Launch: grid = 1, block = 1.
#include "part_sum.cuh"

extern "C" __global__ void divide(const TableBags* bags, u32 keys, float total, float* columns) {
  PartSum<rows::fp32<4>> sum = {};
  sum.total = total;
  for (u32 c = 0; c < 4; ++c) sum.columns[c] = columns[c];
  sum.divide(*bags, keys);
  for (u32 c = 0; c < 4; ++c) columns[c] = sum.columns[c];
}
