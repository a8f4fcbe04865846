#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add Snapshot and SnapshotWriter to kernels._host.
void bind_snapshots(nanobind::module_& module);

}  // namespace hotrow
