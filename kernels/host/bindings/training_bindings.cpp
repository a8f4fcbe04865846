// The Python bindings of training on rows. See bindings.cpp for the rules.
#include "bindings/training_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/gil_release.hpp"
#include "bindings/key_arguments.hpp"
#include "bindings/python_names.hpp"
#include "bindings/results.hpp"
#include "bindings/training_arguments.hpp"
#include "bindings/training_table_bindings.hpp"
#include "lookup/lookup_pieces.hpp"
#include "table/host_table.hpp"
#include "table/table_reads.hpp"
#include "training/key_owners.hpp"
#include "training/row_positions.hpp"
#include "training/training_steps.hpp"
#include "training/training_table.hpp"

namespace hotrow {
namespace {

// Rows in an array that Python owns. Key k is row k.
class ArrayRows {
 public:
  ArrayRows(nb::handle rows, std::string name, std::optional<float> max_norm)
      : array_(rows, "rows", "float32[V, D]"), name_(std::move(name)), max_norm_(max_norm.value_or(0)) {
    array_.require(Dtype::kFloat32, 2);
    require_norm(max_norm);
  }
  const std::string& name() const { return name_; }
  TrainedRows view() const {
    const size_t dim = array_.size(1);
    return {array_.data<std::byte>(), 4 * dim, static_cast<uint32_t>(dim), RowType::kFp32, 0, max_norm_, nullptr, 0};
  }
  size_t rows() const { return array_.size(0); }
  void require(const std::vector<int64_t>& keys) const {
    for (size_t i = 0; i < keys.size(); ++i)
      if (keys[i] < 0 || static_cast<uint64_t>(keys[i]) >= array_.size(0)) throw KeyBeyondRows{keys[i], i, array_.size(0)};
  }

 private:
  Array array_;
  std::string name_;
  float max_norm_;
};

// The tables of a call, locked in the order of their addresses. Create it without the GIL: the thread that holds a lock
// may be waiting for the GIL.
class TableLocks {
 public:
  explicit TableLocks(std::vector<TrainingTable*> tables) {
    std::sort(tables.begin(), tables.end());
    tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
    for (TrainingTable* table : tables)
      if (table) held_.emplace_back(table->mutex());
  }

 private:
  std::vector<std::unique_lock<std::mutex>> held_;
};

// Bags of keys and their rows, as they were looked up. It keeps its table alive.
class BagLookup {
 public:
  BagLookup(nb::object source, nb::handle keys_in, nb::handle row_ptrs, const std::string& combiner, nb::handle weights,
            nb::handle slots, bool trains)
      : source_(std::move(source)), combiner_(parse_combiner(combiner)), trains_(trains) {
    if (!nb::try_cast(source_, table_) && !nb::try_cast(source_, array_))
      throw nb::type_error(("tables: expected a TrainingTable or ArrayRows, got " +
                            std::string(nb::type_name(source_.type()).c_str()))
                               .c_str());
    naming(name(), [&] {
      take(keys_in, row_ptrs, weights);
      take_slots(slots);
    });
  }

  // A lookup of distinct rows, one per bag, whose gradients are of the rows as they are stored.
  BagLookup(nb::object table, std::vector<int64_t> keys, std::vector<int64_t> rows)
      : source_(std::move(table)),
        keys_(std::move(keys)),
        rows_(std::move(rows)),
        count_(keys_.size()),
        combiner_(Combiner::kSum),
        is_of_rows_(true) {
    table_ = nb::cast<TrainingTable*>(source_);
    generation_ = table_->generation();
  }

  TrainingTable* table() const { return table_; }
  bool is_of_rows() const { return is_of_rows_; }
  size_t count() const { return count_; }
  size_t keys() const { return keys_.size(); }
  const int64_t* key_data() const { return keys_.data(); }
  bool has_weights() const { return weights_.has_value(); }
  nb::object source() const { return source_; }
  const std::string& name() const { return table_ ? table_->options().name : array_->name(); }
  size_t dim() const { return table_ ? table_->options().dim : array_->view().dim; }
  TrainedRows view() const { return table_ ? table_->view() : array_->view(); }
  RowBags bags() const {
    return {table_ ? rows_.data() : keys_.data(), row_ptrs_ ? row_ptrs_->begin() : nullptr, count_, combiner_,
            weights_ ? weights_->data() : nullptr};
  }
  size_t array_rows() const { return array_->rows(); }

