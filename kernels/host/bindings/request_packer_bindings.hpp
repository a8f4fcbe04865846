#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add RequestPacker and pack_rows to kernels._host.
void bind_request_packer(nanobind::module_& module);

}  // namespace hotrow
