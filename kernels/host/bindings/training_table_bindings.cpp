// The Python bindings of a table in training. See bindings.cpp for the rules.
#include "bindings/training_table_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/gil_release.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/python_names.hpp"
#include "bindings/results.hpp"
#include "bindings/training_arguments.hpp"
#include "table/host_table.hpp"
#include "table/table_reads.hpp"
#include "training/training_table.hpp"

namespace hotrow {
namespace {

Rule parse_rule(const std::string& name, const std::vector<float>& initial_states) {
  const auto rule = static_cast<Rule>(parse_name("rule", kRuleNames, name));
  if (initial_states.size() != states_of(rule))
    throw nb::value_error(("initial_states: expected " + std::to_string(states_of(rule)) + " for the rule '" + name +
                           "', got " + std::to_string(initial_states.size()))
                              .c_str());
  return rule;
}

TrainingOptions checked_options(const std::string& name, int64_t dim, const std::string& row_dtype,
               const std::string& rule, const std::vector<float>& initial_states, const std::tuple<std::string, double, double>& initializer,
               uint64_t seed, std::optional<int64_t> fixed_rows, const std::pair<int64_t, int64_t>& shard,
               std::optional<int64_t> max_rows, int64_t admit_after, float default_value,
               std::optional<float> max_norm) {
  const RowType type = parse_row_type(row_dtype);
  if (is_row_wise(type))
    throw nb::value_error(("row_dtype: training needs 'fp32', 'fp16' or 'bf16', got '" + row_dtype + "'").c_str());
  require_norm(max_norm);
  if (fixed_rows && (max_rows || admit_after != 1))
    throw nb::value_error("fixed_rows: a table with fixed rows has no max_rows and no admit_after");
  if (shard.second < 1 || shard.first < 0 || shard.first >= shard.second)
    throw nb::value_error(("shard: expected a process and the number of processes, got (" + std::to_string(shard.first) +
                           ", " + std::to_string(shard.second) + ")")
                              .c_str());
  const auto& [kind, first, second] = initializer;
  return {name,
      static_cast<uint32_t>(in_range("dim", dim, HostTable::kMaxDim)),
      type,
      parse_rule(rule, initial_states),
      initial_states,
      {static_cast<Initializer::Kind>(parse_name("initializer", kInitializerNames, kind)), first, second},
      seed,
      fixed_rows ? in_range("fixed_rows", *fixed_rows, TrainingTable::kMaxRows) : 0,
      static_cast<uint64_t>(shard.first),
      static_cast<uint64_t>(shard.second),
      max_rows ? in_range("max_rows", *max_rows, TrainingTable::kMaxRows) : 0,
      static_cast<uint32_t>(in_range("admit_after", admit_after, INT32_MAX)),
      default_value,
      max_norm.value_or(0)};
}

void construct(TrainingTable* self, const std::string& name, int64_t dim, const std::string& row_dtype,
               const std::string& rule, const std::vector<float>& initial_states, const std::tuple<std::string, double, double>& initializer,
               uint64_t seed, std::optional<int64_t> fixed_rows, const std::pair<int64_t, int64_t>& shard,
               std::optional<int64_t> max_rows, int64_t admit_after, float default_value,
               std::optional<float> max_norm) {
  TrainingOptions options = naming(name, [&] {
    return checked_options(name, dim, row_dtype, rule, initial_states, initializer, seed, fixed_rows, shard, max_rows,
                           admit_after, default_value, max_norm);
  });
  const GilRelease release;
  new (self) TrainingTable(std::move(options));
}

void require_same_states(const TrainingTable& table, size_t floats) {
  if (table.options().state_floats() != floats)
    throw nb::value_error("another thread has changed the states of the table");
}

nb::object changed_rows(const TrainingTable& table, int64_t since) {
  std::vector<int64_t> numbers;
  {
    const GilRelease release;
    const std::lock_guard<std::mutex> hold(table.mutex());
    numbers = table.rows_changed_since(since);
  }
  return array_of(numbers);
}

nb::object find(const TrainingTable& table, nb::handle keys_in) {
  const Keys keys(keys_in, Keys::kLookUp);
  nb::object rows = python().empty(keys.count(), python().int64);
  const Array rows_array(rows, "rows", "int64[N]", Array::kWrite);
  with_table_errors(table.options().name, [&] {
    const GilRelease release;
    const std::lock_guard<std::mutex> hold(table.mutex());
    table.find(keys.begin(), keys.count(), rows_array.data<int64_t>());
  });
  return rows;
}

// A copy of the options, which another thread may change.
TrainingOptions options_of(const TrainingTable& table) {
  const GilRelease release;
  const std::lock_guard<std::mutex> hold(table.mutex());
  return table.options();
}

nb::object first_states(const TrainingTable& table) {
  const size_t floats = options_of(table).state_floats();
  nb::object states = python().empty(floats, python().float32);
  const Array array(states, "states", "float32[S]", Array::kWrite);
  const GilRelease release;
  const std::lock_guard<std::mutex> hold(table.mutex());
  require_same_states(table, floats);
  table.first_states(array.data<float>());
  return states;
}

nb::tuple read(const TrainingTable& table, nb::handle rows_in) {
  const Array array(rows_in, "rows", "int64[N]", Array::kCopy);
  array.require(Dtype::kInt64, 1);
  const auto rows = array.copy<int64_t>();
  const size_t n = array.size(0), floats = options_of(table).state_floats();
  nb::object keys = python().empty(n, python().int64);
  nb::object vectors = python().empty(nb::make_tuple(n, table.options().dim), python().float32);
  nb::object states = python().empty(nb::make_tuple(n, floats), python().float32);
  nb::object steps = python().empty(n, python().int64);
  nb::object slots = python().empty(n, python().uint64);
  const Array keys_array(keys, "keys", "int64[N]", Array::kWrite);
  const Array vectors_array(vectors, "vectors", "float32[N, D]", Array::kWrite);
  const Array states_array(states, "states", "float32[N, S]", Array::kWrite);
  const Array steps_array(steps, "last_steps", "int64[N]", Array::kWrite);
  const Array slots_array(slots, "slots", "uint64[N]", Array::kWrite);
  {
    const GilRelease release;
    const std::lock_guard<std::mutex> hold(table.mutex());
    for (size_t i = 0; i < n; ++i)
      if (rows[i] < 0 || static_cast<size_t>(rows[i]) >= table.size())
        throw nb::index_error(("rows: expected numbers below " + std::to_string(table.size()) + ", got " +
                               std::to_string(rows[i]) + " at position " + std::to_string(i))
                                  .c_str());
    require_same_states(table, floats);
    table.read(rows.get(), n, keys_array.data<int64_t>(), vectors_array.data<float>(), states_array.data<float>(),
               steps_array.data<int64_t>(), slots_array.data<uint64_t>());
  }
  return nb::make_tuple(keys, vectors, states, steps, slots);
}

void write(TrainingTable& table, nb::handle keys_in, nb::handle vectors_in, nb::handle states_in, nb::handle steps_in,
           nb::handle slots_in) {
  const Keys keys(keys_in, Keys::kWrite);
  const Array vectors(vectors_in, "vectors", "float32[N, D]"), states(states_in, "states", "float32[N, S]");
  vectors.require(Dtype::kFloat32, 2);
  vectors.require_shape(keys.count(), static_cast<int64_t>(table.options().dim));
  states.require(Dtype::kFloat32, 2);
  const Array steps(steps_in, "last_steps", "int64[N]"), slots(slots_in, "slots", "uint64[N]");
  steps.require(Dtype::kInt64, 1);
  steps.require_shape(keys.count());
  slots.require(Dtype::kUint64, 1);
  slots.require_shape(keys.count());
  for (size_t i = 0; i < keys.count(); ++i)
    if (const int64_t step = steps.data<const int64_t>()[i]; step < 0 || step > INT32_MAX)
      throw nb::value_error(("last_steps: expected 0 to 2147483647, got " + std::to_string(step) + " at position " +
                             std::to_string(i))
                                .c_str());
  with_table_errors(table.options().name, [&] {
    const GilRelease release;
    const std::lock_guard<std::mutex> hold(table.mutex());
    states.require_shape(keys.count(), static_cast<int64_t>(table.options().state_floats()));
    table.write(keys.begin(), keys.count(), vectors.data<const float>(), states.data<const float>(),
                steps.data<const int64_t>(), slots.data<const uint64_t>());
  });
}

nb::tuple sightings(const TrainingTable& table) {
  std::vector<std::pair<int64_t, uint32_t>> found;
  {
    const GilRelease release;
    const std::lock_guard<std::mutex> hold(table.mutex());
    found = table.sightings();
  }
  std::sort(found.begin(), found.end());  // so that equal tables are saved as equal files
  nb::object keys = python().empty(found.size(), python().int64);
  nb::object counts = python().empty(found.size(), python().int64);
  const Array keys_array(keys, "keys", "int64[N]", Array::kWrite);
  const Array counts_array(counts, "counts", "int64[N]", Array::kWrite);
  for (size_t i = 0; i < found.size(); ++i) {
    keys_array.data<int64_t>()[i] = found[i].first;
    counts_array.data<int64_t>()[i] = found[i].second;
  }
  return nb::make_tuple(keys, counts);
}

template <auto kMethod>
auto locked(TrainingTable& table) {
  const GilRelease release;
  const std::lock_guard<std::mutex> hold(table.mutex());
  return (table.*kMethod)();
}

}  // namespace

void bind_training_table(nb::module_& module) {
  nb::class_<TrainingTable>(module, "TrainingTable")
      .def("__init__", &construct, nb::arg("name"), nb::arg("dim"), nb::kw_only(), nb::arg("row_dtype") = "fp32",
           nb::arg("rule") = "sgd", nb::arg("initial_states") = std::vector<float>(),
           nb::arg("initializer") = std::make_tuple(std::string("uniform"), -0.05, 0.05), nb::arg("seed") = 0,
           nb::arg("fixed_rows") = nb::none(), nb::arg("shard") = std::make_pair(int64_t{0}, int64_t{1}),
           nb::arg("max_rows") = nb::none(), nb::arg("admit_after") = 1,
           nb::arg("default_value") = 0.0f, nb::arg("max_norm") = nb::none())
      .def_prop_ro("name", [](const TrainingTable& table) { return table.options().name; })
      .def_prop_ro("dim", [](const TrainingTable& table) { return table.options().dim; })
      .def_prop_ro("rule", [](const TrainingTable& table) { return name_of(options_of(table).rule); })
      .def_prop_ro("initial_states", [](const TrainingTable& table) { return options_of(table).initial_states; })
      .def_prop_ro("first_states", &first_states)
      .def_prop_ro("step", &locked<&TrainingTable::step>)
      .def("__len__", &locked<&TrainingTable::size>)
      .def("find", &find, nb::arg("keys").none())
      .def("changed_rows", &changed_rows, nb::arg("since") = -1)
      .def("read", &read, nb::arg("rows").none())
      .def("write", &write, nb::arg("keys").none(), nb::arg("vectors").none(), nb::arg("states").none(),
           nb::arg("last_steps").none(), nb::arg("slots").none())
      .def("clear", &locked<&TrainingTable::clear>)
      .def("set_states",
           [](TrainingTable& table, const std::string& rule_name, const std::vector<float>& initial_states) {
             const Rule rule = naming(table.options().name, [&] { return parse_rule(rule_name, initial_states); });
             const GilRelease release;
             const std::lock_guard<std::mutex> hold(table.mutex());
             table.set_states(rule, initial_states);
           },
           nb::arg("rule"), nb::arg("initial_states"))
      .def("sightings", &sightings)
      .def("write_sightings",
           [](TrainingTable& table, nb::handle keys_in, nb::handle counts_in) {
             const Keys keys(keys_in, Keys::kWrite);
             const Array counts(counts_in, "counts", "int64[N]");
             counts.require(Dtype::kInt64, 1);
             counts.require_shape(keys.count());
             const GilRelease release;
             const std::lock_guard<std::mutex> hold(table.mutex());
             for (size_t i = 0; i < keys.count(); ++i)
               table.write_sighting(keys.begin()[i], static_cast<uint32_t>(counts.data<const int64_t>()[i]));
           },
           nb::arg("keys").none(), nb::arg("counts").none());
}

}  // namespace hotrow