  // The methods below need the table's lock.
  void find_rows() { trains_ ? find_or_insert() : find(); }
  // A row that has been replaced since is absent now.
  void refresh() {
    if (table_ && generation_ != table_->generation()) find();
  }

 private:
  void find() {
    if (!table_) return array_->require(keys_);
    rows_.resize(keys_.size());
    table_->find(keys_.data(), keys_.size(), rows_.data());
    generation_ = table_->generation();
  }
  void find_or_insert() {
    if (!table_) return array_->require(keys_);
    rows_.resize(keys_.size());
    const KeySlots slots{slot_of_key_ ? slot_of_key_.get() : nullptr, row_ptrs_ ? row_ptrs_->begin() : nullptr, slots_};
    table_->find_or_insert(keys_.data(), keys_.size(), slots, rows_.data());
    generation_ = table_->generation();
  }

  void take(nb::handle keys_in, nb::handle row_ptrs, nb::handle weights) {
    const Keys keys(keys_in, Keys::kLookUp);
    keys_.assign(keys.begin(), keys.begin() + keys.count());
    count_ = keys.count();
    if (!row_ptrs.is_none()) {
      row_ptrs_.emplace(row_ptrs, keys.count());
      count_ = row_ptrs_->bags();
    }
    if (keys.count() > INT32_MAX) throw nb::value_error("keys: too many for one lookup");
    if (weights.is_none()) return;
    const Array array(weights, "weights", "float32[N]");
    array.require(Dtype::kFloat32, 1);
    array.require_shape(keys.count());
    weights_.emplace(array.data<const float>(), array.data<const float>() + keys.count());
  }

  void take_slots(nb::handle slots) {
    if (nb::isinstance<nb::int_>(slots)) {
      slots_ = in_range("slots", nb::cast<int64_t>(slots), INT32_MAX);
      return;
    }
    const Array array(slots, "slots", "an int or int64[N]", Array::kCopy);
    array.require(Dtype::kInt64, 1);
    array.require_shape(keys_.size());
    slot_of_key_ = array.copy<int64_t>();
  }

