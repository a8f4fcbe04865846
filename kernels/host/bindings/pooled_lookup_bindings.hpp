#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add PooledLookup to kernels._host.
void bind_pooled_lookup(nanobind::module_& module);

}  // namespace hotrow
