// Records of HugeCTR's Norm format. docs of the format: training/data/norm.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

struct NormLayout {
  size_t numbers;    // labels and dense features of a record
  size_t slots;
  size_t key_bytes;  // 4 or 8
  bool has_sums;     // a record is framed by its length and a checksum
};

struct NormRecords {
  std::vector<float> numbers;              // [records, layout.numbers]
  std::vector<int64_t> row_ptrs = {0};     // [records * layout.slots + 1]
  std::vector<int64_t> keys;
  size_t records = 0;
  size_t consumed = 0;          // bytes of these records
  const char* fault = nullptr;  // what is wrong with the record after them
};

// Decode the whole records among the first `bytes` of `data`, at most `most`. Throws std::bad_alloc.
NormRecords decode_norm(const uint8_t* data, size_t bytes, const NormLayout& layout, size_t most);

}  // namespace hotrow
