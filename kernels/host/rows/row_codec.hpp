// Rows in the forms of row_type.hpp, for Python: row_bytes, encode_rows, decode_rows, round_rows.
#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_row_codec(nanobind::module_& module);

}  // namespace hotrow