  nb::object source_;
  TrainingTable* table_ = nullptr;
  const ArrayRows* array_ = nullptr;
  std::vector<int64_t> keys_, rows_;
  std::optional<RowPtrs> row_ptrs_;
  size_t count_;
  Combiner combiner_;
  size_t slots_ = 1;
  std::unique_ptr<int64_t[]> slot_of_key_;
  std::optional<std::vector<float>> weights_;
  uint64_t generation_ = 0;
  bool trains_ = false, is_of_rows_ = false;
};

std::vector<TrainingTable*> tables_of(const std::vector<BagLookup*>& lookups) {
  std::vector<TrainingTable*> tables;
  for (const BagLookup* lookup : lookups) tables.push_back(lookup->table());
  return tables;
}

// Find the rows of all lookups. Tables are shared between the cores, except a table with many keys, which shares its
// own keys. Throws what a table throws, and says which lookup's.
void find_rows(const std::vector<BagLookup*>& lookups) {
  std::vector<std::pair<TrainingTable*, std::vector<BagLookup*>>> by_table;
  for (BagLookup* lookup : lookups) {
    const auto same = std::find_if(by_table.begin(), by_table.end(), [&](const auto& entry) {
      return entry.first && entry.first == lookup->table();  // arrays do not change, so they need not wait
    });
    if (same == by_table.end())
      by_table.push_back({lookup->table(), {lookup}});
    else
      same->second.push_back(lookup);
  }
  const auto all_of = [&](const std::vector<BagLookup*>& of_table) {
    for (BagLookup* lookup : of_table) with_table_errors(lookup->name(), [&] { lookup->find_rows(); });
  };
  std::vector<const std::vector<BagLookup*>*> small;
  for (const auto& [table, of_table] : by_table) {
    size_t keys = 0;
    for (const BagLookup* lookup : of_table) keys += lookup->keys();
    if (keys < kSharedKeys && by_table.size() > 1)
      small.push_back(&of_table);
    else
      all_of(of_table);
  }
  CorePool::shared().run(small.size(), [&](size_t number) { all_of(*small[number]); });
}

nb::list look_up(const nb::sequence& tables, const nb::sequence& keys, const nb::sequence& row_ptrs,
                 const std::vector<std::string>& combiners, const nb::sequence& weights, const nb::sequence& slots,
                 const nb::sequence& trains) {
  const size_t count = nb::len(tables);
  if (nb::len(keys) != count || nb::len(row_ptrs) != count || combiners.size() != count || nb::len(weights) != count ||
      nb::len(slots) != count || nb::len(trains) != count)
    throw nb::value_error("expected keys, row_ptrs, combiners, weights, slots and trains of the same tables");
  nb::list answers;
  std::vector<BagLookup*> lookups;
  std::vector<std::unique_ptr<Array>> out;
  for (size_t t = 0; t < count; ++t) {
    nb::object lookup = nb::cast(
        BagLookup(tables[t], keys[t], row_ptrs[t], combiners[t], weights[t], slots[t], nb::cast<bool>(trains[t])));
    lookups.push_back(nb::cast<BagLookup*>(lookup));
    nb::object pooled =
        python().empty(nb::make_tuple(lookups.back()->count(), lookups.back()->dim()), python().float32);
    out.push_back(std::make_unique<Array>(pooled, "pooled", "float32[R, D]", Array::kWrite));
    answers.append(nb::make_tuple(lookup, pooled));
  }
  const GilRelease release;
  const TableLocks locks(tables_of(lookups));
  for (const BagLookup* lookup : lookups)
    if (lookup->table()) lookup->table()->begin_call();
  find_rows(lookups);
  std::vector<Pooling> poolings;
  for (size_t t = 0; t < count; ++t) {
    poolings.push_back({lookups[t]->view(), lookups[t]->bags(), out[t]->data<float>()});
  }
  pool(poolings);
  return answers;
}

// Lookups and the gradients of their pooled bags.
class Gradients {
 public:
  Gradients(const nb::sequence& lookups, const nb::sequence& gradients) {
    if (nb::len(lookups) != nb::len(gradients)) throw nb::value_error("expected a gradient of each lookup");
    for (size_t i = 0; i < nb::len(lookups); ++i) {
      lookups_.push_back(nb::cast<BagLookup*>(lookups[i]));
      arrays_.push_back(std::make_unique<Array>(gradients[i], "gradient", "float32[R, D]"));
      arrays_.back()->require(Dtype::kFloat32, 2);
      arrays_.back()->require_shape(lookups_.back()->count(), static_cast<int64_t>(lookups_.back()->dim()));
    }
  }
  const std::vector<BagLookup*>& lookups() const { return lookups_; }
  void refresh() const {
    for (BagLookup* lookup : lookups_) lookup->refresh();
  }
  BagGradient of(size_t number, bool with_keys = false) const {
    const BagLookup& lookup = *lookups_[number];
    const int64_t* keys = with_keys ? lookup.key_data() : nullptr;
    return {lookup.bags(), arrays_[number]->data<const float>(), lookup.is_of_rows(), keys};
  }

