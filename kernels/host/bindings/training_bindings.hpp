#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_training(nanobind::module_& module);

}  // namespace hotrow
