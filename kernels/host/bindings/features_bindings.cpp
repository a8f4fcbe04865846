// The Python face of the features' transform. See bindings.cpp for the rules.
#include "bindings/features_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/results.hpp"
#include "features/transform.hpp"

namespace hotrow {
namespace {

// Arrays borrowed for one call.
using Borrowed = std::vector<std::unique_ptr<Array>>;

const Array* borrow(Borrowed& borrowed, nb::handle object, const char* name, const char* shape, Dtype dtype,
                    size_t size) {
  if (object.is_none()) return nullptr;
  borrowed.push_back(std::make_unique<Array>(object, name, shape));
  borrowed.back()->require(dtype, 1);
  if (size != SIZE_MAX) borrowed.back()->require_shape(size);
  return borrowed.back().get();
}

// Where texts begin and end in bytes, checked: nothing outside of the bytes is read.
void borrow_texts(Borrowed& borrowed, nb::handle bytes, nb::handle begins, nb::handle ends, Column& column) {
  const Array* data = borrow(borrowed, bytes, "bytes", "uint8[T]", Dtype::kUint8, SIZE_MAX);
  const Array* from = borrow(borrowed, begins, "begins", "int64[V]", Dtype::kInt64, SIZE_MAX);
  if (!data || !from) throw nb::type_error("bytes and begins: expected arrays, got None");
  column.count = from->size(0);
  const Array* to = borrow(borrowed, ends, "ends", "int64[V]", Dtype::kInt64, column.count);
  if (!to) throw nb::type_error("ends: expected an array, got None");
  column.text = data->data<const char>();
  column.begins = from->data<const int64_t>();
  column.ends = to->data<const int64_t>();
  const auto size = static_cast<int64_t>(data->size(0));
  bool is_right = true;
  for (size_t i = 0; i < column.count; ++i)
    is_right &= (column.begins[i] >= 0) & (column.begins[i] <= column.ends[i]) & (column.ends[i] <= size);
  if (!is_right)
    throw nb::value_error("begins and ends: expected places in the bytes, none of which ends before it begins");
}

ValueKind kind_of(const std::string& name) {
  if (name == "text") return ValueKind::kText;
  if (name == "integer") return ValueKind::kInteger;
  if (name == "float") return ValueKind::kFloat;
  throw nb::value_error(("kind: expected 'text', 'integer' or 'float', got '" + name + "'").c_str());
}

// A column is a tuple: ("text", bytes, begins, ends, valid, splits), or ("integer" or "float", values, valid, splits).
Column column_of(Borrowed& borrowed, const nb::tuple& given, size_t samples) {
  Column column;
  column.kind = kind_of(nb::cast<std::string>(given[0]));
  const bool is_text = column.kind == ValueKind::kText, is_integer = column.kind == ValueKind::kInteger;
  const size_t next = is_text ? 4 : 2;
  if (given.size() != next + 2) throw nb::value_error("column: expected another number of items");
  if (is_text) {
    borrow_texts(borrowed, given[1], given[2], given[3], column);
  } else {
    const Array* values = borrow(borrowed, given[1], "values", is_integer ? "int64[V]" : "float32[V]",
                                 is_integer ? Dtype::kInt64 : Dtype::kFloat32, SIZE_MAX);
    if (!values) throw nb::type_error("values: expected an array, got None");
    column.count = values->size(0);
    column.integers = is_integer ? values->data<const int64_t>() : nullptr;
    column.floats = is_integer ? nullptr : values->data<const float>();
  }
  const Array* valid = borrow(borrowed, given[next], "valid", "bool[V]", Dtype::kBool, column.count);
  if (valid) column.valid = valid->data<const uint8_t>();
  const Array* splits = borrow(borrowed, given[next + 1], "splits", "int64[B + 1]", Dtype::kInt64, samples + 1);
  if (splits) {
    column.splits = splits->data<const int64_t>();
    if (column.splits[0] != 0 || column.splits[samples] != static_cast<int64_t>(column.count) ||
        !std::is_sorted(column.splits, column.splits + samples + 1))
      throw nb::value_error("splits: expected offsets from 0 to the number of values that never fall");
  } else if (column.count != samples) {
    throw nb::value_error("values: expected one for each sample, or splits");
  }
  return column;
}

std::shared_ptr<const Vocabulary> open_vocabulary(const std::string& path) {
  try {
    return std::make_shared<const Vocabulary>(path);
  } catch (const FileFault& fault) {
    throw nb::value_error((fault.file + ": " + fault.reason).c_str());
  }
}

class PyTransform {
 public:
  PyTransform(size_t columns, size_t slots, size_t dense_dim)
      : fills_(columns), slots_(slots), dense_dim_(dense_dim) {}

