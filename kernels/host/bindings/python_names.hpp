// Python objects that the bindings use.
#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

namespace nb = nanobind;

// Python objects that are looked up once. They are never freed: the interpreter may end before static destructors run.
struct PythonNames {
  nb::object empty = nb::module_::import_("numpy").attr("empty");
  nb::object bool_ = nb::module_::import_("numpy").attr("dtype")("bool");
  nb::object int32 = nb::module_::import_("numpy").attr("dtype")("int32");
  nb::object int64 = nb::module_::import_("numpy").attr("dtype")("int64");
  nb::object uint64 = nb::module_::import_("numpy").attr("dtype")("uint64");
  nb::object uint8 = nb::module_::import_("numpy").attr("dtype")("uint8");
  nb::object float32 = nb::module_::import_("numpy").attr("dtype")("float32");
  nb::object reserved_key_error = nb::module_::import_("kernels.errors").attr("ReservedKeyError");
  nb::object row_value_error = nb::module_::import_("kernels.errors").attr("RowValueError");
  nb::object shared_memory_error = nb::module_::import_("kernels.errors").attr("SharedMemoryError");
  nb::object snapshot_error = nb::module_::import_("kernels.errors").attr("SnapshotError");
  nb::object table_full_error = nb::module_::import_("kernels.errors").attr("TableFullError");
};

inline const PythonNames& python() {
  static const auto* names = new PythonNames;
  return *names;
}

[[noreturn]] inline void raise(const nb::object& error, const nb::tuple& arguments) {
  PyErr_SetObject(error.ptr(), arguments.ptr());
  throw nb::python_error();
}

}  // namespace hotrow
