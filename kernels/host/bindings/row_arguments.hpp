// Rows from Python, and the error for a row that does not fit its table's row type.
#pragma once

#include <string>

#include "bindings/arguments.hpp"
#include "bindings/python_names.hpp"
#include "rows/row_encode.hpp"
#include "table/host_table.hpp"

namespace hotrow {

// float32[N, D] with as many columns as a table's rows may have.
inline void require_rows(const Array& rows, const char* name = "rows") {
  rows.require(Dtype::kFloat32, 2);
  if (rows.size(1) > HostTable::kMaxDim)
    throw nb::value_error((std::string(name) + ": expected at most " + std::to_string(HostTable::kMaxDim) +
                           " columns, got " + std::to_string(rows.size(1))).c_str());
}

[[noreturn]] inline void raise_unfit(const UnfitValue& unfit, RowType row_type, const nb::object& key) {
  raise(python().row_value_error, nb::make_tuple(row_type_name(row_type), unfit.value, unfit.row, unfit.column, key));
}

}  // namespace hotrow
