// The Python bindings of what happens to a request's keys before the lookup. See bindings.cpp for the rules.
#include "bindings/split_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/python_names.hpp"
#include "bindings/tensors.hpp"
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

void check_slots(const std::vector<int64_t>& slots) {
  if (slots.empty() || *std::min_element(slots.begin(), slots.end()) < 1 ||
      *std::max_element(slots.begin(), slots.end()) > INT32_MAX)
    throw nb::value_error("slots: expected at least one table, and at least one slot of each");
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
  check_slots(slots);
  return narrow ? split<int32_t>(keys_in, keys, row_ptrs, std::move(slots))
                : split<int64_t>(keys_in, keys, row_ptrs, std::move(slots));
}

// Copy numbers; returns whether all are finite.
bool copy_finite(const float* in, size_t count, float* out) {
  constexpr uint32_t kExponent = 0x7F800000;
  bool is_finite = true;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, in + i, sizeof bits);
    is_finite &= (bits & kExponent) != kExponent;
    out[i] = in[i];
  }
  return is_finite;
}

// The numbers of a request's tensors, checked: (dense, keys, row_ptrs, most keys of a sample by table), the last three
// as of split_by_table(). None if a dense number is not finite, a key is outside, or the offsets are no CSR of the keys.
nb::object read_keys(const PyTensors& tensors, std::optional<size_t> dense_in, size_t keys_in,
                     std::optional<size_t> row_ptrs_in, std::vector<int64_t> slots, int64_t smallest,
                     int64_t largest) {
  const Tensor& keys = tensors.at(keys_in, ValueKind::kInteger);
  const Tensor* const row_ptrs = row_ptrs_in ? &tensors.at(*row_ptrs_in, ValueKind::kInteger) : nullptr;
  const Tensor* const dense = dense_in ? &tensors.at(*dense_in, ValueKind::kFloat) : nullptr;
  check_slots(slots);
  if (keys.count > INT32_MAX) throw nb::value_error("keys: too many for 32-bit offsets");
  const size_t total = static_cast<size_t>(std::accumulate(slots.begin(), slots.end(), int64_t{0}));
  const size_t tables = slots.size(), length = row_ptrs ? row_ptrs->count : keys.count + 1;
  const size_t samples = samples_of(length, total, tables), numbers = dense ? dense->count : 0;
  const nb::object out_dense = python().empty(numbers, python().float32);
  const nb::object out_keys = python().empty(keys.count, python().int64);
  const nb::object out_row_ptrs = python().empty(samples * total + tables, python().int32);
  std::vector<int64_t> most_keys(tables), all_keys(tables);
  bool is_right;
  {
    const Array dense_array(out_dense, "dense", "float32[D]", Array::kWrite);
    const Array keys_array(out_keys, "keys", "int64[N]", Array::kWrite);
    const Array row_ptrs_array(out_row_ptrs, "row_ptrs", "int32[R]", Array::kWrite);
    std::optional<GilRelease> release;
    release_gil_unless(keys.count <= kTinyKeys && length <= 4 * kTinyKeys && numbers <= 16 * kTinyKeys, release);
    TensorMemory memory;
    const int64_t* const in = read_integers(keys, memory);
    std::vector<int64_t> one_key_each(row_ptrs ? 0 : length);
    std::iota(one_key_each.begin(), one_key_each.end(), int64_t{0});
    const int64_t* const offsets = row_ptrs ? read_integers(*row_ptrs, memory) : one_key_each.data();
    int64_t* const out = keys_array.data<int64_t>();
    const Split<int64_t> job = {in, keys.count, offsets, std::move(slots), samples, tables > 1 ? out : nullptr,
                                row_ptrs_array.data<int32_t>(), most_keys.data(), all_keys.data()};
    is_right = lookup_loops().first_outside(in, keys.count, smallest, largest) == keys.count &&
               split_by_table(job, tables > 1 && length == samples * total + 1) &&
               (!dense || copy_finite(numbers_of<float, float>(*dense, memory.floats), numbers, dense_array.data<float>()));
    if (tables == 1) std::copy_n(in, keys.count, out);
  }
  return is_right ? nb::make_tuple(out_dense, out_keys, out_row_ptrs, most_keys) : nb::object(nb::none());
}

}  // namespace

void bind_split(nb::module_& module) {
  module.def("first_outside", &first_outside, nb::arg("keys").none(), nb::arg("smallest"), nb::arg("largest"));
  module.def("split_by_table", &split_any, nb::arg("keys").none(), nb::arg("row_ptrs").none(), nb::arg("slots"));
  module.def("read_keys", &read_keys, nb::arg("tensors"), nb::arg("dense").none(), nb::arg("keys"),
             nb::arg("row_ptrs").none(), nb::arg("slots"), nb::arg("smallest"), nb::arg("largest"));
}

}  // namespace hotrow
