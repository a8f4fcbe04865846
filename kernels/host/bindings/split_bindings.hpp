#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add first_outside, split_by_table and read_keys to kernels._host.
void bind_split(nanobind::module_& module);

}  // namespace hotrow
