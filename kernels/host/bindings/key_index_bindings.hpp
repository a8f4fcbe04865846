#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add KeyIndex to kernels._host.
void bind_key_index(nanobind::module_& module);

}  // namespace hotrow
