// The Python bindings of lookups in several tables. See bindings.cpp for the rules.
#include "bindings/pooled_lookup_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/python_names.hpp"
#include "lookup/pooled_lookup.hpp"
#include "lookup/split.hpp"
#include "snapshot/snapshot.hpp"
#include "table/host_table.hpp"
#include "table/table_reads.hpp"

namespace hotrow {
namespace {

// What is the same in every request. The counts are written while the GIL is held, so Python reads whole updates.
class PooledLookup {
 public:
  struct Table {
    size_t slots;
    uint32_t dim;
    Combiner combiner;
    std::unique_ptr<Array> counts;  // int64[2 + K + 1]: keys found, nanoseconds, lookups by their time

    void count(const TableLookup& one, const std::vector<int64_t>& bounds) const {
      int64_t* at = counts->data<int64_t>();
      if (!one.misses) at[0] += static_cast<int64_t>(one.key_count);
      at[1] += one.nanoseconds;
      ++at[2 + (std::lower_bound(bounds.begin(), bounds.end(), one.nanoseconds) - bounds.begin())];
    }
  };

  PooledLookup(const PooledLookup&) = delete;
  PooledLookup(const std::vector<int64_t>& dims, const std::vector<int64_t>& slots,
               const std::vector<std::string>& combiners, const nb::sequence& counts, std::vector<int64_t> bounds_ns)
      : bounds(std::move(bounds_ns)) {
    const size_t count = dims.size();
    if (!count || slots.size() != count || combiners.size() != count || nb::len(counts) != count)
      throw nb::value_error("expected dims, slots, combiners and counts of the same tables, of at least one");
    if (!std::is_sorted(bounds.begin(), bounds.end())) throw nb::value_error("bounds_ns: expected ascending bounds");
    int64_t most_slots = INT32_MAX;  // of all tables together, so that the number of bags cannot overflow
    for (size_t t = 0; t < count; ++t) {
      const nb::object row = counts[t];
      auto array = std::make_unique<Array>(row, "counts", "int64[2 + K + 1]", Array::kWrite);
      array->require(Dtype::kInt64, 1);
      array->require_shape(bounds.size() + 3);
      most_slots -= static_cast<int64_t>(in_range("slots", slots[t], static_cast<uint64_t>(most_slots)));
      tables.push_back({static_cast<size_t>(slots[t]),
                        static_cast<uint32_t>(in_range("dim", dims[t], HostTable::kMaxDim)),
                        parse_combiner(combiners[t]), std::move(array)});
    }
  }

  std::vector<Table> tables;
  std::vector<int64_t> bounds;
};

// Whole cache lines, so that two cores never write to the same one.
size_t floats_of(size_t bags, uint32_t dim) {
  constexpr size_t kLine = 16;
  return (bags * dim + kLine - 1) / kLine * kLine;
}

// How many bags each table has: as given, or its slots for each sample.
std::vector<size_t> bags_of(const PooledLookup& lookup, size_t samples,
                            const std::optional<std::vector<int64_t>>& given) {
  if (given && given->size() != lookup.tables.size())
    throw nb::value_error(("bags: expected " + std::to_string(lookup.tables.size())).c_str());
  std::vector<size_t> bags;
  int64_t most = INT32_MAX;  // of all tables together, so that no size overflows
  for (size_t t = 0; t < lookup.tables.size(); ++t) {
    if (given) most -= static_cast<int64_t>(in_range("bags", (*given)[t], static_cast<uint64_t>(most)));
    bags.push_back(given ? static_cast<size_t>((*given)[t]) : samples * lookup.tables[t].slots);
  }
  return bags;
}

// One CSR per table, table after table, as int64. A copy: see RowPtrs.
std::unique_ptr<int64_t[]> copy_offsets(nb::handle object, size_t length) {
  const Array array(object, "row_ptrs", "int32[B * S + T] or int64[B * S + T]", Array::kCopy);
  const bool narrow = array.has(Dtype::kInt32);
  array.require(narrow ? Dtype::kInt32 : Dtype::kInt64, 1);
  array.require_shape(length);
  if (!narrow) return array.copy<int64_t>();
  std::unique_ptr<int64_t[]> offsets(new int64_t[length]);
  if (array.is_aligned())
    std::copy_n(array.data<const int32_t>(), length, offsets.get());
  else
    std::copy_n(array.copy<int32_t>().get(), length, offsets.get());
  return offsets;
}

// The weights of each table's keys; None, or None of a table: every key counts the same.
class TableWeights {
 public:
  TableWeights(nb::handle object, size_t tables) {
    if (object.is_none()) return;
    given_ = nb::cast<nb::sequence>(object);
    if (nb::len(given_) != tables)
      throw nb::value_error(("weights: expected " + std::to_string(tables) + ", one of each table").c_str());
    arrays_.reserve(tables);
  }