  void add_hash(size_t column, size_t slot, int64_t offset, uint64_t buckets, const std::string& hash,
                std::pair<uint64_t, uint64_t> salt) {
    Feature& feature = add(Feature::kHash, column, slot, offset);
    static constexpr const char* names[] = {"farmhash", "siphash", "murmur3", "xxh64"};
    const auto* const found = std::find(std::begin(names), std::end(names), hash);
    if (found == std::end(names)) throw nb::value_error(("hash: got '" + hash + "'").c_str());
    feature.hash = static_cast<Hash>(found - names);
    feature.buckets = Buckets(buckets);
    feature.salt[0] = salt.first;
    feature.salt[1] = salt.second;
  }

  void add_vocabulary(size_t column, size_t slot, int64_t offset, const std::string& path, uint64_t unknown_buckets) {
    Feature& feature = add(Feature::kVocabulary, column, slot, offset);
    feature.vocabulary = open_vocabulary(path);
    feature.unknown_buckets = Buckets(unknown_buckets);
  }

  void add_bucketize(size_t column, size_t slot, int64_t offset, std::vector<float> boundaries) {
    add(Feature::kBucketize, column, slot, offset).boundaries = std::move(boundaries);
  }

  void add_identity(size_t column, size_t slot, int64_t offset, uint64_t size) {
    add(Feature::kIdentity, column, slot, offset).buckets = Buckets(size);
  }

  void add_cross(const std::vector<std::tuple<size_t, std::vector<float>, bool>>& parts, size_t slot, int64_t offset,
                 uint64_t buckets) {
    if (parts.empty()) throw nb::value_error("parts: expected at least one");
    for (const auto& part : parts) require_column(std::get<0>(part));
    Feature& feature = add(Feature::kCross, std::get<0>(parts[0]), slot, offset);
    feature.buckets = Buckets(buckets);
    for (const auto& [column, boundaries, is_text] : parts) feature.parts.push_back({column, boundaries, is_text});
  }

  void add_dense(size_t column, size_t place, float lowest, float highest, bool takes_log, double mean, double scale) {
    require_column(column);
    if (place >= dense_dim_) throw nb::value_error("place: expected a dense column");
    Feature feature;
    feature.kind = Feature::kDense;
    feature.column = column;
    feature.place = place;
    feature.lowest = lowest;
    feature.highest = highest;
    feature.takes_log = takes_log;
    feature.mean = mean;
    feature.scale = scale;
    features_.push_back(std::move(feature));
  }

  // What the feature that was added last does with many values.
  void limit(size_t most_values, const std::string& keep) {
    if (features_.empty()) throw nb::value_error("there is no feature yet");
    Feature& feature = features_.back();
    feature.most_values = most_values;
    feature.keep = keep == "first" ? Feature::kFirst : keep == "last" ? Feature::kLast : Feature::kAll;
  }

  // What stands for the missing values of a column, in each feature that reads it.
  void fill(size_t column, const std::string& kind, const std::string& text, int64_t integer, float number) {
    require_column(column);
    fills_[column] = Fill{kind_of(kind), text, integer, number};
  }

