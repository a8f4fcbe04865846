// The values of one column of raw features, and how text is cut into values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace hotrow {

enum class ValueKind { kText, kInteger, kFloat };

// One value. Only the member of its column's kind has a meaning.
struct Value {
  std::string_view text;
  int64_t integer = 0;
  float number = 0;
};

// What stands for the missing values of a column.
struct Fill {
  ValueKind kind;
  std::string text;
  int64_t integer;
  float number;

  Value value() const { return {text, integer, number}; }
};

// V values of R rows. A value that is not valid, NaN or the empty text is missing.
struct Column {
  ValueKind kind = ValueKind::kText;
  size_t count = 0;                 // V
  const char* text = nullptr;       // of text: the bytes in which each value begins and ends
  const int64_t* begins = nullptr;  // [V]
  const int64_t* ends = nullptr;    // [V]
  const int64_t* integers = nullptr;
  const float* floats = nullptr;
  const uint8_t* valid = nullptr;   // [V]; null: all are valid
  const int64_t* splits = nullptr;  // [R + 1], where each row's list begins; null: a value each
  const Fill* fill = nullptr;       // null: a missing value stays missing
  size_t rows = 0;                  // R
  bool is_given = false;            // no feature reads a column that is not given
  bool has_lists = false;           // splits are there, or will be when the values are

  bool is_missing(size_t at) const {
    if (valid && !valid[at]) return true;
    if (kind == ValueKind::kText) return begins[at] == ends[at];
    return kind == ValueKind::kFloat && floats[at] != floats[at];
  }
  Value value(size_t at) const {
    switch (kind) {
      case ValueKind::kText: return {{text + begins[at], static_cast<size_t>(ends[at] - begins[at])}};
      case ValueKind::kInteger: return {{}, integers[at]};
      default: return {{}, 0, floats[at]};
    }
  }
};

// Where texts begin and end.
struct TextPlaces {
  std::vector<int64_t> begins, ends, splits;
};

// Find `count` texts, each after its length as uint32. Returns the number of texts that were found, which is less if
// the bytes end too early, and one more if bytes are left. Bytes that cannot have so many texts are not read.
inline size_t find_texts(const char* bytes, size_t size, size_t count, TextPlaces& out) {
  if (count > size / 4) return std::min(count - 1, size / 4);
  size_t at = 0;
  out.begins.reserve(count);
  out.ends.reserve(count);
  for (size_t found = 0; found < count; ++found) {
    if (size - at < 4) return found;
    const auto byte = [&](size_t i) { return static_cast<uint64_t>(static_cast<unsigned char>(bytes[at + i])); };
    const uint64_t length = byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
    at += 4;
    if (length > size - at) return found;
    out.begins.push_back(static_cast<int64_t>(at));
    at += length;
    out.ends.push_back(static_cast<int64_t>(at));
  }
  return count + (at < size);
}

// Cut each text at a separator of one byte. An empty text has no part.
inline void cut_texts(const Column& column, char separator, TextPlaces& out) {
  out.splits.push_back(0);
  for (size_t i = 0; i < column.count; ++i) {
    int64_t begin = column.begins[i];
    const bool is_there = !column.is_missing(i);
    for (int64_t at = begin; is_there && at <= column.ends[i]; ++at) {
      if (at < column.ends[i] && column.text[at] != separator) continue;
      out.begins.push_back(begin);
      out.ends.push_back(at);
      begin = at + 1;
    }
    out.splits.push_back(static_cast<int64_t>(out.begins.size()));
  }
}

// Whether bytes are ASCII, as most text is. Fast, because the last bytes are read twice.
inline bool is_ascii(std::string_view text) {
  const char* const s = text.data();
  const size_t n = text.size();
  uint64_t bits = 0;
  const auto take = [&bits](const char* at, auto word) {
    std::memcpy(&word, at, sizeof word);
    bits |= word;
  };
  if (n >= 8) {
    for (size_t at = 0; at + 8 < n; at += 8) take(s + at, uint64_t{});
    take(s + n - 8, uint64_t{});
    return !(bits & 0x8080808080808080);
  }
  if (n >= 4) {
    take(s, uint32_t{});
    take(s + n - 4, uint32_t{});
    return !(bits & 0x80808080);
  }
  for (size_t at = 0; at < n; ++at) bits |= static_cast<unsigned char>(s[at]);
  return !(bits & 0x80);
}

// Whether bytes are UTF-8, without surrogates and without forms that are too long.
inline bool is_utf8(std::string_view text) {
  if (is_ascii(text)) return true;
  const auto* at = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = at + text.size();
  while (at < end) {
    const unsigned char first = *at++;
    if (first < 0x80) continue;
    int more = 0;
    unsigned low = 0x80, high = 0xbf;
    if (first >= 0xc2 && first <= 0xdf) more = 1;
    else if (first >= 0xe0 && first <= 0xef) more = 2, low = first == 0xe0 ? 0xa0 : low, high = first == 0xed ? 0x9f : high;
    else if (first >= 0xf0 && first <= 0xf4) more = 3, low = first == 0xf0 ? 0x90 : low, high = first == 0xf4 ? 0x8f : high;
    else return false;
    if (end - at < more) return false;
    for (; more; --more, ++at, low = 0x80, high = 0xbf)
      if (*at < low || *at > high) return false;
  }
  return true;
}

}  // namespace hotrow
