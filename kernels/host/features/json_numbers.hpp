// JSON texts that differ in their whole numbers alone, such as the heads of requests with other shapes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hotrow {

// A text with "0" in place of each whole number of at most 18 digits that is outside of strings, and the numbers. Texts
// with the same form are the same JSON, except for these numbers.
struct JsonNumbers {
  std::string form;
  std::vector<int64_t> numbers;
};

// Whether the character at a place of a string is behind an odd number of backslashes.
inline bool is_escaped(std::string_view text, size_t at) {
  size_t begin = at;
  while (begin && text[begin - 1] == '\\') --begin;
  return (at - begin) % 2;
}

// With `are_numbered`, the form has 0, 1, 2, ... in place of the numbers.
inline JsonNumbers json_numbers(std::string_view text, bool are_numbered) {
  constexpr size_t kMostDigits = 18;
  const auto is_digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  const auto is_of_number = [&](char letter) {
    return is_digit(letter) || letter == '-' || letter == '+' || letter == '.' || letter == 'e' || letter == 'E';
  };
  JsonNumbers out;
  out.form.reserve(text.size() + (are_numbered ? text.size() : 0));
  const bool has_escapes = text.find('\\') != text.npos;
  size_t at = 0, copied = 0;  // what is before `copied` is in the form
  while (at < text.size()) {
    if (text[at] == '"') {
      for (at = text.find('"', at + 1); has_escapes && at < text.size() && is_escaped(text, at);)
        at = text.find('"', at + 1);
      if (at == text.npos) break;
      ++at;
      continue;
    }
    if (!is_digit(text[at]) && text[at] != '-') {
      ++at;
      continue;
    }
    const size_t begin = at;
    int64_t number = 0;
    bool is_whole = true;
    for (; at < text.size() && is_of_number(text[at]); ++at) {
      is_whole &= is_digit(text[at]) && at - begin < kMostDigits;
      if (is_whole) number = 10 * number + (text[at] - '0');
    }
    if (!is_whole || (text[begin] == '0' && at - begin > 1)) continue;
    out.form.append(text, copied, begin - copied);
    out.form += are_numbered ? std::to_string(out.numbers.size()) : "0";
    out.numbers.push_back(number);
    copied = at;
  }
  if (copied < text.size()) out.form.append(text, copied, text.size() - copied);
  return out;
}

}  // namespace hotrow