  // The transform of some of the features, by their numbers. Their slots and dense columns keep their order.
  PyTransform part(const std::vector<size_t>& numbers) const {
    std::vector<size_t> slots(slots_ + 1), dense(dense_dim_ + 1);  // how many places before each are taken
    for (const size_t number : numbers) {
      if (number >= features_.size()) throw nb::value_error("features: there are fewer features");
      const Feature& feature = features_[number];
      ++(feature.kind == Feature::kDense ? dense : slots)[feature.place + 1];
    }
    std::partial_sum(slots.begin(), slots.end(), slots.begin());
    std::partial_sum(dense.begin(), dense.end(), dense.begin());
    PyTransform out(fills_.size(), slots.back(), dense.back());
    out.fills_ = fills_;
    for (const size_t number : numbers) {
      out.features_.push_back(features_[number]);
      size_t& place = out.features_.back().place;
      place = (out.features_.back().kind == Feature::kDense ? dense : slots)[place];
    }
    return out;
  }

  // (keys, row_ptrs, dense, known, unknown), or (feature, sample, value, why) of the first fault.
  nb::tuple run(const nb::sequence& given, size_t samples) const {
    Borrowed borrowed;
    std::vector<Column> columns;
    for (const nb::handle column : given)
      columns.push_back(column.is_none() ? Column() : column_of(borrowed, nb::cast<nb::tuple>(column), samples));
    check(columns, samples);
    for (size_t i = 0; i < columns.size(); ++i) columns[i].fill = fills_[i] ? &*fills_[i] : nullptr;
    Transformed out;
    std::optional<TransformFault> fault;
    std::optional<GilRelease> release;
    release_gil_unless(samples * features_.size() <= kTinyKeys, release);
    try {
      out = transform(features_, columns, samples, slots_, dense_dim_);
    } catch (const TransformFault& found) {
      fault = found;
    }
    release.reset();
    if (fault) return nb::make_tuple(fault->feature, fault->sample, fault->value, fault->why);
    nb::object dense = array_of(out.dense).attr("reshape")(samples, dense_dim_);
    return nb::make_tuple(array_of(out.keys), array_of(out.row_ptrs), dense, array_of(out.known), array_of(out.unknown));
  }

 private:
  void require_column(size_t column) const {
    if (column >= fills_.size()) throw nb::value_error("column: there are fewer columns");
  }

  Feature& add(Feature::Kind kind, size_t column, size_t slot, int64_t offset) {
    require_column(column);
    if (slot >= slots_) throw nb::value_error("slot: there are fewer slots");
    Feature feature;
    feature.kind = kind;
    feature.column = column;
    feature.place = slot;
    feature.offset = offset;
    features_.push_back(std::move(feature));
    return features_.back();
  }

  // Whether a column has values: those that no feature reads may be None.
  static bool is_given(const Column& column, size_t samples) { return column.splits || column.count == samples; }

  // Text has no number, and a float no key: the caller has given each column the type of its features.
  void check(const std::vector<Column>& columns, size_t samples) const {
    if (columns.size() != fills_.size()) throw nb::value_error("columns: expected as many as the transform has");
    std::vector<size_t> of_slots(slots_), of_dense(dense_dim_);
    for (const Feature& feature : features_) {
      ++(feature.kind == Feature::kDense ? of_dense : of_slots)[feature.place];
      const ValueKind kind = columns[feature.column].kind;
      bool is_right = is_given(columns[feature.column], samples);
      if (feature.kind == Feature::kDense || feature.kind == Feature::kBucketize) is_right &= kind != ValueKind::kText;
      if (feature.kind == Feature::kHash || feature.kind == Feature::kVocabulary) is_right &= kind != ValueKind::kFloat;
      if (feature.kind == Feature::kIdentity) is_right &= kind == ValueKind::kInteger;
      for (const CrossPart& part : feature.parts) {
        const Column& column = columns[part.column];
        is_right &= is_given(column, samples) && !column.splits &&
                    (column.kind == ValueKind::kFloat) <= !part.boundaries.empty() &&
                    (column.kind == ValueKind::kText) <= part.is_text;
      }
      if (!is_right) throw nb::value_error("columns: a feature cannot read a column of this kind");
    }
    const auto is_one = [](size_t count) { return count == 1; };
    if (!std::all_of(of_slots.begin(), of_slots.end(), is_one) || !std::all_of(of_dense.begin(), of_dense.end(), is_one))
      throw nb::value_error("expected one feature for each slot and for each dense column");
  }

