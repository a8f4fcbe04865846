// Takes a ModelInferRequest of KServe v2 apart, in protobuf's wire format. What it says of its tensors is not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hotrow {

struct InferMessage {
  size_t fields = 0;     // of the message, of its tensors and of their contents
  bool is_plain = true;  // false: bytes are no field, or there are groups
  std::string_view model, version, id;
  std::string head;                        // all bytes except the id and the raw contents
  std::vector<std::string_view> contents;  // the raw contents
};

struct WireField {
  enum Kind { kVarint, kEightBytes, kBytes, kGroup, kGroupEnd, kFourBytes };
  uint64_t number;
  Kind kind;
  std::string_view content;  // of kBytes
};

inline bool take_varint(std::string_view& rest, uint64_t& number) {
  constexpr size_t kMostBytes = 10;
  number = 0;
  for (size_t i = 0; i < rest.size() && i < kMostBytes; ++i) {
    const auto byte = static_cast<uint8_t>(rest[i]);
    number |= static_cast<uint64_t>(byte & 0x7F) << (7 * i);
    if (byte < 0x80) {
      rest.remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

// Take the first field off `rest`. False if it does not begin with a field.
inline bool take_field(std::string_view& rest, WireField& field) {
  uint64_t tag = 0, size = 0;
  if (!take_varint(rest, tag) || (tag & 7) > WireField::kFourBytes) return false;
  field = {tag >> 3, static_cast<WireField::Kind>(tag & 7), {}};
  switch (field.kind) {
    case WireField::kVarint: return take_varint(rest, size);
    case WireField::kEightBytes: size = 8; break;
    case WireField::kFourBytes: size = 4; break;
    case WireField::kBytes:
      if (!take_varint(rest, size)) return false;
      break;
    default: return true;
  }
  if (size > rest.size()) return false;
  if (field.kind == WireField::kBytes) field.content = rest.substr(0, size);
  rest.remove_prefix(size);
  return true;
}

// Count the fields of a tensor, and of its contents.
inline void count_fields(std::string_view rest, bool is_tensor, size_t most_fields, InferMessage& out) {
  constexpr uint64_t kContents = 5;
  WireField field;
  while (!rest.empty() && out.fields <= most_fields) {
    ++out.fields;
    if (!take_field(rest, field)) {
      out.is_plain = false;
      return;
    }
    if (is_tensor && field.number == kContents) count_fields(field.content, false, most_fields, out);
  }
}

// The parts of a message, which may be any bytes. The views are of `data`. It stops after `most_fields` fields.
inline InferMessage infer_message(std::string_view data, size_t most_fields) {
  enum : uint64_t { kModel = 1, kVersion, kId, kInputs = 5, kOutputs, kRawContents };
  InferMessage out;
  std::string_view rest = data;
  size_t copied = 0;  // what is before it is in the head, or is left out
  const auto leave_out = [&](size_t begin, size_t end) {
    out.head.append(data, copied, begin - copied);
    copied = end;
  };
  WireField field;
  while (!rest.empty() && out.fields <= most_fields) {
    const size_t begin = data.size() - rest.size();
    ++out.fields;
    if (!take_field(rest, field)) {
      out.is_plain = false;
      break;
    }
    const size_t end = data.size() - rest.size();
    if (field.kind != WireField::kBytes) {
      out.is_plain &= field.kind != WireField::kGroup && field.kind != WireField::kGroupEnd;
      continue;
    }
    switch (field.number) {
      case kModel: out.model = field.content; break;
      case kVersion: out.version = field.content; break;
      case kInputs: count_fields(field.content, true, most_fields, out); break;
      case kOutputs: count_fields(field.content, false, most_fields, out); break;
      case kId:
        out.id = field.content;
        leave_out(begin, end);
        break;
      case kRawContents:
        out.contents.push_back(field.content);
        leave_out(end - field.content.size(), end);
        break;
      default: break;
    }
  }
  out.head.append(data, copied, std::string_view::npos);
  return out;
}

}  // namespace hotrow
