// Stored rows for readers: `Row<type>(address)` gives eight columns or one column at a time, in float32.
// Included by lookup_loops.inl in the namespace of one instruction set, after the definition of
//
//   Lane8 from_halves(const std::byte*)         eight binary16 values
//   Lane8 from_upper_halves(const std::byte*)   eight bfloat16 values
//   Lane8 from_signed_bytes(const int8_t*)      eight whole numbers
//   Lane8 from_bytes(const uint8_t*)            the same
//
// Rows of fp32 have the alignment of floats. Other rows may have any address.

typedef float UnalignedFloat __attribute__((aligned(1), may_alias));

HOTROW_TARGET inline float read_float(const std::byte* at) { return *reinterpret_cast<const UnalignedFloat*>(at); }

template <RowType kType>
struct Row;

template <>
struct Row<RowType::kFp32> {
  const std::byte* columns;
  HOTROW_TARGET explicit Row(const std::byte* row) : columns(row) {}
  HOTROW_TARGET Lane8 lanes(uint32_t c) const { return lane8(columns + 4 * size_t{c}); }
  HOTROW_TARGET float at(uint32_t c) const { return read_float(columns + 4 * size_t{c}); }
};

template <>
struct Row<RowType::kFp16> {
  const std::byte* columns;
  HOTROW_TARGET explicit Row(const std::byte* row) : columns(row) {}
  HOTROW_TARGET Lane8 lanes(uint32_t c) const { return from_halves(columns + 2 * size_t{c}); }
  HOTROW_TARGET float at(uint32_t c) const {
    return from_half(*reinterpret_cast<const Unaligned16*>(columns + 2 * size_t{c}));
  }
};

template <>
struct Row<RowType::kBf16> {
  const std::byte* columns;
  HOTROW_TARGET explicit Row(const std::byte* row) : columns(row) {}
  HOTROW_TARGET Lane8 lanes(uint32_t c) const { return from_upper_halves(columns + 2 * size_t{c}); }
  HOTROW_TARGET float at(uint32_t c) const {
    return from_bits(uint32_t{*reinterpret_cast<const Unaligned16*>(columns + 2 * size_t{c})} << 16);
  }
};

template <>
struct Row<RowType::kInt8> {
  float scale;
  const int8_t* codes;
  HOTROW_TARGET explicit Row(const std::byte* row)
      : scale(read_float(row)), codes(reinterpret_cast<const int8_t*>(row + sizeof(float))) {}
  HOTROW_TARGET Lane8 lanes(uint32_t c) const { return from_signed_bytes(codes + c) * scale; }
  HOTROW_TARGET float at(uint32_t c) const { return static_cast<float>(codes[c]) * scale; }
};

template <>
struct Row<RowType::kUint8> {
  float scale;
  float offset;
  const uint8_t* codes;
  HOTROW_TARGET explicit Row(const std::byte* row)
      : scale(read_float(row)),
        offset(read_float(row + sizeof(float))),
        codes(reinterpret_cast<const uint8_t*>(row + 2 * sizeof(float))) {}
  HOTROW_TARGET Lane8 lanes(uint32_t c) const { return from_bytes(codes + c) * scale + offset; }
  HOTROW_TARGET float at(uint32_t c) const { return static_cast<float>(codes[c]) * scale + offset; }
};
