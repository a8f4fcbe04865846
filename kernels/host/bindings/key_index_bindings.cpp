// The Python bindings of the key index. See bindings.cpp for the rules.
#include "bindings/key_index_bindings.hpp"

#include <nanobind/nanobind.h>

#include "bindings/arguments.hpp"
#include "bindings/gil_release.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/python_names.hpp"
#include "table/key_index.hpp"
#include "table/table_reads.hpp"

namespace hotrow {
namespace {

void construct_key_index(KeyIndex* self, int64_t capacity_rows) {
  const uint64_t capacity = in_range("capacity_rows", capacity_rows, KeyIndex::kMaxKeys);
  const GilRelease release;
  new (self) KeyIndex(capacity);
}

template <class Index, Keys::Use kUse, void (*kCall)(Index&, const int64_t*, size_t, int64_t*)>
nb::object number_keys(Index& index, nb::handle keys_in) {
  const Keys keys(keys_in, kUse);
  nb::object rows = python().empty(keys.count(), python().int64);
  const Array rows_array(rows, "rows", "int64[N]", Array::kWrite);
  {
    const GilRelease release;
    kCall(index, keys.begin(), keys.count(), rows_array.data<int64_t>());
  }
  return rows;
}

void find(const KeyIndex& index, const int64_t* keys, size_t n, int64_t* rows) { index.find(keys, n, rows); }
void find_or_insert(KeyIndex& index, const int64_t* keys, size_t n, int64_t* rows) {
  index.find_or_insert(keys, n, rows);
}

// Without the GIL: the index may be growing, and a call that waits for it must not stop other threads.
size_t key_count(const KeyIndex& index) {
  const GilRelease release;
  return index.size();
}

nb::object all_keys(const KeyIndex& index) {
  const size_t n = key_count(index);
  nb::object keys = python().empty(n, python().int64);
  const Array keys_array(keys, "keys", "int64[V]", Array::kWrite);
  {
    const GilRelease release;
    index.copy_keys(keys_array.data<int64_t>(), n);
  }
  return keys;
}

}  // namespace

void bind_key_index(nb::module_& module) {
  nb::class_<KeyIndex>(module, "KeyIndex")
      .def("__init__", &construct_key_index, nb::arg("capacity_rows") = 1024)
      .def("find", &number_keys<const KeyIndex, Keys::kLookUp, find>, nb::arg("keys").none())
      .def("find_or_insert", &number_keys<KeyIndex, Keys::kWrite, find_or_insert>, nb::arg("keys").none())
      .def("keys", &all_keys)
      .def("__len__", &key_count);
}

}  // namespace hotrow
