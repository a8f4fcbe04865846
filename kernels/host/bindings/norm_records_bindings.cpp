// The Python binding of Norm's records. See bindings.cpp for the rules.
#include "bindings/norm_records_bindings.hpp"

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/gil_release.hpp"
#include "bindings/results.hpp"
#include "rows/norm_records.hpp"

namespace hotrow {
namespace {

constexpr size_t kMostColumns = 1 << 24;

// Bytes cannot change, so they are read without a copy.
nb::object decode(const nb::bytes& data, size_t offset, size_t numbers, size_t slots, bool has_wide_keys, bool has_sums,
                  size_t most) {
  if (offset > data.size()) throw nb::value_error("offset: beyond the end of the data");
  if (numbers > kMostColumns || slots < 1 || slots > kMostColumns)
    throw nb::value_error("numbers and slots: expected at most 16,777,216, and at least one slot");
  const NormLayout layout = {numbers, slots, has_wide_keys ? size_t{8} : size_t{4}, has_sums};
  const auto* first = reinterpret_cast<const uint8_t*>(data.c_str()) + offset;
  const size_t bytes = data.size() - offset;
  const NormRecords records = [&] {
    const GilRelease release;
    return decode_norm(first, bytes, layout, most);
  }();
  return nb::make_tuple(array_of(records.numbers), array_of(records.row_ptrs), array_of(records.keys),
                        records.consumed, records.fault ? records.fault : "");
}

}  // namespace

void bind_norm_records(nb::module_& module) {
  module.def("decode_norm", &decode, nb::arg("data"), nb::arg("offset"), nb::arg("numbers"), nb::arg("slots"),
             nb::arg("has_wide_keys"), nb::arg("has_sums"), nb::arg("most"));
}

}  // namespace hotrow
