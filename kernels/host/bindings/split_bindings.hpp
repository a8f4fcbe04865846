#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add first_outside and split_by_table to kernels._host.
void bind_split(nanobind::module_& module);

}  // namespace hotrow