  std::vector<std::optional<Fill>> fills_;  // of each column
  const size_t slots_, dense_dim_;
  std::vector<Feature> features_;
};

nb::object places(const TextPlaces& found, bool has_splits) {
  nb::object begins = array_of(found.begins), ends = array_of(found.ends);
  if (!has_splits) return nb::make_tuple(begins, ends);
  return nb::make_tuple(begins, ends, array_of(found.splits));
}

// (begins, ends) of `count` texts after their lengths, or how many were found.
nb::object find(nb::handle bytes, size_t count) {
  const Array data(bytes, "bytes", "uint8[T]");
  data.require(Dtype::kUint8, 1);
  if (count > data.size(0) / 4) return nb::cast(std::min(count - 1, data.size(0) / 4));
  TextPlaces found;
  size_t number = 0;
  {
    const GilRelease release;
    number = find_texts(data.data<const char>(), data.size(0), count, found);
  }
  return number == count ? places(found, false) : nb::cast(number);
}

nb::object cut(nb::handle bytes, nb::handle begins, nb::handle ends, nb::handle valid, const std::string& separator) {
  if (separator.size() != 1) throw nb::value_error("separator: expected one byte");
  Borrowed borrowed;
  Column column;
  borrow_texts(borrowed, bytes, begins, ends, column);
  if (const Array* is_valid = borrow(borrowed, valid, "valid", "bool[V]", Dtype::kBool, column.count))
    column.valid = is_valid->data<const uint8_t>();
  TextPlaces found;
  {
    const GilRelease release;
    cut_texts(column, separator[0], found);
  }
  return places(found, true);
}

// Spaces around a number do not count.
std::string_view trimmed(std::string_view text) {
  const auto is_space = [](char letter) { return letter == ' ' || letter == '\t'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

template <class T>
bool parse(std::string_view text, T& out) {
  text = trimmed(text);
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

// An integer may be written as 17, 17.0 or 1.7e1, but not as 17.5. A power of ten is exact below 2^53.
bool parse_integer(std::string_view text, int64_t& out) {
  text = trimmed(text);
  const size_t point = text.find('.');
  if (point != text.npos && text.find_first_not_of('0', point + 1) == text.npos) text = text.substr(0, point);
  if (parse(text, out)) return true;
  double number = 0;
  if (!parse(text, number) || std::floor(number) != number || std::fabs(number) >= 9007199254740992.0) return false;
  out = static_cast<int64_t>(number);
  return true;
}

// Decimal text is rounded to float32 as if it were a float64 first, so that text and numbers of a file agree.
bool parse_float(std::string_view text, float& out) {
  double number = 0;
  if (!parse(text, number)) return false;
  out = static_cast<float>(number);
  return true;
}

// Numbers that texts stand for; the place of the first text that stands for none. The numbers of missing texts are 0.
template <class T>
nb::object numbers(nb::handle bytes, nb::handle begins, nb::handle ends, nb::handle valid,
                   bool (*parse)(std::string_view, T&)) {
  Borrowed borrowed;
  Column column;
  borrow_texts(borrowed, bytes, begins, ends, column);
  if (const Array* is_valid = borrow(borrowed, valid, "valid", "bool[V]", Dtype::kBool, column.count))
    column.valid = is_valid->data<const uint8_t>();
  std::vector<T> out(column.count);
  size_t wrong = column.count;
  {
    const GilRelease release;
    for (size_t i = 0; i < column.count && wrong == column.count; ++i)
      if (!column.is_missing(i) && !parse(column.value(i).text, out[i])) wrong = i;
  }
  return wrong < column.count ? nb::object(nb::cast(wrong)) : array_of(out);
}

nb::object integers_of(nb::handle bytes, nb::handle begins, nb::handle ends, nb::handle valid) {
  return numbers<int64_t>(bytes, begins, ends, valid, &parse_integer);
}

nb::object floats_of(nb::handle bytes, nb::handle begins, nb::handle ends, nb::handle valid) {
  return numbers<float>(bytes, begins, ends, valid, &parse_float);
}

// The file of a vocabulary, or the places of two equal texts.
nb::object vocabulary_file(nb::handle bytes, nb::handle begins, nb::handle ends) {
  Borrowed borrowed;
  Column column;
  borrow_texts(borrowed, bytes, begins, ends, column);
  if (column.count > Vocabulary::kMostTexts) throw nb::value_error("a vocabulary has less than 2^31 texts");
  std::vector<std::string_view> texts;
  for (size_t i = 0; i < column.count; ++i) texts.push_back(column.value(i).text);
  try {
    const std::string file = Vocabulary::file_of(texts);
    return nb::bytes(file.data(), file.size());
  } catch (const RepeatedText& repeated) {
    return nb::make_tuple(repeated.first, repeated.second);
  }
}

}  // namespace

void bind_features(nb::module_& module) {
  nb::class_<PyTransform>(module, "FeatureTransform")
      .def(nb::init<size_t, size_t, size_t>(), nb::arg("columns"), nb::arg("slots"), nb::arg("dense_dim"))
      .def("add_hash", &PyTransform::add_hash, nb::arg("column"), nb::arg("slot"), nb::arg("offset"),
           nb::arg("buckets"), nb::arg("hash"), nb::arg("salt"))
      .def("add_vocabulary", &PyTransform::add_vocabulary, nb::arg("column"), nb::arg("slot"), nb::arg("offset"),
           nb::arg("path"), nb::arg("unknown_buckets"))
      .def("add_bucketize", &PyTransform::add_bucketize, nb::arg("column"), nb::arg("slot"), nb::arg("offset"),
           nb::arg("boundaries"))
      .def("add_identity", &PyTransform::add_identity, nb::arg("column"), nb::arg("slot"), nb::arg("offset"),
           nb::arg("size"))
      .def("add_cross", &PyTransform::add_cross, nb::arg("parts"), nb::arg("slot"), nb::arg("offset"),
           nb::arg("buckets"))
      .def("add_dense", &PyTransform::add_dense, nb::arg("column"), nb::arg("place"), nb::arg("lowest"),
           nb::arg("highest"), nb::arg("takes_log"), nb::arg("mean"), nb::arg("scale"))
      .def("limit", &PyTransform::limit, nb::arg("most_values"), nb::arg("keep"))
      .def("fill", &PyTransform::fill, nb::arg("column"), nb::arg("kind"), nb::arg("text"), nb::arg("integer"),
           nb::arg("number"))
      .def("part", &PyTransform::part, nb::arg("features"))
      .def("run", &PyTransform::run, nb::arg("columns"), nb::arg("samples"));
  module.def("find_texts", &find, nb::arg("bytes"), nb::arg("count"));
  module.def("cut_texts", &cut, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"), nb::arg("valid").none(),
             nb::arg("separator"));
  module.def("integers_of", &integers_of, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"),
             nb::arg("valid").none());
  module.def("floats_of", &floats_of, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"), nb::arg("valid").none());
  module.def("vocabulary_file", &vocabulary_file, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"));
}

}  // namespace hotrow