 private:
  std::vector<BagLookup*> lookups_;
  std::vector<std::unique_ptr<Array>> arrays_;
};

// The gradients of a table's rows as they are stored must not be added to those of its bags.
void require_one_kind(const std::vector<BagGradient>& of_table) {
  for (const BagGradient& one : of_table)
    if (one.is_of_rows != of_table[0].is_of_rows)
      throw nb::value_error("lookups: expected a table's lookups all from merge_gradients, or none of them");
}

nb::list sum_row_gradients(const nb::sequence& lookups_in, const nb::sequence& gradients_in) {
  const Gradients gradients(lookups_in, gradients_in);
  const std::vector<BagLookup*>& lookups = gradients.lookups();
  std::vector<std::unique_ptr<RowGradients>> rows(lookups.size());
  std::vector<std::vector<uint32_t>> orders(lookups.size());
  std::optional<TableLocks> locks;  // until the end, because rows must stay what they are
  {
    const GilRelease release;
    locks.emplace(tables_of(lookups));
    gradients.refresh();
    CorePool::shared().run(lookups.size(), [&](size_t i) {
      rows[i] = std::make_unique<RowGradients>(std::vector<BagGradient>{gradients.of(i, true)}, lookups[i]->dim());
      orders[i] = ascending(rows[i]->rows());
    });
  }
  nb::list answers;
  std::vector<std::unique_ptr<Array>> sums_out;
  std::vector<RowSums> all;
  for (size_t i = 0; i < lookups.size(); ++i) {
    std::vector<int64_t> keys(orders[i].size());
    std::transform(orders[i].begin(), orders[i].end(), keys.begin(),
                   [&](uint32_t place) { return rows[i]->keys()[place]; });
    nb::object sums = python().empty(nb::make_tuple(keys.size(), lookups[i]->dim()), python().float32);
    sums_out.push_back(std::make_unique<Array>(sums, "sums", "float32[U, D]", Array::kWrite));
    all.push_back({lookups[i]->view(), rows[i].get(), std::move(orders[i]), sums_out.back()->data<float>()});
    answers.append(nb::make_tuple(array_of(keys), sums));
  }
  const GilRelease release;
  sum_gradients(all);
  return answers;
}

// Of lookups of one table: a lookup of the distinct rows, and the sums of their gradients.
nb::tuple merge_gradients(const nb::sequence& lookups_in, const nb::sequence& gradients_in) {
  const Gradients gradients(lookups_in, gradients_in);
  const std::vector<BagLookup*>& lookups = gradients.lookups();
  if (lookups.empty()) throw nb::value_error("lookups: expected at least one lookup");
  TrainingTable* table = lookups[0]->table();
  for (const BagLookup* lookup : lookups)
    if (!table || lookup->table() != table) throw nb::type_error("lookups: expected lookups of one TrainingTable");
  std::unique_ptr<RowGradients> rows;
  std::optional<TableLocks> locks;  // until the end, because rows must stay what they are
  {
    const GilRelease release;
    locks.emplace(tables_of(lookups));
    gradients.refresh();
    std::vector<BagGradient> all;
    for (size_t i = 0; i < lookups.size(); ++i) all.push_back(gradients.of(i, true));
    require_one_kind(all);
    rows = std::make_unique<RowGradients>(all, table->options().dim);
  }
  nb::object merged = nb::cast(BagLookup(lookups[0]->source(), rows->keys(), rows->rows()));
  nb::object sums = python().empty(nb::make_tuple(rows->rows().size(), table->options().dim), python().float32);
  const Array sums_array(sums, "sums", "float32[U, D]", Array::kWrite);
  std::vector<uint32_t> order(rows->rows().size());
  std::iota(order.begin(), order.end(), 0u);
  {
    const GilRelease release;
    sum_gradients({{table->view(), rows.get(), std::move(order), sums_array.data<float>()}});
  }
  return nb::make_tuple(merged, sums);
}

// Of lookups of the distinct rows of one table: a lookup of all their rows, and the place of each row in each lookup.
nb::tuple merge_lookups(const nb::sequence& lookups_in) {
  std::vector<BagLookup*> lookups;
  for (size_t i = 0; i < nb::len(lookups_in); ++i) lookups.push_back(nb::cast<BagLookup*>(lookups_in[i]));
  if (lookups.empty()) throw nb::value_error("lookups: expected at least one lookup");
  TrainingTable* table = lookups[0]->table();
  for (const BagLookup* lookup : lookups) {
    if (!table || lookup->table() != table) throw nb::type_error("lookups: expected lookups of one TrainingTable");
    if (!lookup->is_of_rows()) throw nb::value_error("lookups: expected lookups from merge_gradients");
  }
  std::vector<int64_t> rows, keys;
  std::vector<std::vector<int64_t>> places(lookups.size());
  {
    const GilRelease release;
    const TableLocks locks(tables_of(lookups));
    size_t most = 0;
    for (const BagLookup* lookup : lookups) most += lookup->count();
    if (most > INT32_MAX) throw nb::value_error("lookups: too many rows for one lookup");
    RowPositions positions(most);
    for (size_t i = 0; i < lookups.size(); ++i) {
      lookups[i]->refresh();
      const RowBags bags = lookups[i]->bags();
      for (size_t bag = 0; bag < bags.count; ++bag) {
        if (bags.rows[bag] < 0) continue;
        const size_t position = positions.find_or_insert(bags.rows[bag], rows.size());
        if (position == rows.size()) {
          rows.push_back(bags.rows[bag]);
          keys.push_back(lookups[i]->key_data()[bag]);
        }
        places[i].resize(rows.size(), -1);
        places[i][position] = static_cast<int64_t>(bag);
      }
    }
  }
  nb::list places_out;
  for (std::vector<int64_t>& one : places) {
    one.resize(rows.size(), -1);
    places_out.append(array_of(one));
  }
  return nb::make_tuple(nb::cast(BagLookup(lookups[0]->source(), std::move(keys), std::move(rows))), places_out);
}

// Of lookups of arrays: the gradient of every row, zeros where no key names it, divided by `divisor`.
nb::list sum_array_gradients(const nb::sequence& lookups_in, const nb::sequence& gradients_in, float divisor) {
  const Gradients gradients(lookups_in, gradients_in);
  nb::list answers;
  for (size_t i = 0; i < gradients.lookups().size(); ++i) {
    const BagLookup& lookup = *gradients.lookups()[i];
    if (lookup.table()) throw nb::type_error("lookups: expected lookups of ArrayRows");
    nb::object sums = python().empty(nb::make_tuple(lookup.array_rows(), lookup.dim()), python().float32);
    {
      const Array sums_array(sums, "sums", "float32[V, D]", Array::kWrite);
      const GilRelease release;
      array_gradients(lookup.view(), gradients.of(i), lookup.array_rows(), divisor, sums_array.data<float>());
    }
    answers.append(sums);
  }
  return answers;
}

nb::tuple owned_keys(nb::handle keys_in, int64_t processes, int64_t owner, bool distinct) {
  const Keys keys(keys_in, Keys::kWrite);
  in_range("processes", processes, INT32_MAX);
  if (owner < -1 || owner >= processes)
    throw nb::value_error(("owner: expected -1 to " + std::to_string(processes - 1) + ", got " + std::to_string(owner)).c_str());
  if (keys.count() > INT32_MAX) throw nb::value_error("keys: too many for one lookup");
  OwnedKeys owned;
  {
    const GilRelease release;
    owned = keys_by_owner(keys.begin(), keys.count(), processes, owner, distinct);
  }
  return nb::make_tuple(array_of(owned.keys), array_of(owned.counts), array_of(owned.places), array_of(owned.firsts));
}

nb::list sum_weight_gradients(const nb::sequence& lookups_in, const nb::sequence& gradients_in) {
  const Gradients gradients(lookups_in, gradients_in);
  const std::vector<BagLookup*>& lookups = gradients.lookups();
  nb::list answers;
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (!lookups[i]->has_weights()) throw nb::value_error("lookups: expected lookups with weights");
    nb::object out = python().empty(lookups[i]->keys(), python().float32);
    {
      const Array out_array(out, "out", "float32[N]", Array::kWrite);
      const GilRelease release;
      const TableLocks locks({lookups[i]->table()});
      lookups[i]->refresh();
      weight_gradients(lookups[i]->view(), gradients.of(i), out_array.data<float>());
    }
    answers.append(out);
  }
  return answers;
}

void update_tables(const nb::sequence& lookups_in, const nb::sequence& gradients_in, const std::string& rule_name,
                   const std::string& update_type, double learning_rate, int64_t step,
                   const std::tuple<double, double, double>& parameters, double scaler) {
  const Gradients gradients(lookups_in, gradients_in);
  const auto rule = static_cast<Rule>(parse_name("rule", kRuleNames, rule_name));
  const auto type = static_cast<UpdateType>(parse_name("update_type", kUpdateTypeNames, update_type));
  if (step < 1 || step > INT32_MAX) throw nb::value_error(("step: expected 1 to 2147483647, got " + std::to_string(step)).c_str());
  const auto [a, b, c] = parameters;
  std::vector<TableUpdate> updates;
  std::vector<size_t> update_of;
  size_t keys = 0;
  for (const BagLookup* lookup : gradients.lookups()) keys += lookup->keys();
  if (keys > INT32_MAX) throw nb::value_error("lookups: too many keys for one update");
  for (const BagLookup* lookup : gradients.lookups()) {
    TrainingTable* table = lookup->table();
    if (!table) throw nb::type_error("lookups: expected lookups of TrainingTables");
    const auto same = std::find_if(updates.begin(), updates.end(), [&](const auto& one) { return one.table == table; });
    update_of.push_back(same - updates.begin());
    if (same == updates.end()) updates.push_back({table, {}});
  }
  const GilRelease release;
  const TableLocks locks(tables_of(gradients.lookups()));
  for (const TableUpdate& one : updates)
    if (one.table->options().rule != rule)
      throw nb::value_error(("table '" + one.table->options().name + "': expected rows with the states of the rule '" +
                             rule_name + "', got those of '" + name_of(one.table->options().rule) + "'")
                                .c_str());
  gradients.refresh();
  for (size_t i = 0; i < update_of.size(); ++i) updates[update_of[i]].lookups.push_back(gradients.of(i));
  for (const TableUpdate& one : updates) require_one_kind(one.lookups);
  update(updates, {rule, type, learning_rate, step, a, b, c, scaler});
}

}  // namespace

