#include "rows/norm_records.hpp"

#include <cstring>
#include <numeric>

namespace hotrow {
namespace {

template <class T>
T read(const uint8_t* at) {  // little-endian, like every machine that this is built for
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

enum class Step { kDone, kIncomplete, kFault };

// Appends the record at `at` to `out` and moves `at` behind it.
Step decode_record(const uint8_t*& at, const uint8_t* end, const NormLayout& layout, NormRecords& out) {
  const size_t number_bytes = layout.numbers * sizeof(float);
  if (static_cast<size_t>(end - at) < number_bytes) return Step::kIncomplete;
  const size_t first_number = out.numbers.size(), first_key = out.keys.size(), first_bag = out.row_ptrs.size();
  out.numbers.resize(first_number + layout.numbers);
  std::memcpy(out.numbers.data() + first_number, at, number_bytes);
  const uint8_t* next = at + number_bytes;
  auto step = Step::kDone;
  for (size_t slot = 0; slot < layout.slots && step == Step::kDone; ++slot) {
    if (static_cast<size_t>(end - next) < sizeof(int32_t)) {
      step = Step::kIncomplete;
      break;
    }
    const auto count = read<int32_t>(next);
    next += sizeof(int32_t);
    if (count < 0) {
      out.fault = "a slot has a negative number of keys";
      step = Step::kFault;
    } else if (static_cast<size_t>(end - next) / layout.key_bytes < static_cast<size_t>(count)) {
      step = Step::kIncomplete;
    } else {
      for (int32_t key = 0; key < count; ++key, next += layout.key_bytes)
        out.keys.push_back(layout.key_bytes == 4 ? read<uint32_t>(next) : read<int64_t>(next));
      out.row_ptrs.push_back(static_cast<int64_t>(out.keys.size()));
    }
  }
  if (step == Step::kDone) {
    at = next;
    return step;
  }
  out.numbers.resize(first_number);
  out.keys.resize(first_key);
  out.row_ptrs.resize(first_bag);
  return step;
}

Step decode_framed(const uint8_t*& at, const uint8_t* end, const NormLayout& layout, NormRecords& out) {
  if (static_cast<size_t>(end - at) < sizeof(int32_t) + 1) return Step::kIncomplete;
  const auto length = read<int32_t>(at);
  if (length < 0) {
    out.fault = "its length is negative";
    return Step::kFault;
  }
  const uint8_t* const payload = at + sizeof length;
  if (static_cast<size_t>(end - payload) < static_cast<size_t>(length) + 1) return Step::kIncomplete;
  const uint8_t* const sum = payload + length;
  if (std::accumulate(payload, sum, uint8_t{0}) != *sum) {
    out.fault = "its checksum is wrong";
    return Step::kFault;
  }
  const uint8_t* next = payload;
  const Step step = decode_record(next, sum, layout, out);
  if (step == Step::kFault) return step;
  if (step == Step::kIncomplete || next != sum) {
    if (step == Step::kDone) {  // the record ends before its frame
      const size_t bags = out.row_ptrs.size() - layout.slots;
      out.keys.resize(static_cast<size_t>(out.row_ptrs[bags - 1]));
      out.row_ptrs.resize(bags);
      out.numbers.resize(out.numbers.size() - layout.numbers);
    }
    out.fault = "its length is not that of its labels, dense features and keys";
    return Step::kFault;
  }
  at = sum + 1;
  return Step::kDone;
}

}  // namespace

NormRecords decode_norm(const uint8_t* data, size_t bytes, const NormLayout& layout, size_t most) {
  NormRecords out;
  const uint8_t *at = data, *const end = data + bytes;
  const auto decode = layout.has_sums ? decode_framed : decode_record;
  while (out.records < most && decode(at, end, layout, out) == Step::kDone) ++out.records;
  out.consumed = static_cast<size_t>(at - data);
  return out;
}

}  // namespace hotrow
