// Arrays for Python of what the library returns in vectors.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/python_names.hpp"

namespace hotrow {

inline const nb::object& dtype_of(int32_t) { return python().int32; }
inline const nb::object& dtype_of(int64_t) { return python().int64; }
inline const nb::object& dtype_of(float) { return python().float32; }

template <class T>
nb::object array_of(const std::vector<T>& items) {
  nb::object array = python().empty(items.size(), dtype_of(T()));
  const Array out(array, "items", "items[N]", Array::kWrite);
  std::copy(items.begin(), items.end(), out.data<T>());
  return array;
}

}  // namespace hotrow
