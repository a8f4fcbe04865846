#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_training_table(nanobind::module_& module);

}  // namespace hotrow