void bind_training(nb::module_& module) {
  bind_training_table(module);
  nb::class_<ArrayRows>(module, "ArrayRows")
      .def(nb::init<nb::handle, std::string, std::optional<float>>(), nb::arg("rows").none(), nb::arg("name"),
           nb::arg("max_norm") = nb::none());
  nb::class_<BagLookup>(module, "BagLookup").def_prop_ro("table", &BagLookup::source);
  module.def("look_up_bags", &look_up, nb::arg("tables"), nb::arg("keys"), nb::arg("row_ptrs"), nb::arg("combiners"),
             nb::arg("weights"), nb::arg("slots"), nb::arg("trains"));
  module.def("sum_row_gradients", &sum_row_gradients, nb::arg("lookups"), nb::arg("gradients"));
  module.def("merge_gradients", &merge_gradients, nb::arg("lookups"), nb::arg("gradients"));
  module.def("merge_lookups", &merge_lookups, nb::arg("lookups"));
  module.def("array_gradients", &sum_array_gradients, nb::arg("lookups"), nb::arg("gradients"), nb::arg("divisor") = 1.0f);
  module.def("keys_by_owner", &owned_keys, nb::arg("keys").none(), nb::arg("processes"), nb::arg("owner") = -1,
             nb::arg("distinct") = true);
  module.def("weight_gradients", &sum_weight_gradients, nb::arg("lookups"), nb::arg("gradients"));
  module.def("update_tables", &update_tables, nb::arg("lookups"), nb::arg("gradients"), nb::arg("rule"),
             nb::arg("update_type"), nb::arg("learning_rate"), nb::arg("step"), nb::arg("parameters"),
             nb::arg("scaler") = 1.0);
}

}  // namespace hotrow
