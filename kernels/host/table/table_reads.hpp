// What the Python bindings of the host table and of the snapshot share: lookups, and checks of plain numbers.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "bindings/arguments.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/python_names.hpp"

namespace hotrow {

// Whole numbers arrive as int64, so that a wrong number and a wrong type are different errors.
inline uint64_t in_range(const char* name, int64_t value, uint64_t most) {
  if (value < 1 || static_cast<uint64_t>(value) > most)
    throw nb::value_error((std::string(name) + ": expected 1 to " + std::to_string(most) + ", got " +
                           std::to_string(value)).c_str());
  return static_cast<uint64_t>(value);
}

template <class Table>
nb::object fetch(Table& table, nb::handle keys_in, nb::handle out_in) {
  const Keys keys(keys_in, Keys::kLookUp);
  Array out(out_in, "out", "float32[N, D]", Array::kWrite);
  out.require(Dtype::kFloat32, 2);
  out.require_shape(keys.count(), table.dim());
  nb::object found = python().empty(keys.count(), python().bool_);
  const Array found_array(found, "found", "bool[N]", Array::kWrite);
  std::optional<GilRelease> release;
  release_gil_unless(!Table::kReadsMayWait && keys.count() <= kTinyKeys, release);
  table.fetch(keys.begin(), keys.count(), out.data<float>(), found_array.data<bool>());
  release.reset();
  return found;
}

template <class Table>
nb::object fetch_pooled(Table& table, nb::handle keys_in, nb::handle row_ptrs_in, nb::handle out_in,
                        const std::string& combiner, nb::handle weights_in) {
  const Keys keys(keys_in, Keys::kLookUp);
  const BagArguments bags(row_ptrs_in, combiner, weights_in, keys.count());
  Array out(out_in, "out", "float32[R, D]", Array::kWrite);
  out.require(Dtype::kFloat32, 2);
  out.require_shape(bags.count(), table.dim());
  nb::object found = python().empty(keys.count(), python().bool_);
  const Array found_array(found, "found", "bool[N]", Array::kWrite);
  std::optional<GilRelease> release;
  release_gil_unless(!Table::kReadsMayWait && keys.count() <= kTinyKeys && bags.count() <= kTinyKeys, release);
  table.fetch_pooled(keys.begin(), bags.bags(), out.data<float>(), found_array.data<bool>());
  release.reset();
  return found;
}

}  // namespace hotrow
