// Columns whose values are still the bytes of tensors in a request, little-endian.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string_view>
#include <type_traits>
#include <vector>

#include "features/values.hpp"

namespace hotrow {

enum class Datatype { kBytes, kInt64, kInt32, kUint32, kFp32, kFp64, kBool };

// The bytes of a number; 0: texts say it themselves.
inline size_t item_bytes(Datatype datatype) {
  constexpr size_t bytes[] = {0, 8, 4, 4, 4, 8, 1};
  return bytes[static_cast<size_t>(datatype)];
}

// Where the numbers that describe a tensor are: its extents, and its bytes.
struct TensorPlace {
  Datatype datatype;
  size_t first, extents, bytes;
};

// The items of a tensor, its bytes and its first extent; false if they cannot be those of a tensor. An extent, and the
// product of extents except 0, is at most 2^31 - 1.
inline bool describe(const TensorPlace& place, const int64_t* numbers, int64_t& items, int64_t& bytes, int64_t& rows) {
  int64_t product = 1;
  items = 1;
  for (size_t i = 0; i < place.extents; ++i) {
    const int64_t extent = numbers[place.first + i];
    if (extent < 0 || extent > INT32_MAX) return false;
    if (extent) product *= extent;
    if (product > INT32_MAX) return false;
    items *= extent;
  }
  rows = numbers[place.first];
  bytes = numbers[place.bytes];
  const auto size = static_cast<int64_t>(item_bytes(place.datatype));
  return bytes >= 0 && (!size || bytes == items * size);
}

// N items in some bytes.
struct Tensor {
  Datatype datatype = Datatype::kBytes;
  size_t count = 0, rows = 0;  // N, and the first extent
  std::string_view bytes;
  TextPlaces texts;  // of kBytes

  // Whether there are as many bytes as N numbers have.
  bool has_right_size() const {
    const size_t size = item_bytes(datatype);
    return !size || (bytes.size() % size == 0 && count == bytes.size() / size);
  }
  // Find the texts. Returns what find_texts() does.
  size_t read() { return datatype == Datatype::kBytes ? find_texts(bytes.data(), bytes.size(), count, texts) : count; }
};

// A column whose values are a tensor.
struct TensorColumn {
  size_t column;
  const Tensor* values;
  bool has_lists = false;
  const Tensor* offsets = nullptr;  // [R + 1], where the list of each row begins; null: all are as long
};

// The offsets of a column are wrong. It has so many values.
struct TensorFault {
  size_t column, values;
};

// The memory of numbers that are not read in place.
struct TensorMemory {
  std::deque<std::vector<int64_t>> integers;
  std::deque<std::vector<float>> floats;
};

// Whether a column can have the items as they are.
inline bool is_readable(Datatype datatype) { return datatype <= Datatype::kFp32; }

inline ValueKind kind_of(Datatype datatype) {
  if (datatype == Datatype::kBytes) return ValueKind::kText;
  return datatype == Datatype::kFp32 ? ValueKind::kFloat : ValueKind::kInteger;
}

// The items of a tensor as numbers of type To: in place if they are such numbers and aligned.
template <class From, class To>
const To* numbers_of(const Tensor& tensor, std::deque<std::vector<To>>& memory) {
  const char* const bytes = tensor.bytes.data();
  if (std::is_same_v<From, To> && reinterpret_cast<uintptr_t>(bytes) % alignof(To) == 0)
    return reinterpret_cast<const To*>(bytes);
  std::vector<To>& out = memory.emplace_back(tensor.count);
  for (size_t i = 0; i < tensor.count; ++i) {
    From item;
    std::memcpy(&item, bytes + i * sizeof item, sizeof item);
    out[i] = static_cast<To>(item);
  }
  return out.data();
}

inline const int64_t* read_integers(const Tensor& tensor, TensorMemory& memory) {
  switch (tensor.datatype) {
    case Datatype::kInt64: return numbers_of<int64_t>(tensor, memory.integers);
    case Datatype::kInt32: return numbers_of<int32_t>(tensor, memory.integers);
    default: return numbers_of<uint32_t>(tensor, memory.integers);
  }
}

// Where the lists of R rows begin; null for lists of one value each.
inline const int64_t* splits_of(const TensorColumn& from, size_t rows, TensorMemory& memory) {
  const size_t values = from.values->count;
  if (!from.has_lists || (!from.offsets && values == rows)) return nullptr;
  std::vector<int64_t>& splits = memory.integers.emplace_back(rows + 1);
  if (!from.offsets) {
    for (size_t row = 1; row <= rows; ++row) splits[row] = static_cast<int64_t>(row * (values / rows));
    return splits.data();
  }
  TensorMemory own;  // the offsets are copied, because those that are checked must be those that are used
  std::copy_n(read_integers(*from.offsets, own), rows + 1, splits.begin());
  if (splits[0] != 0 || splits[rows] != static_cast<int64_t>(values) || !std::is_sorted(splits.begin(), splits.end()))
    throw TensorFault{from.column, values};
  return splits.data();
}

// Give a column, whose kind, count and rows are set, the values of its tensor. Throws TensorFault.
inline void read_tensor(const TensorColumn& from, Column& column, TensorMemory& memory) {
  column.splits = splits_of(from, column.rows, memory);
  switch (column.kind) {
    case ValueKind::kFloat: column.floats = numbers_of<float>(*from.values, memory.floats); return;
    case ValueKind::kInteger: column.integers = read_integers(*from.values, memory); return;
    default:
      column.text = from.values->bytes.data();
      column.begins = from.values->texts.begins.data();
      column.ends = from.values->texts.ends.data();
  }
}

}  // namespace hotrow
