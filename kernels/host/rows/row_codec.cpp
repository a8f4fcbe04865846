#include "rows/row_codec.hpp"

#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>

#include "bindings/key_arguments.hpp"
#include "bindings/row_arguments.hpp"
#include "lookup/lookup.hpp"

namespace hotrow {
namespace {

size_t bytes_of_row(int64_t dim, const std::string& row_dtype) {
  const RowType row_type = parse_row_type(row_dtype);
  if (dim < 1 || static_cast<uint64_t>(dim) > HostTable::kMaxDim)
    throw nb::value_error(("dim: expected 1 to " + std::to_string(HostTable::kMaxDim) + ", got " +
                           std::to_string(dim)).c_str());
  return row_bytes(row_type, static_cast<uint32_t>(dim));
}

nb::object encode(nb::handle rows_in, const std::string& row_dtype) {
  const RowType row_type = parse_row_type(row_dtype);
  const Array rows(rows_in, "rows", "float32[N, D]");
  require_rows(rows);
  const size_t n = rows.size(0);
  const auto dim = static_cast<uint32_t>(rows.size(1));
  nb::object out = python().empty(nb::make_tuple(n, row_bytes(row_type, dim)), python().uint8);
  if (dim == 0) return out;
  const Array out_array(out, "out", "uint8[N, row_bytes]", Array::kWrite);
  std::optional<GilRelease> release;
  release_gil_unless(n <= kTinyKeys, release);
  const auto unfit = encode_rows(row_type, rows.data<const float>(), dim, n, out_array.data<std::byte>());
  release.reset();
  if (unfit) raise_unfit(*unfit, row_type, nb::none());
  return out;
}

void decode(nb::handle encoded_in, const std::string& row_dtype, nb::handle out_in) {
  const RowType row_type = parse_row_type(row_dtype);
  const Array out(out_in, "out", "float32[N, D]", Array::kWrite);
  require_rows(out, "out");
  const size_t n = out.size(0);
  const auto dim = static_cast<uint32_t>(out.size(1));
  const size_t bytes = row_bytes(row_type, dim);
  const Array encoded(encoded_in, "encoded", "uint8[N, row_bytes]");
  encoded.require(Dtype::kUint8, 2);
  encoded.require_shape(n, static_cast<int64_t>(bytes));
  if (n == 0 || dim == 0) return;
  std::optional<GilRelease> release;
  release_gil_unless(n <= kTinyKeys, release);
  if (row_type == RowType::kFp32)  // the loops need aligned rows of this type
    std::memcpy(out.data<float>(), encoded.data<const std::byte>(), n * bytes);
  else
    lookup_loops().decode(row_type, encoded.data<const std::byte>(), bytes, dim, n, out.data<float>());
}

void round_to(nb::handle rows_in, const std::string& row_dtype, nb::handle out_in) {
  const RowType row_type = parse_row_type(row_dtype);
  const Array rows(rows_in, "rows", "float32[N, D]");
  require_rows(rows);
  const Array out(out_in, "out", "float32[N, D]", Array::kWrite);
  out.require(Dtype::kFloat32, 2);
  out.require_shape(rows.size(0), static_cast<int64_t>(rows.size(1)));
  if (rows.size(1) == 0) return;
  std::optional<GilRelease> release;
  release_gil_unless(rows.size(0) <= kTinyKeys, release);
  const auto unfit = round_rows(row_type, rows.data<const float>(), static_cast<uint32_t>(rows.size(1)), rows.size(0),
                                out.data<float>());
  release.reset();
  if (unfit) raise_unfit(*unfit, row_type, nb::none());
}

}  // namespace

void bind_row_codec(nb::module_& module) {
  module.def("row_bytes", &bytes_of_row, nb::arg("dim"), nb::arg("row_dtype"));
  module.def("encode_rows", &encode, nb::arg("rows").none(), nb::arg("row_dtype"));
  module.def("decode_rows", &decode, nb::arg("encoded").none(), nb::arg("row_dtype"), nb::arg("out").none());
  module.def("round_rows", &round_to, nb::arg("rows").none(), nb::arg("row_dtype"), nb::arg("out").none());
}

}  // namespace hotrow
