// Arguments and errors that the bindings of training share.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "bindings/arguments.hpp"
#include "training/training_table.hpp"

namespace hotrow {

[[noreturn]] inline void raise_key_beyond(const std::string& name, const KeyBeyondRows& found) {
  const std::string expected =
      found.rows ? "expected keys from 0 to " + std::to_string(found.rows - 1) : "expected no keys, because it has no rows";
  throw nb::index_error(("table '" + name + "': " + expected + ", got " + std::to_string(found.key) + " at position " +
                         std::to_string(found.position))
                            .c_str());
}

// Runs `work` on one table, and turns what the table throws into Python errors.
template <class Work>
auto with_table_errors(const std::string& name, const Work& work) {
  try {
    return work();
  } catch (const KeyBeyondRows& found) {
    raise_key_beyond(name, found);
  } catch (const CallBeyondRows& found) {
    throw nb::value_error(("table '" + name + "': one call has more distinct keys than max_rows, " +
                           std::to_string(found.max_rows))
                              .c_str());
  }
}

// Runs `work`, and puts the table's name before what is wrong with an argument.
template <class Work>
auto naming(const std::string& name, const Work& work) {
  try {
    return work();
  } catch (const nb::builtin_exception& error) {
    throw nb::builtin_exception(error.type(), ("table '" + name + "': " + error.what()).c_str());
  }
}

inline void require_norm(std::optional<float> max_norm) {
  if (max_norm && !(*max_norm > 0))
    throw nb::value_error(("max_norm: expected a number above 0, got " + std::to_string(*max_norm)).c_str());
}

template <size_t kCount>
size_t parse_name(const char* argument, const char* const (&names)[kCount], const std::string& name) {
  std::string known;
  for (size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return i;
    known += (known.empty() ? "'" : ", '") + std::string(names[i]) + "'";
  }
  throw nb::value_error((std::string(argument) + ": expected one of " + known + ", got '" + name + "'").c_str());
}

}  // namespace hotrow
