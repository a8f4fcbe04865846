// The Python bindings of what happens to a request's keys before the lookup. See bindings.cpp for the rules.
#include "bindings/split_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/python_names.hpp"
#include "lookup/lookup.hpp"
#include "lookup/split.hpp"

namespace hotrow {
namespace {

// The items of an array: in place, or as a copy if they are not aligned.
template <class T>
class AlignedItems {
 public:
  explicit AlignedItems(const Array& array)
      : copy_(array.is_aligned() ? nullptr : array.copy<T>()), begin_(copy_ ? copy_.get() : array.data<const T>()) {}
  const T* begin() const { return begin_; }

 private:
  std::unique_ptr<T[]> copy_;
  const T* begin_;
};

size_t first_outside(nb::handle keys_in, int64_t smallest, int64_t largest) {
  const Array keys(keys_in, "keys", "int64[N]", Array::kCopy);
  keys.require(Dtype::kInt64, 1);
  const AlignedItems<int64_t> items(keys);
  std::optional<GilRelease> release;
  release_gil_unless(keys.size(0) <= kTinyKeys, release);
  const size_t position = lookup_loops().first_outside(items.begin(), keys.size(0), smallest, largest);
  release.reset();
  return position;
}

size_t samples_of(size_t length, size_t slots, size_t tables) {
  const size_t samples = length ? (length - 1) / slots : 0;
  if (!samples || !(length == samples * slots + 1 || length == samples * slots + tables))
    throw nb::value_error("row_ptrs: expected B * S + 1 offsets, or B * S + T");
  return samples;
}

template <class Offset>
nb::object split(nb::handle keys_in, const Array& keys, const Array& row_ptrs, std::vector<int64_t> slots) {
  const size_t total = static_cast<size_t>(std::accumulate(slots.begin(), slots.end(), int64_t{0}));
  const size_t tables = slots.size(), length = row_ptrs.size(0), samples = samples_of(length, total, tables);
  const bool one_csr = tables > 1 && length == samples * total + 1;
  const AlignedItems<int64_t> key_items(keys);
  const AlignedItems<Offset> offsets(row_ptrs);
  nb::object out_keys = tables == 1 ? nb::borrow(keys_in) : python().empty(keys.size(0), python().int64);
  nb::object out_row_ptrs = python().empty(samples * total + tables, python().int32);
  std::vector<int64_t> most_keys(tables), all_keys(tables);
  std::optional<Array> keys_array;
  if (tables > 1) keys_array.emplace(out_keys, "keys", "int64[N]", Array::kWrite);
  const Array row_ptrs_array(out_row_ptrs, "row_ptrs", "int32[R]", Array::kWrite);
  const Split<Offset> job = {key_items.begin(),
                             keys.size(0),
                             offsets.begin(),
                             std::move(slots),
                             samples,
                             keys_array ? keys_array->data<int64_t>() : nullptr,
                             row_ptrs_array.data<int32_t>(),
                             most_keys.data(),
                             all_keys.data()};
  std::optional<GilRelease> release;
  release_gil_unless(keys.size(0) <= kTinyKeys && length <= 4 * kTinyKeys, release);
  const bool valid = split_by_table(job, one_csr);
  release.reset();
  return valid ? nb::make_tuple(out_keys, out_row_ptrs, all_keys, most_keys) : nb::object(nb::none());
}

// (keys, row_ptrs, keys by table, most keys of a sample by table), or None if the offsets are no CSR of the keys.
nb::object split_any(nb::handle keys_in, nb::handle row_ptrs_in, std::vector<int64_t> slots) {
  const Array keys(keys_in, "keys", "int64[N]", Array::kCopy);
  keys.require(Dtype::kInt64, 1);
  const Array row_ptrs(row_ptrs_in, "row_ptrs", "int32[R] or int64[R]", Array::kCopy);
  const bool narrow = row_ptrs.has(Dtype::kInt32);
  row_ptrs.require(narrow ? Dtype::kInt32 : Dtype::kInt64, 1);
  if (keys.size(0) > INT32_MAX) throw nb::value_error("keys: too many for 32-bit offsets");
  if (slots.empty() || *std::min_element(slots.begin(), slots.end()) < 1 ||
      *std::max_element(slots.begin(), slots.end()) > INT32_MAX)
    throw nb::value_error("slots: expected at least one table, and at least one slot of each");
  return narrow ? split<int32_t>(keys_in, keys, row_ptrs, std::move(slots))
                : split<int64_t>(keys_in, keys, row_ptrs, std::move(slots));
}

}  // namespace

void bind_split(nb::module_& module) {
  module.def("first_outside", &first_outside, nb::arg("keys").none(), nb::arg("smallest"), nb::arg("largest"));
  module.def("split_by_table", &split_any, nb::arg("keys").none(), nb::arg("row_ptrs").none(), nb::arg("slots"));
}

}  // namespace hotrow
