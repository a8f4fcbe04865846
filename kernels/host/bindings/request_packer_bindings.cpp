// The Python face of the request packer. See bindings.cpp for the rules.
#include "bindings/request_packer_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/arguments.hpp"
#include "lookup/request_packer.hpp"

namespace hotrow {
namespace {

constexpr size_t kManyKeys = 1 << 14;  // packing this many takes longer than releasing and taking the GIL

// An array borrowed while a request is packed. Checks without messages: a request has many arrays, and the caller of
// `pack` explains what is wrong.
class Borrowed {
 public:
  explicit Borrowed(PyObject* object) {
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_ND | PyBUF_FORMAT) == 0) return;
    PyErr_Clear();
    buffer_.obj = nullptr;
  }
  Borrowed(Borrowed&& other) noexcept : buffer_(other.buffer_) { other.buffer_.obj = nullptr; }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Borrowed& operator=(Borrowed&&) = delete;
  ~Borrowed() {
    if (buffer_.obj) PyBuffer_Release(&buffer_);
  }

  bool is(const char* codes, Py_ssize_t item_bytes, int dimensions) const {
    if (!buffer_.obj || buffer_.itemsize != item_bytes || buffer_.ndim != dimensions) return false;
    return buffer_.format && buffer_.format[0] && !buffer_.format[1] && std::strchr(codes, buffer_.format[0]);
  }
  size_t size(int dimension) const { return static_cast<size_t>(buffer_.shape[dimension]); }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(buffer_.buf);
  }

 private:
  Py_buffer buffer_;
};

class PyRequestPacker {
 public:
  PyRequestPacker(nb::handle bytes, const std::vector<int64_t>& slots, const std::vector<int64_t>& combiners,
                  const std::vector<float>& max_norms, int64_t max_samples, int64_t max_keys, int64_t dense_dim)
      : bytes_(bytes, "bytes", "uint8[N]", Array::kWrite),
        packer_(bytes_.data<uint8_t>(), tables_of(slots, combiners, max_norms)),
        max_samples_(static_cast<size_t>(max_samples)),
        max_keys_(static_cast<size_t>(max_keys)),
        dense_dim_(static_cast<size_t>(dense_dim)) {
    bytes_.require(Dtype::kUint8, 1);
    size_t most = packer_.head_bytes() + RequestPacker::aligned(4 * max_samples_ * dense_dim_), row_ptrs = 0;
    for (const PackedTable& table : packer_.tables()) row_ptrs += max_samples_ * table.slots + 1;
    most += RequestPacker::aligned(4 * row_ptrs) + 12 * max_keys_;
    if (bytes_.size(0) < most) throw nb::value_error("bytes: too small for the largest request");
  }

  // (samples, items, bytes), or None if anything is wrong with the request.
  nb::object pack(nb::handle tables, nb::handle weights, nb::handle dense, nb::handle first_floats) {
    const size_t count = packer_.tables().size();
    std::vector<Borrowed> borrowed;
    borrowed.reserve(3 * count + 2);
    std::vector<GivenBags> given(count);
    size_t samples = 0, keys = 0;
    const nb::object of_tables = nb::steal(PySequence_Fast(tables.ptr(), "expected a sequence of tables"));
    if (!of_tables) throw nb::python_error();
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(of_tables.ptr())) != count) return nb::none();
    for (size_t t = 0; t < count; ++t) {
      PyObject* table = PySequence_Fast_GET_ITEM(of_tables.ptr(), static_cast<Py_ssize_t>(t));
      if (!borrow(table, names().keys, "lq", 8, borrowed) || !borrow(table, names().row_ptrs, "i", 4, borrowed))
        return nb::none();
      const Borrowed &of_keys = borrowed[borrowed.size() - 2], &row_ptrs = borrowed.back();
      const size_t slots = packer_.tables()[t].slots;
      if (t == 0) samples = (row_ptrs.size(0) - 1) / slots;  // a wrap-around is refused below
      keys += of_keys.size(0);
      if (samples < 1 || samples > max_samples_ || row_ptrs.size(0) != samples * slots + 1 || keys > max_keys_)
        return nb::none();
      given[t] = {row_ptrs.data<int32_t>(), of_keys.data<int64_t>(), of_keys.size(0), nullptr};
    }
    if (!borrow_weights(weights, given, borrowed)) return nb::none();
    const float* features = nullptr;
    if (!dense.is_none()) {
      borrowed.emplace_back(dense.ptr());
      const Borrowed& array = borrowed.back();
      if (!array.is("f", 4, 2) || array.size(0) != samples || array.size(1) != dense_dim_) return nb::none();
      features = array.data<float>();
    }
    borrowed.emplace_back(first_floats.ptr());
    if (!borrowed.back().is("lq", 8, 1) || borrowed.back().size(0) < count) return nb::none();
    const int64_t* floats = borrowed.back().data<int64_t>();
    std::optional<GilRelease> release;
    release_gil_unless(keys < kManyKeys, release);
    const std::optional<PackedSize> packed = packer_.pack(given, samples, features, dense_dim_, floats);
    release.reset();
    if (!packed) return nb::none();
    return nb::make_tuple(samples, packed->items, packed->bytes);
  }

 private:
  struct Names {
    PyObject* keys = PyUnicode_InternFromString("keys");
    PyObject* row_ptrs = PyUnicode_InternFromString("row_ptrs");
  };
  static const Names& names() {
    static const auto* names = new Names;
    return *names;
  }

  static std::vector<PackedTable> tables_of(const std::vector<int64_t>& slots, const std::vector<int64_t>& combiners,
                                            const std::vector<float>& max_norms) {
    if (slots.empty() || slots.size() != combiners.size() || slots.size() != max_norms.size())
      throw nb::value_error("expected slots, combiners and max_norms of the same tables");
    std::vector<PackedTable> tables;
    for (size_t t = 0; t < slots.size(); ++t)
      tables.push_back({static_cast<size_t>(slots[t]), static_cast<uint32_t>(combiners[t]), max_norms[t]});
    return tables;
  }

  // Borrow an attribute, which must be one-dimensional.
  static bool borrow(PyObject* table, PyObject* name, const char* codes, Py_ssize_t item_bytes,
                     std::vector<Borrowed>& borrowed) {
    const nb::object array = nb::steal(PyObject_GetAttr(table, name));
    if (!array) throw nb::python_error();
    borrowed.emplace_back(array.ptr());
    return borrowed.back().is(codes, item_bytes, 1);
  }

  static bool borrow_weights(nb::handle weights, std::vector<GivenBags>& given, std::vector<Borrowed>& borrowed) {
    if (weights.is_none()) return true;
    const nb::object of_tables = nb::steal(PySequence_Fast(weights.ptr(), "expected a sequence of weights"));
    if (!of_tables) throw nb::python_error();
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(of_tables.ptr())) != given.size()) return false;
    for (size_t t = 0; t < given.size(); ++t) {
      PyObject* of_table = PySequence_Fast_GET_ITEM(of_tables.ptr(), static_cast<Py_ssize_t>(t));
      if (of_table == Py_None) continue;
      borrowed.emplace_back(of_table);
      if (!borrowed.back().is("f", 4, 1) || borrowed.back().size(0) != given[t].key_count) return false;
      given[t].weights = borrowed.back().data<float>();
    }
    return true;
  }

  Array bytes_;
  RequestPacker packer_;
  size_t max_samples_, max_keys_, dense_dim_;
};

