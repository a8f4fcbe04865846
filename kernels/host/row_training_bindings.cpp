// The Python bindings of training on rows. See bindings.cpp for the rules.
#include "row_training_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "gil_release.hpp"
#include "key_arguments.hpp"
#include "python_names.hpp"
#include "row_training.hpp"

namespace hotrow {
namespace {

// float32[C, P, D], changed in place.
class TableArgument {
 public:
  explicit TableArgument(nb::handle object) : array_(object, "table", "float32[C, P, D]", Array::kWrite) {
    array_.require(Dtype::kFloat32, 3);
  }
  TrainedTable table() const { return {array_.data<float>(), array_.size(0), array_.size(1), array_.size(2)}; }

 private:
  Array array_;
};

// int64[N], each at least `least` and below `capacity`. A copy: a number that changed after its check could point
// outside the table.
class Rows {
 public:
  Rows(nb::handle object, int64_t least, size_t capacity) {
    const Array array(object, "rows", "int64[N]", Array::kCopy);
    array.require(Dtype::kInt64, 1);
    count_ = array.size(0);
    items_ = array.copy<int64_t>();
    for (size_t i = 0; i < count_; ++i)
      if (items_[i] < least || items_[i] >= static_cast<int64_t>(capacity))
        throw nb::value_error(("rows: expected numbers from " + std::to_string(least) + " to " +
                               std::to_string(static_cast<int64_t>(capacity) - 1) + ", got " +
                               std::to_string(items_[i]) + " at position " + std::to_string(i))
                                  .c_str());
  }
  const int64_t* begin() const { return items_.get(); }
  size_t count() const { return count_; }

 private:
  std::unique_ptr<int64_t[]> items_;
  size_t count_ = 0;
};

void gather(nb::handle table_in, nb::handle rows_in, nb::handle row_ptrs, const std::string& combiner, float absent,
            nb::handle out_in) {
  const TableArgument argument(table_in);
  const TrainedTable table = argument.table();
  if (!table.parts) throw nb::value_error("table: expected at least one part");
  const Rows rows(rows_in, -1, table.capacity);
  const BagArguments bags(row_ptrs, combiner, nb::none(), rows.count());
  const Array out(out_in, "out", "float32[R, D]", Array::kWrite);
  out.require(Dtype::kFloat32, 2);
  out.require_shape(bags.count(), static_cast<int64_t>(table.dim));
  const GilRelease release;
  gather_pooled(table, rows.begin(), bags.bags(), absent, out.data<float>());
}

nb::object sum(nb::handle rows_in, nb::handle row_ptrs, const std::string& combiner, nb::handle gradient_in,
               nb::handle heads_in) {
  const Array heads(heads_in, "heads", "int32[C]", Array::kWrite);
  heads.require(Dtype::kInt32, 1);
  const Rows rows(rows_in, 0, heads.size(0));
  if (rows.count() > INT32_MAX) throw nb::value_error("rows: too many for one batch");
  const BagArguments arguments(row_ptrs, combiner, nb::none(), rows.count());
  const Array gradient(gradient_in, "gradient", "float32[R, D]");
  gradient.require(Dtype::kFloat32, 2);
  gradient.require_shape(arguments.count());
  const size_t dim = gradient.size(1);
  const Bags bags = arguments.bags();
  std::unique_ptr<RowPlaces> places;
  {
    const GilRelease release;
    places = std::make_unique<RowPlaces>(rows.begin(), bags, heads.data<int32_t>());
  }
  const size_t distinct = places->rows().size();
  nb::object out_rows = python().empty(distinct, python().int64);
  nb::object out_sums = python().empty(nb::make_tuple(distinct, dim), python().float32);
  const Array rows_array(out_rows, "rows", "int64[U]", Array::kWrite);
  const Array sums_array(out_sums, "sums", "float32[U, D]", Array::kWrite);
  {
    const GilRelease release;
    std::copy_n(places->rows().begin(), distinct, rows_array.data<int64_t>());
    places->sum_gradients(gradient.data<const float>(), dim, sums_array.data<float>());
    places.reset();
  }
  return nb::make_tuple(out_rows, out_sums);
}

Rule parse_rule(const std::string& name) {
  for (size_t rule = 0; rule < kRules; ++rule)
    if (name == kRuleNames[rule]) return static_cast<Rule>(rule);
  std::string known;
  for (const char* one : kRuleNames) known += (known.empty() ? "'" : ", '") + std::string(one) + "'";
  throw nb::value_error(("rule: expected one of " + known + ", got '" + name + "'").c_str());
}

void move(nb::handle table_in, const std::string& rule_name, const std::vector<double>& factors, nb::handle rows_in,
          nb::handle gradient_in) {
  const TableArgument argument(table_in);
  const TrainedTable table = argument.table();
  const Rule rule = parse_rule(rule_name);
  const size_t parts = 1 + kRuleStates[static_cast<size_t>(rule)];
  if (table.parts != parts)
    throw nb::value_error(("table: expected " + std::to_string(parts) + " parts for the rule '" + rule_name +
                           "', got " + std::to_string(table.parts))
                              .c_str());
  if (factors.size() != 4) throw nb::value_error("factors: expected four numbers");
  const Rows rows(rows_in, 0, table.capacity);
  const Array gradient(gradient_in, "gradient", "float32[U, D]");
  gradient.require(Dtype::kFloat32, 2);
  gradient.require_shape(rows.count(), static_cast<int64_t>(table.dim));
  const RuleStep step{rule, factors[0], factors[1], factors[2], factors[3]};
  const GilRelease release;
  move_rows(table, step, rows.begin(), rows.count(), gradient.data<const float>());
}

}  // namespace

void bind_row_training(nb::module_& module) {
  module.def("gather_pooled", &gather, nb::arg("table").none(), nb::arg("rows").none(), nb::arg("row_ptrs").none(),
             nb::arg("combiner"), nb::arg("absent"), nb::arg("out").none());
  module.def("sum_gradients", &sum, nb::arg("rows").none(), nb::arg("row_ptrs").none(), nb::arg("combiner"),
             nb::arg("gradient").none(), nb::arg("heads").none());
  module.def("move_rows", &move, nb::arg("table").none(), nb::arg("rule"), nb::arg("factors"), nb::arg("rows").none(),
             nb::arg("gradient").none());
}

}  // namespace hotrow