  const float* next(size_t table, size_t keys) {
    if (!given_.is_valid()) return nullptr;
    const nb::object weights = given_[table];
    if (weights.is_none()) return nullptr;
    arrays_.push_back(std::make_unique<Array>(weights, "weights", "float32[N]"));
    arrays_.back()->require(Dtype::kFloat32, 1);
    arrays_.back()->require_shape(keys);
    return arrays_.back()->data<const float>();
  }

 private:
  nb::sequence given_ = nb::steal<nb::sequence>(nb::handle());
  std::vector<std::unique_ptr<Array>> arrays_;
};

// Set the lookup's table, unless it is None or holds vectors of another dim; returns whether its reads may wait.
bool set_table(TableLookup& lookup, nb::handle table, uint32_t dim) {
  if (table.is_none()) return false;
  if (HostTable* one = nullptr; nb::try_cast(table, one)) {
    if (one->dim() == dim) lookup.set_table(*one);
    return HostTable::kReadsMayWait;
  }
  if (Snapshot* one = nullptr; nb::try_cast(table, one)) {
    if (one->dim() == dim) lookup.set_table(*one);
    return Snapshot::kReadsMayWait;
  }
  throw nb::type_error(("tables: expected HostTable, Snapshot or None, got " +
                        std::string(nb::type_name(table.type()).c_str())).c_str());
}

nb::object found_of(const TableLookup& one) {
  if (!one.is_read) return nb::none();
  nb::object found = python().empty(one.key_count, python().bool_);
  const Array array(found, "found", "bool[N]", Array::kWrite);
  if (one.key_count) std::memcpy(array.data<bool>(), one.found, one.key_count);
  return found;
}

// One request's arguments, checked and divided between the tables.
class Request {
 public:
  Request(const PooledLookup& lookup, nb::handle keys, nb::handle row_ptrs, nb::handle out,
          const std::vector<size_t>& bags, nb::handle weights)
      : lookups(lookup.tables.size()),
        keys_(keys, Keys::kLookUp),
        out_(out, "out", "float32[N]", Array::kWrite),
        weights_(weights, lookups.size()),
        found_(new bool[keys_.count()]) {
    size_t length = lookups.size(), floats = 0;
    for (size_t t = 0; t < lookups.size(); ++t) {
      length += bags[t];
      floats += floats_of(bags[t], lookup.tables[t].dim);
    }
    offsets_ = copy_offsets(row_ptrs, length);
    out_.require(Dtype::kFloat32, 1);
    out_.require_shape(floats);
    divide(lookup, bags);
    is_tiny = keys_.count() <= kTinyKeys && length <= 2 * kTinyKeys;
  }

  std::vector<TableLookup> lookups;  // without their tables
  bool is_tiny = false;

 private:
  void divide(const PooledLookup& lookup, const std::vector<size_t>& bags_of_tables) {
    const int64_t* offsets = offsets_.get();
    size_t first_key = 0, first_float = 0;
    for (size_t t = 0; t < lookups.size(); ++t) {
      const PooledLookup::Table& table = lookup.tables[t];
      const size_t bags = bags_of_tables[t];
      if (!is_csr(offsets, bags, keys_.count() - first_key)) refuse_offsets();
      TableLookup& one = lookups[t];
      one.key_count = static_cast<size_t>(offsets[bags]);
      one.keys = keys_.begin() + first_key;
      one.bags = {offsets, bags, table.combiner, weights_.next(t, one.key_count)};
      one.out = out_.data<float>() + first_float;
      one.found = found_.get() + first_key;
      offsets += bags + 1;
      first_key += one.key_count;
      first_float += floats_of(bags, table.dim);
    }
    if (first_key != keys_.count()) refuse_offsets();
  }

  [[noreturn]] void refuse_offsets() const {
    throw nb::value_error(("row_ptrs: expected one CSR per table, each from 0, of " + std::to_string(keys_.count()) +
                           " keys together").c_str());
  }