// Copy rows of several tables to `bytes` from byte `at` on, each row at a multiple of 16 bytes; `places` gets where, in
// units of 16 bytes.
void pack_rows(nb::handle bytes_in, int64_t at, const nb::sequence& rows_in, nb::handle places_in) {
  constexpr size_t kUnit = 16;
  const Array bytes(bytes_in, "bytes", "uint8[N]", Array::kWrite), places(places_in, "places", "int32[M]", Array::kWrite);
  bytes.require(Dtype::kUint8, 1);
  places.require(Dtype::kInt32, 1);
  std::vector<std::unique_ptr<Array>> rows;
  size_t count = 0, size = 0;
  for (const nb::handle of_table : rows_in) {
    rows.push_back(std::make_unique<Array>(of_table, "rows", "float32[M, D]"));
    rows.back()->require(Dtype::kFloat32, 2);
    count += rows.back()->size(0);
    size += rows.back()->size(0) * RequestPacker::aligned(rows.back()->size(1) * sizeof(float));
  }
  places.require_shape(count);
  if (at < 0 || static_cast<size_t>(at) % kUnit || static_cast<size_t>(at) + size > bytes.size(0))
    throw nb::value_error("at: expected a multiple of 16 with room for the rows behind it");
  uint8_t* out = bytes.data<uint8_t>();
  int32_t* place = places.data<int32_t>();
  size_t offset = static_cast<size_t>(at);
  std::optional<GilRelease> release;
  release_gil_unless(size < sizeof(int64_t) * kManyKeys, release);
  for (const auto& of_table : rows) {
    const size_t row_bytes = of_table->size(1) * sizeof(float), stride = RequestPacker::aligned(row_bytes);
    const uint8_t* from = of_table->data<const uint8_t>();
    for (size_t row = 0; row < of_table->size(0); ++row, from += row_bytes, offset += stride) {
      std::memcpy(out + offset, from, row_bytes);
      *place++ = static_cast<int32_t>(offset / kUnit);
    }
  }
}

}  // namespace

void bind_request_packer(nb::module_& module) {
  nb::class_<PyRequestPacker>(module, "RequestPacker")
      .def(nb::init<nb::handle, const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<float>&,
                    int64_t, int64_t, int64_t>(),
           nb::arg("bytes"), nb::arg("slots"), nb::arg("combiners"), nb::arg("max_norms"), nb::arg("max_samples"),
           nb::arg("max_keys"), nb::arg("dense_dim"))
      .def("pack", &PyRequestPacker::pack, nb::arg("tables"), nb::arg("weights").none(), nb::arg("dense").none(),
           nb::arg("first_floats"));
  module.def("pack_rows", &pack_rows, nb::arg("bytes"), nb::arg("at"), nb::arg("rows"), nb::arg("places"));
}

}  // namespace hotrow
