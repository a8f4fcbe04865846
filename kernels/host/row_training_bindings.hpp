#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_row_training(nanobind::module_& module);

}  // namespace hotrow
