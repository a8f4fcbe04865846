#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

// Add FeatureTransform, Vocabulary and the functions on texts to kernels._host.
void bind_features(nanobind::module_& module);

}  // namespace hotrow
