// Keys, bags and row types from Python, checked. See arguments.hpp for plain arrays.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "bindings/arguments.hpp"
#include "bindings/python_names.hpp"
#include "lookup/lookup.hpp"
#include "rows/row_type.hpp"

namespace hotrow {

// int64[N] without reserved keys.
//
// Without the GIL, or if `out` overlaps an argument, an array may change after its check. Lookups tolerate this and
// read keys in place: a changed key is found or not. Writers take a copy and check the copy.
class Keys {
 public:
  enum Use { kLookUp, kWrite };

  Keys(nb::handle object, Use use) : array_(object, "keys", "int64[N]", Array::kCopy) {
    array_.require(Dtype::kInt64, 1);
    if (use == kWrite || !array_.is_aligned()) copy_ = array_.copy<int64_t>();
    const size_t position = lookup_loops().first_outside(begin(), count(), kSmallestKey, kLargestKey);
    if (position < count())
      raise(python().reserved_key_error, nb::make_tuple(begin()[position], static_cast<int64_t>(position)));
  }
  const int64_t* begin() const { return copy_ ? copy_.get() : array_.data<const int64_t>(); }
  size_t count() const { return array_.size(0); }

 private:
  Array array_;
  std::unique_ptr<int64_t[]> copy_;
};

// CSR offsets into N keys: from 0 to N, never falling. Always a copy, as int64: an offset that changed after its check
// could point outside the arrays.
class RowPtrs {
 public:
  RowPtrs(nb::handle object, size_t keys) {
    const Array array(object, "row_ptrs", "int32[R + 1] or int64[R + 1]", Array::kCopy);
    const bool narrow = array.has(Dtype::kInt32);
    array.require(narrow ? Dtype::kInt32 : Dtype::kInt64, 1);
    if (array.size(0) == 0) throw nb::value_error("row_ptrs: expected at least one offset, got none");
    bags_ = array.size(0) - 1;
    if (narrow) {
      const auto offsets = array.copy<int32_t>();
      offsets_.reset(new int64_t[bags_ + 1]);
      std::copy_n(offsets.get(), bags_ + 1, offsets_.get());
    } else {
      offsets_ = array.copy<int64_t>();
    }
    check(keys);
  }

  const int64_t* begin() const { return offsets_.get(); }
  size_t bags() const { return bags_; }

 private:
  void check(size_t keys) const {
    if (offsets_[0] != 0) refuse(0, "the first offset must be 0");
    for (size_t i = 0; i < bags_; ++i)
      if (offsets_[i + 1] < offsets_[i]) refuse(i + 1, "offsets must not fall");
    if (offsets_[bags_] != static_cast<int64_t>(keys))
      refuse(bags_, "the last offset must be the number of keys, " + std::to_string(keys));
  }

  [[noreturn]] void refuse(size_t position, const std::string& rule) const {
    const std::string message = "row_ptrs: " + rule + ", got " + std::to_string(offsets_[position]) + " at position " +
                                std::to_string(position);
    throw nb::value_error(message.c_str());
  }

  std::unique_ptr<int64_t[]> offsets_;
  size_t bags_ = 0;
};

inline Combiner parse_combiner(const std::string& name) {
  if (name == "sum") return Combiner::kSum;
  if (name == "mean") return Combiner::kMean;
  if (name == "sqrtn") return Combiner::kSqrtN;
  throw nb::value_error(("combiner: expected 'sum', 'mean' or 'sqrtn', got '" + name + "'").c_str());
}

inline RowType parse_row_type(const std::string& name) {
  for (size_t type = 0; type < kRowTypes; ++type)
    if (name == kRowTypeNames[type]) return static_cast<RowType>(type);
  std::string known;
  for (const char* one : kRowTypeNames) known += (known.empty() ? "'" : ", '") + std::string(one) + "'";
  throw nb::value_error(("row_dtype: expected one of " + known + ", got '" + name + "'").c_str());
}

// How keys, or rows, are combined. Weights are read in place: a changed weight is still a number.
class BagArguments {
 public:
  BagArguments(nb::handle row_ptrs, const std::string& combiner, nb::handle weights, size_t keys)
      : row_ptrs_(row_ptrs, keys), combiner_(parse_combiner(combiner)) {
    if (weights.is_none()) return;
    weights_.emplace(weights, "weights", "float32[N]");
    weights_->require(Dtype::kFloat32, 1);
    weights_->require_shape(keys);
  }
  size_t count() const { return row_ptrs_.bags(); }
  Bags bags() const {
    return {row_ptrs_.begin(), count(), combiner_, weights_ ? weights_->data<const float>() : nullptr};
  }

 private:
  RowPtrs row_ptrs_;
  Combiner combiner_;
  std::optional<Array> weights_;
};

}  // namespace hotrow
