// The tensors of a request, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/arguments.hpp"
#include "features/tensors.hpp"

namespace hotrow {

// The tensors of a request, in its body. Python frees it, so its GIL is held then.
struct PyTensors {
  explicit PyTensors(nb::handle object) : body(object, "body", "uint8[T]") {}
  const Array body;
  std::vector<Tensor> tensors;

  const Tensor& at(size_t number) const {
    if (number >= tensors.size()) throw nb::value_error("tensor: there are fewer tensors");
    if (!is_readable(tensors[number].datatype)) throw nb::value_error("tensor: has another datatype");
    return tensors[number];
  }
  const Tensor& at(size_t number, ValueKind kind) const {
    const Tensor& tensor = at(number);
    if (kind_of(tensor.datatype) != kind) throw nb::value_error("tensor: has another datatype");
    return tensor;
  }
};

}  // namespace hotrow
