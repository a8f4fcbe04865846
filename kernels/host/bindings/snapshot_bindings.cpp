// The Python bindings of snapshots. See bindings.cpp and table_reads.hpp for the rules; a snapshot's reads may wait for
// the disk, so all of them are done without the GIL.
#include "bindings/snapshot_bindings.hpp"

#include <nanobind/stl/string.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <system_error>

#include "bindings/row_arguments.hpp"
#include "snapshot/snapshot.hpp"
#include "snapshot/snapshot_writer.hpp"
#include "table/table_reads.hpp"

namespace hotrow {
namespace {

void construct_snapshot(Snapshot* self, const nb::bytes& path) {
  const std::string name(path.c_str(), path.size());
  const GilRelease release;
  new (self) Snapshot(name);
}

nb::bytes source_of(const Snapshot& snapshot) {
  return nb::bytes(reinterpret_cast<const char*>(snapshot.header().source), kSourceBytes);
}

// What names the content. The same rows written twice have other seeds, and so other indexes. A file without a seed keeps
// the name that it had before there were seeds: all of its header.
nb::bytes identity_of(const Snapshot& snapshot) {
  SnapshotHeader header = snapshot.header();
  if (header.seed) header.seed = header.index_checksum = header.header_checksum = 0;
  const size_t bytes = header.format == kUnseededSnapshotFormat ? offsetof(SnapshotHeader, seed) : sizeof header;
  return nb::bytes(reinterpret_cast<const char*>(&header), bytes);
}

void require_range(const Snapshot& snapshot, int64_t first, int64_t count) {
  const auto rows = static_cast<int64_t>(snapshot.rows());
  if (first < 0 || count < 0 || first > rows || count > rows - first)
    throw nb::value_error(("expected rows of 0 to " + std::to_string(rows) + ", got " + std::to_string(count) +
                           " from " + std::to_string(first) + " on").c_str());
}

nb::object read_keys(const Snapshot& snapshot, int64_t first, int64_t count) {
  require_range(snapshot, first, count);
  nb::object keys = python().empty(count, python().int64);
  const Array keys_array(keys, "keys", "int64[N]", Array::kWrite);
  const GilRelease release;
  snapshot.read_rows(static_cast<uint64_t>(first), static_cast<size_t>(count), keys_array.data<int64_t>(), nullptr);
  return keys;
}

nb::tuple read_items(const Snapshot& snapshot, int64_t first, int64_t count) {
  require_range(snapshot, first, count);
  nb::object keys = python().empty(count, python().int64);
  nb::object rows = python().empty(nb::make_tuple(count, snapshot.dim()), python().float32);
  {
    const Array keys_array(keys, "keys", "int64[N]", Array::kWrite);
    const Array rows_array(rows, "rows", "float32[N, D]", Array::kWrite);
    const GilRelease release;
    snapshot.read_rows(static_cast<uint64_t>(first), static_cast<size_t>(count), keys_array.data<int64_t>(),
                       rows_array.data<float>());
  }
  return nb::make_tuple(keys, rows);
}

void construct_writer(SnapshotWriter* self, int descriptor, int64_t dim, int64_t capacity_rows,
                      const std::string& row_dtype) {
  const auto checked_dim = static_cast<uint32_t>(in_range("dim", dim, kMostSnapshotDim));
  const uint64_t capacity = in_range("capacity_rows", capacity_rows, kMostSnapshotRows);
  const RowType row_type = parse_row_type(row_dtype);
  const GilRelease release;
  new (self) SnapshotWriter(descriptor, checked_dim, capacity, row_type);
}

[[noreturn]] void raise_os_error(const std::system_error& error) {
  errno = error.code().value();
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

void append(SnapshotWriter& writer, nb::handle keys_in, nb::handle rows_in) {
  const Keys keys(keys_in, Keys::kWrite);
  Array rows(rows_in, "rows", "float32[N, D]");
  rows.require(Dtype::kFloat32, 2);
  rows.require_shape(keys.count(), writer.dim());
  if (keys.count() > writer.room())
    raise(python().table_full_error, nb::make_tuple(writer.rows() + writer.room(), writer.rows(), keys.count()));
  std::optional<RepeatedKey> repeated;
  std::optional<UnfitValue> unfit;
  try {
    const GilRelease release;
    writer.append(keys.begin(), rows.data<const float>(), keys.count());
  } catch (const RepeatedKey& error) {
    repeated = error;
  } catch (const UnfitValue& error) {
    unfit = error;
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
  if (unfit) raise_unfit(*unfit, writer.row_type(), nb::int_(keys.begin()[unfit->row]));
  if (repeated)
    throw nb::value_error(("key " + std::to_string(repeated->key) + " occurs twice in the snapshot").c_str());
}

void finish(SnapshotWriter& writer, const nb::bytes& source) {
  if (source.size() != kSourceBytes)
    throw nb::value_error(("source: expected " + std::to_string(kSourceBytes) + " bytes, got " +
                           std::to_string(source.size())).c_str());
  try {
    const auto* bytes = reinterpret_cast<const unsigned char*>(source.c_str());
    const GilRelease release;
    writer.finish(bytes);
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

void populate(Snapshot& snapshot, size_t begin, size_t bytes) {
  const GilRelease release;
  snapshot.populate(begin, bytes);
}

template <void (Snapshot::*kCheck)()>
void check(Snapshot& snapshot) {
  const GilRelease release;
  (snapshot.*kCheck)();
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const FileFault& fault) {
    const nb::object file = nb::steal(PyUnicode_DecodeFSDefault(fault.file.c_str()));
    PyErr_SetObject(python().snapshot_error.ptr(), nb::make_tuple(file, fault.reason).ptr());
  }
}

}  // namespace

void bind_snapshots(nb::module_& module) {
  nb::register_exception_translator(&translate);

  nb::class_<Snapshot>(module, "Snapshot")
      .def("__init__", &construct_snapshot, nb::arg("path"))
      .def_prop_ro("dim", &Snapshot::dim)
      .def_prop_ro("row_dtype", [](const Snapshot& snapshot) { return row_type_name(snapshot.row_type()); })
      .def_prop_ro("file_bytes", &Snapshot::file_bytes)
      .def_prop_ro("source", &source_of)
      .def_prop_ro("identity", &identity_of)
      .def("__len__", [](const Snapshot& snapshot) { return static_cast<size_t>(snapshot.rows()); })
      .def("fetch", &fetch<Snapshot>, nb::arg("keys").none(), nb::arg("out").none())
      .def("fetch_pooled", &fetch_pooled<Snapshot>, nb::arg("keys").none(), nb::arg("row_ptrs").none(),
           nb::arg("out").none(), nb::arg("combiner"), nb::arg("weights").none() = nb::none())
      .def("read_keys", &read_keys, nb::arg("first"), nb::arg("count"))
      .def("read_items", &read_items, nb::arg("first"), nb::arg("count"))
      .def("_populate", &populate, nb::arg("begin"), nb::arg("bytes"))
      .def("check_index", &check<&Snapshot::check_index>)
      .def("check_content", &check<&Snapshot::check_content>);

  nb::class_<SnapshotWriter>(module, "SnapshotWriter")
      .def("__init__", &construct_writer, nb::arg("descriptor"), nb::arg("dim"), nb::arg("capacity_rows"),
           nb::arg("row_dtype") = "fp32")
      .def("__len__", [](const SnapshotWriter& writer) { return static_cast<size_t>(writer.rows()); })
      .def("append", &append, nb::arg("keys").none(), nb::arg("rows").none())
      .def("finish", &finish, nb::arg("source"));
}

}  // namespace hotrow
