// Arrays from Python, checked once, here, through the buffer protocol, with errors that name the argument.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/gil_release.hpp"

namespace hotrow {

namespace nb = nanobind;

// For this few keys or rows, the work takes no longer than releasing and taking the GIL.
constexpr size_t kTinyKeys = 64;

inline void release_gil_unless(bool tiny, std::optional<GilRelease>& release) {
  if (!tiny) release.emplace();
}

enum class Dtype { kInt64, kInt32, kUint64, kFloat32, kBool, kUint8 };

// A C-contiguous array borrowed from Python. It holds the array until it is destroyed; create and destroy it with the
// GIL.
class Array {
 public:
  enum Access { kRead, kWrite, kCopy };  // kCopy: unaligned items are allowed, see copy()

  // `shape` is the expected shape in letters, for messages: "int64[N]".
  Array(nb::handle object, const char* name, const char* shape, Access access = kRead) : name_(name), shape_(shape) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_FULL_RO) != 0) {
      PyErr_Clear();
      throw nb::type_error(expected(nb::type_name(object.type()).c_str()).c_str());
    }
    if (!PyBuffer_IsContiguous(&buffer_, 'C')) refuse("is not C-contiguous");
    if (access == kWrite && buffer_.readonly) refuse("is read-only");
    if (access != kCopy && !is_aligned()) refuse("is not aligned");
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { PyBuffer_Release(&buffer_); }

  bool has(Dtype dtype) const {
    const std::string code = format();
    const Py_ssize_t bytes = buffer_.itemsize;
    switch (dtype) {
      case Dtype::kInt64: return bytes == 8 && (code == "l" || code == "q");
      case Dtype::kInt32: return bytes == 4 && (code == "i" || code == "l");
      case Dtype::kUint64: return bytes == 8 && (code == "L" || code == "Q");
      case Dtype::kFloat32: return code == "f";
      case Dtype::kBool: return code == "?";
      case Dtype::kUint8: return code == "B";
    }
    return false;
  }

  // Raise TypeError for another dtype and ValueError for another number of dimensions.
  void require(Dtype dtype, int dimensions) const {
    if (has(dtype) && buffer_.ndim == dimensions) return;
    const std::string message = expected(description());
    if (!has(dtype)) throw nb::type_error(message.c_str());
    throw nb::value_error(message.c_str());
  }

  // Raise ValueError unless the array's shape is [rows] or [rows, columns].
  void require_shape(size_t rows, int64_t columns = -1) const {
    if (size(0) == rows && (columns < 0 || size(1) == static_cast<size_t>(columns))) return;
    std::string wanted = std::to_string(rows);
    if (columns >= 0) wanted += ", " + std::to_string(columns);
    const std::string message =
        std::string(name_) + ": expected " + shape_ + " of shape [" + wanted + "], got " + description();
    throw nb::value_error(message.c_str());
  }

  size_t size(int dimension) const { return static_cast<size_t>(buffer_.shape[dimension]); }
  bool is_aligned() const {
    const auto item = static_cast<uintptr_t>(buffer_.itemsize);
    return item == 0 || reinterpret_cast<uintptr_t>(buffer_.buf) % item == 0;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(buffer_.buf);
  }
  // The items of a one-dimensional array of dtype T. Throws std::bad_alloc.
  template <class T>
  std::unique_ptr<T[]> copy() const {
    std::unique_ptr<T[]> items(new T[size(0)]);
    if (size(0)) std::memcpy(items.get(), buffer_.buf, size(0) * sizeof(T));
    return items;
  }

 private:
  // The struct-module code of the items, without a mark of this machine's byte order, as ctypes writes it ("<f").
  std::string format() const {
    const std::string format = buffer_.format ? buffer_.format : "B";
    const uint16_t one = 1;
    const bool is_little_endian = *reinterpret_cast<const unsigned char*>(&one) == 1;
    const bool is_marked = format[0] == '@' || format[0] == '=' || format[0] == (is_little_endian ? '<' : '>');
    return is_marked ? format.substr(1) : format;
  }

  std::string description() const {
    static constexpr std::pair<const char*, const char*> names[] = {
        {"?", "bool"},   {"b", "int8"},  {"B", "uint8"},  {"h", "int16"},  {"H", "uint16"},  {"i", "int32"},
        {"I", "uint32"}, {"l", "int64"}, {"L", "uint64"}, {"q", "int64"}, {"Q", "uint64"}, {"e", "float16"},
        {"f", "float32"}, {"d", "float64"}};
    std::string text = "items of format '" + format() + "' ";
    for (const auto& [code, dtype] : names)
      if (format() == code) text = dtype;
    text += "[";
    for (int i = 0; i < buffer_.ndim; ++i) text += (i ? ", " : "") + std::to_string(buffer_.shape[i]);
    return text + "]";
  }

  std::string expected(const std::string& got) const {
    return std::string(name_) + ": expected " + shape_ + ", got " + got;
  }

  // A constructor that throws runs no destructor.
  [[noreturn]] void refuse(const char* why) {
    const std::string message = expected(description() + " that " + why);
    PyBuffer_Release(&buffer_);
    throw nb::value_error(message.c_str());
  }

  const char* name_;
  const char* shape_;
  Py_buffer buffer_;
};

}  // namespace hotrow