  const Keys keys_;
  Array out_;
  TableWeights weights_;
  std::unique_ptr<int64_t[]> offsets_;
  const std::unique_ptr<bool[]> found_;
};

// (place, found) of each table that does not hold all of its keys; found is None if it was not read.
nb::list pool_tables(const PooledLookup& lookup, const nb::sequence& tables, nb::handle keys, nb::handle row_ptrs,
                     nb::handle out, int64_t samples, nb::handle weights,
                     const std::optional<std::vector<int64_t>>& bags) {
  const size_t count = lookup.tables.size();
  if (nb::len(tables) != count) throw nb::value_error(("tables: expected " + std::to_string(count)).c_str());
  Request request(lookup, keys, row_ptrs, out, bags_of(lookup, in_range("samples", samples, INT32_MAX), bags), weights);
  std::vector<nb::object> held;  // until the call ends, whatever becomes of the sequence
  held.reserve(count);
  bool may_wait = false;
  for (size_t t = 0; t < count; ++t) {
    held.push_back(tables[t]);
    may_wait |= set_table(request.lookups[t], held.back(), lookup.tables[t].dim);
  }
  {
    std::optional<GilRelease> release;
    release_gil_unless(request.is_tiny && !may_wait, release);
    look_up_tables(request.lookups);
  }
  nb::list rest;
  for (size_t t = 0; t < count; ++t) {
    const TableLookup& one = request.lookups[t];
    if (one.is_read) lookup.tables[t].count(one, lookup.bounds);
    if (!one.is_read || one.misses) rest.append(nb::make_tuple(t, found_of(one)));
  }
  return rest;
}

// One table's vectors, and which of them goes where.
struct Gather {
  std::unique_ptr<Array> vectors, bags, out;
  size_t count, dim;  // of the vectors, of which there is at least one
  bool is_right = true;

  // Neighbours that stay neighbours are copied together. A bag is read once: another thread may write to it.
  void run() {
    constexpr size_t kMostBytes = 2048;  // of one copy: glibc copies more by `rep movsb`, which Zen 3 does slowly
    const size_t most = std::max<size_t>(1, kMostBytes / (std::max<size_t>(1, dim) * sizeof(float)));
    const float* const from = vectors->data<const float>();
    const int32_t* const bag = bags->data<const int32_t>();
    float* to = out->data<float>();
    const size_t bag_count = bags->size(0);
    size_t first = 0, length = 0;  // of the vectors that are copied next
    const auto copy = [&] {
      if (length) std::memcpy(to, from + first * dim, length * dim * sizeof(float));
      to += length * dim;
    };
    for (size_t i = 0; i < bag_count; ++i) {
      const auto next = static_cast<size_t>(static_cast<uint32_t>(bag[i]));
      if (next >= count) {
        is_right = false;
        return;
      }
      if (next == first + length && length < most) {
        ++length;
        continue;
      }
      copy();
      first = next;
      length = 1;
    }
    copy();
  }
};

// Copy vectors to the bags' places, table by table.
void gather_bags(const nb::sequence& vectors, const nb::sequence& bags, const nb::sequence& out) {
  if (nb::len(vectors) != nb::len(bags) || nb::len(vectors) != nb::len(out))
    throw nb::value_error("expected vectors, bags and out of the same tables");
  std::vector<Gather> tables;
  size_t floats = 0;
  for (size_t t = 0; t < nb::len(vectors); ++t) {
    const nb::object from = vectors[t], bag = bags[t], to = out[t];
    Gather one{std::make_unique<Array>(from, "vectors", "float32[R, D]"),
               std::make_unique<Array>(bag, "bags", "int32[N]"),
               std::make_unique<Array>(to, "out", "float32[N, D]", Array::kWrite), 0, 0};
    one.vectors->require(Dtype::kFloat32, 2);
    one.bags->require(Dtype::kInt32, 1);
    one.out->require(Dtype::kFloat32, 2);
    one.count = one.vectors->size(0);
    one.dim = one.vectors->size(1);
    one.out->require_shape(one.bags->size(0), static_cast<int64_t>(one.dim));
    floats += one.bags->size(0) * one.dim;
    tables.push_back(std::move(one));
  }
  {
    std::optional<GilRelease> release;
    release_gil_unless(floats <= 16 * kTinyKeys, release);
    for (Gather& one : tables) one.run();
  }
  for (const Gather& one : tables)
    if (!one.is_right)
      throw nb::value_error(("bags: expected numbers less than " + std::to_string(one.count)).c_str());
}

}  // namespace

void bind_pooled_lookup(nb::module_& module) {
  nb::class_<PooledLookup>(module, "PooledLookup")
      .def(nb::init<const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<std::string>&,
                    const nb::sequence&, std::vector<int64_t>>(),
           nb::arg("dims"), nb::arg("slots"), nb::arg("combiners"), nb::arg("counts"), nb::arg("bounds_ns"))
      .def("fetch", &pool_tables, nb::arg("tables"), nb::arg("keys").none(), nb::arg("row_ptrs").none(),
           nb::arg("out").none(), nb::arg("samples"), nb::arg("weights").none() = nb::none(),
           nb::arg("bags").none() = nb::none());
  module.def("gather_bags", &gather_bags, nb::arg("vectors"), nb::arg("bags"), nb::arg("out"));
}

}  // namespace hotrow
