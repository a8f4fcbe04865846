// The Python bindings of the host kernels: kernels._host. Arguments are checked once, here; the C++ code trusts them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/features_bindings.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/key_index_bindings.hpp"
#include "bindings/norm_records_bindings.hpp"
#include "bindings/pooled_lookup_bindings.hpp"
#include "bindings/python_names.hpp"
#include "bindings/request_packer_bindings.hpp"
#include "bindings/row_arguments.hpp"
#include "bindings/snapshot_bindings.hpp"
#include "bindings/split_bindings.hpp"
#include "bindings/training_bindings.hpp"
#include "lookup/core_pool.hpp"
#include "lookup/lookup.hpp"
#include "memory/shared_area.hpp"
#include "rows/row_codec.hpp"
#include "table/host_table.hpp"
#include "table/table_reads.hpp"

namespace hotrow {
namespace {

// Names by the number of the policy. The first policy refuses new keys; its name is None.
constexpr const char* kOverflowPolicyNames[] = {"", "evict_random", "evict_least_used", "evict_oldest",
                                                "evict_oldest_written"};

OverflowPolicy parse_overflow_policy(const std::optional<std::string>& name) {
  if (!name) return OverflowPolicy::kRefuse;
  std::string known;
  for (size_t policy = 1; policy < std::size(kOverflowPolicyNames); ++policy) {
    if (*name == kOverflowPolicyNames[policy]) return static_cast<OverflowPolicy>(policy);
    known += (known.empty() ? "" : ", ") + std::string(kOverflowPolicyNames[policy]);
  }
  throw nb::value_error(("overflow_policy: expected None or one of " + known + ", got '" + *name + "'").c_str());
}

nb::object overflow_policy(const HostTable& table) {
  if (table.policy() == OverflowPolicy::kRefuse) return nb::none();
  return nb::cast(kOverflowPolicyNames[static_cast<size_t>(table.policy())]);
}

void construct_table(HostTable* self, int64_t dim, int64_t capacity_rows, const std::string& row_dtype,
                     const std::optional<std::string>& overflow_policy, std::optional<int64_t> target_rows) {
  const auto checked_dim = static_cast<uint32_t>(in_range("dim", dim, HostTable::kMaxDim));
  const uint64_t capacity = in_range("capacity_rows", capacity_rows, HostTable::kMaxCapacityRows);
  const RowType row_type = parse_row_type(row_dtype);
  const OverflowPolicy policy = parse_overflow_policy(overflow_policy);
  const int64_t target = target_rows.value_or(capacity_rows);
  if (target < 0 || target > capacity_rows)
    throw nb::value_error(("target_rows: expected 0 to capacity_rows, " + std::to_string(capacity_rows) + ", got " +
                           std::to_string(target)).c_str());
  const GilRelease release;
  new (self) HostTable(checked_dim, capacity, row_type, policy, static_cast<uint64_t>(target));
}

// Runs `work` and turns faults of shared memory into Python errors.
template <class Work>
auto with_shared_faults(const Work& work) {
  std::optional<SharedFault> fault;
  try {
    return work();
  } catch (const SharedFault& caught) {
    fault = caught;
  }
  raise(python().shared_memory_error, nb::make_tuple(fault->file, fault->reason));
}

void create_shared_table(HostTable* self, const nb::bytes& path_in, int64_t dim, int64_t capacity_rows,
                         const std::string& row_dtype, const std::string& source) {
  const SharedShape shape{static_cast<uint32_t>(in_range("dim", dim, HostTable::kMaxDim)), parse_row_type(row_dtype),
                          in_range("capacity_rows", capacity_rows, HostTable::kMaxCapacityRows)};
  if (source.size() >= SharedHeader::kSourceBytes) throw nb::value_error("source: expected at most 255 bytes");
  const std::string path(path_in.c_str(), path_in.size());
  with_shared_faults([&] {
    const GilRelease release;
    auto area = std::make_unique<SharedArea>(path, shape);
    std::memcpy(area->header().source, source.data(), source.size());
    new (self) HostTable(std::move(area), true);
  });
}

void attach_shared_table(HostTable* self, const nb::bytes& path_in, bool writes) {
  const std::string path(path_in.c_str(), path_in.size());
  with_shared_faults([&] {
    const GilRelease release;
    new (self) HostTable(std::make_unique<SharedArea>(path), writes);
  });
}

// (the source of the rows, whether they changed since)
nb::tuple shared_source(const HostTable& table) {
  const SharedHeader& header = table.area()->header();
  return nb::make_tuple(std::string(header.source), header.is_changed.load() != 0);
}

void mark_shared_changed(const HostTable& table) {
  if (!table.area()->is_attached()) throw Epochs::NotAttached{};
  table.area()->header().is_changed.store(1);
}

uint64_t table_memory_bytes(int64_t dim, int64_t capacity_rows, const std::string& row_dtype,
                            const std::optional<std::string>& overflow_policy) {
  return HostTable::memory_bytes_for(static_cast<uint32_t>(in_range("dim", dim, HostTable::kMaxDim)),
                                     in_range("capacity_rows", capacity_rows, HostTable::kMaxCapacityRows),
                                     parse_row_type(row_dtype), parse_overflow_policy(overflow_policy));
}

nb::object holds(HostTable& table, nb::handle keys_in) {
  const Keys keys(keys_in, Keys::kLookUp);
  nb::object held = python().empty(keys.count(), python().bool_);
  const Array held_array(held, "held", "bool[N]", Array::kWrite);
  std::optional<GilRelease> release;
  release_gil_unless(keys.count() <= kTinyKeys, release);
  table.holds(keys.begin(), keys.count(), held_array.data<bool>());
  release.reset();
  return held;
}

int64_t insert(HostTable& table, nb::handle keys_in, nb::handle rows_in) {
  const Keys keys(keys_in, Keys::kWrite);
  Array rows(rows_in, "rows", "float32[N, D]");
  rows.require(Dtype::kFloat32, 2);
  rows.require_shape(keys.count(), table.dim());
  std::optional<TableFull> full;
  std::optional<UnfitValue> unfit;
  int64_t evicted = 0;
  with_shared_faults([&] {
    const GilRelease release;
    try {
      evicted = table.insert(keys.begin(), rows.data<const float>(), keys.count());
    } catch (const TableFull& error) {
      full = error;
    } catch (const UnfitValue& error) {
      unfit = error;
    }
  });
  if (unfit) raise_unfit(*unfit, table.row_type(), nb::int_(keys.begin()[unfit->row]));
  if (full) raise(python().table_full_error, nb::make_tuple(table.capacity_rows(), full->rows, full->new_rows));
  return evicted;
}

// Rows of several tables: for each table its keys, and where its rows go. Returns which keys were found, table after
// table.
nb::object fetch_tables(const nb::sequence& tables, const nb::sequence& keys_in, const nb::sequence& out_in) {
  const size_t count = nb::len(tables);
  if (nb::len(keys_in) != count || nb::len(out_in) != count)
    throw nb::value_error("expected keys and out of each table");
  std::vector<HostTable*> held;
  std::vector<std::unique_ptr<Keys>> keys;
  std::vector<std::unique_ptr<Array>> out;
  size_t key_count = 0;
  for (size_t t = 0; t < count; ++t) {
    held.push_back(nb::cast<HostTable*>(tables[t]));
    keys.push_back(std::make_unique<Keys>(keys_in[t], Keys::kLookUp));
    out.push_back(std::make_unique<Array>(out_in[t], "out", "float32[N, D]", Array::kWrite));
    out.back()->require(Dtype::kFloat32, 2);
    out.back()->require_shape(keys.back()->count(), held.back()->dim());
    key_count += keys.back()->count();
  }
  nb::object found = python().empty(key_count, python().bool_);
  const Array found_array(found, "found", "bool[N]", Array::kWrite);
  bool* found_at = found_array.data<bool>();
  std::optional<GilRelease> release;
  release_gil_unless(key_count <= kTinyKeys, release);
  for (size_t t = 0; t < count; ++t) {
    held[t]->fetch(keys[t]->begin(), keys[t]->count(), out[t]->data<float>(), found_at);
    found_at += keys[t]->count();
  }
  release.reset();
  return found;
}

int64_t evict(HostTable& table, nb::handle keys_in) {
  const Keys keys(keys_in, Keys::kWrite);
  const GilRelease release;
  return table.evict(keys.begin(), keys.count());
}

// (keys, rows, next cursor) of up to max_rows rows from `cursor` on.
nb::tuple read_items(HostTable& table, uint64_t cursor, int64_t max_rows) {
  const size_t most = in_range("batch_rows", max_rows, HostTable::kMaxCapacityRows);
  nb::object keys = python().empty(most, python().int64);
  nb::object rows = python().empty(nb::make_tuple(most, table.dim()), python().float32);
  size_t count = 0;
  {
    const Array keys_array(keys, "keys", "int64[N]", Array::kWrite);
    const Array rows_array(rows, "rows", "float32[N, D]", Array::kWrite);
    const GilRelease release;
    count = table.read_items(cursor, most, keys_array.data<int64_t>(), rows_array.data<float>());
  }
  const nb::object filled = nb::slice(static_cast<Py_ssize_t>(count));
  return nb::make_tuple(keys[filled], rows[filled], cursor);
}

// In the order of kernels.host.HostTableStats.
nb::tuple table_stats(const HostTable& table) {
  const double load = static_cast<double>(table.rows()) / static_cast<double>(table.bucket_count() * kSlots);
  return nb::make_tuple(table.rows(), table.capacity_rows(), HostTable::spare_rows_for(table.capacity_rows()),
                        table.bucket_count(), load, table.memory_bytes(), table.longest_probe(), table.evicted_rows());
}

void pool_rows(nb::handle rows_in, nb::handle row_ptrs_in, nb::handle out_in, const std::string& combiner,
               nb::handle weights_in) {
  const Array rows(rows_in, "rows", "float32[N, D]");
  require_rows(rows);
  const BagArguments bags(row_ptrs_in, combiner, weights_in, rows.size(0));
  Array out(out_in, "out", "float32[R, D]", Array::kWrite);
  out.require(Dtype::kFloat32, 2);
  out.require_shape(bags.count(), static_cast<int64_t>(rows.size(1)));
  std::optional<GilRelease> release;
  release_gil_unless(rows.size(0) <= kTinyKeys && bags.count() <= kTinyKeys, release);
  lookup_loops().pool_rows(rows.data<const float>(), static_cast<uint32_t>(rows.size(1)), bags.bags(),
                           out.data<float>());
}

// Without the GIL: it waits for the running lookup, whose thread may need the GIL.
void set_lookup_threads(int64_t threads) {
  const auto checked = static_cast<unsigned>(in_range("threads", threads, CorePool::kMaxThreads));
  const GilRelease release;
  CorePool::shared().set_threads(checked);
}

}  // namespace

// none(): None gets our own message.
NB_MODULE(_host, module) {
  module.doc() = "Host kernels. Use kernels.host.";
  nb::set_leak_warnings(false);  // objects of daemon threads at the interpreter's end are no leak
  python();

  nb::class_<HostTable>(module, "HostTable")
      .def("__init__", &construct_table, nb::arg("dim"), nb::arg("capacity_rows"), nb::arg("row_dtype") = "fp32",
           nb::arg("overflow_policy") = nb::none(), nb::arg("target_rows") = nb::none())
      .def("__init__", &create_shared_table, nb::arg("path"), nb::arg("dim"), nb::arg("capacity_rows"),
           nb::arg("row_dtype"), nb::arg("source"))
      .def("__init__", &attach_shared_table, nb::arg("path"), nb::arg("writes"))
      .def("_shared_source", &shared_source)
      .def("_mark_shared_changed", &mark_shared_changed)
      .def("_shared_inode", [](const HostTable& table) { return table.area()->inode(); })
      .def_static("memory_bytes", &table_memory_bytes, nb::arg("dim"), nb::arg("capacity_rows"),
                  nb::arg("row_dtype") = "fp32", nb::arg("overflow_policy") = nb::none())
      .def_prop_ro("dim", &HostTable::dim)
      .def_prop_ro("row_dtype", [](const HostTable& table) { return row_type_name(table.row_type()); })
      .def_prop_ro("capacity_rows", &HostTable::capacity_rows)
      .def_prop_ro("overflow_policy", &overflow_policy)
      .def("__len__", [](const HostTable& table) { return static_cast<size_t>(table.rows()); })
      .def("fetch", &fetch<HostTable>, nb::arg("keys").none(), nb::arg("out").none())
      .def("fetch_pooled", &fetch_pooled<HostTable>, nb::arg("keys").none(), nb::arg("row_ptrs").none(),
           nb::arg("out").none(), nb::arg("combiner"), nb::arg("weights").none() = nb::none())
      .def("holds", &holds, nb::arg("keys").none())
      .def("insert", &insert, nb::arg("keys").none(), nb::arg("rows").none())
      .def("evict", &evict, nb::arg("keys").none())
      .def("_read_items", &read_items, nb::arg("cursor"), nb::arg("max_rows"))
      .def("_stats", &table_stats);

  bind_features(module);
  bind_key_index(module);
  bind_pooled_lookup(module);
  bind_snapshots(module);

  module.def("fetch_tables", &fetch_tables, nb::arg("tables"), nb::arg("keys"), nb::arg("out"));
  module.def("pool_rows", &pool_rows, nb::arg("rows").none(), nb::arg("row_ptrs").none(), nb::arg("out").none(),
             nb::arg("combiner"), nb::arg("weights").none() = nb::none());
  bind_request_packer(module);
  bind_row_codec(module);
  bind_split(module);
  bind_training(module);
  bind_norm_records(module);
  module.def("lookup_threads", [] { return CorePool::shared().threads(); });
  module.def("set_lookup_threads", &set_lookup_threads, nb::arg("threads"));
  module.def("instruction_set", [] { return lookup_loops().name; });
  module.def("use_avx2", &use_avx2, nb::arg("enabled"));
}

}  // namespace hotrow
