#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_norm_records(nanobind::module_& module);

}  // namespace hotrow
