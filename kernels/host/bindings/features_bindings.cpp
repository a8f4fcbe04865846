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
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/results.hpp"
#include "bindings/tensors.hpp"
#include "features/infer_message.hpp"
#include "features/json_numbers.hpp"
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

Datatype datatype_of(int64_t number) {
  if (number < 0 || number > static_cast<int64_t>(Datatype::kBool))
    throw nb::value_error("datatype: expected another number");
  return static_cast<Datatype>(number);
}

// Of each tensor its datatype, items, bytes and first extent, or None if the numbers cannot be those of tensors with
// `size` bytes together. `places` has the datatype of each tensor, where its extents begin in `numbers`, how many they
// are, and where its bytes are.
nb::object tensor_forms(nb::handle places_in, nb::handle numbers_in, size_t size) {
  const Array places(places_in, "places", "int64[T, 4]"), numbers(numbers_in, "numbers", "int64[K]");
  places.require(Dtype::kInt64, 2);
  places.require_shape(places.size(0), 4);
  numbers.require(Dtype::kInt64, 1);
  const size_t tensors = places.size(0), count = numbers.size(0);
  std::vector<int64_t> forms(4 * tensors);
  for (size_t i = 0; i < tensors; ++i) {
    const int64_t* const from = places.data<const int64_t>() + 4 * i;
    const auto number = [from](size_t at) { return static_cast<size_t>(from[at]); };  // less than 0: too large
    const TensorPlace place{datatype_of(from[0]), number(1), number(2), number(3)};
    if (!place.extents || place.first >= count || place.extents > count - place.first || place.bytes >= count)
      throw nb::value_error("places: expected places of numbers");
    int64_t* const form = &forms[4 * i];
    form[0] = from[0];
    if (!describe(place, numbers.data<const int64_t>(), form[1], form[2], form[3])) return nb::none();
    if (static_cast<size_t>(form[2]) > size) return nb::none();
    size -= static_cast<size_t>(form[2]);
  }
  return size ? nb::none() : array_of(forms).attr("reshape")(tensors, 4);
}

// (form, numbers) of a JSON text; see json_numbers().
nb::tuple numbers_of_json(const nb::bytes& text, bool are_numbered) {
  const JsonNumbers found = json_numbers({text.c_str(), text.size()}, are_numbered);
  return nb::make_tuple(nb::bytes(found.form.data(), found.form.size()), array_of(found.numbers));
}

// Null if the text is not UTF-8.
nb::object text_of(std::string_view text) {
  nb::object made = nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
  if (!made.is_valid()) PyErr_Clear();
  return made;
}

nb::object joined(const std::vector<std::string_view>& parts) {
  size_t size = 0;
  for (const std::string_view part : parts) size += part.size();
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!bytes.is_valid()) nb::raise_python_error();
  char* out = PyBytes_AS_STRING(bytes.ptr());
  for (const std::string_view part : parts) out = std::copy(part.begin(), part.end(), out);
  return bytes;
}

// How many fields a ModelInferRequest has, and (head, model, version, id, contents), or None if there are more
// than `most_fields`, or if the message is not plain.
nb::tuple split_message(const nb::bytes& data, size_t most_fields) {
  const InferMessage found = infer_message({data.c_str(), data.size()}, most_fields);
  const nb::tuple nothing = nb::make_tuple(found.fields, nb::none());
  if (!found.is_plain || found.fields > most_fields) return nothing;
  const nb::object model = text_of(found.model), version = text_of(found.version), id = text_of(found.id);
  if (!model.is_valid() || !version.is_valid() || !id.is_valid()) return nothing;
  const nb::bytes head(found.head.data(), found.head.size());
  return nb::make_tuple(found.fields, nb::make_tuple(head, model, version, id, joined(found.contents)));
}

// Tensors that are one after another in a body, from `begin` to its end, or the number of the first one whose texts are
// wrong, and how many texts were found. `forms` is what tensor_forms() returns.
nb::object read_tensors(nb::handle forms_in, nb::handle body, size_t begin) {
  const Array forms(forms_in, "forms", "int64[T, 4]");
  forms.require(Dtype::kInt64, 2);
  forms.require_shape(forms.size(0), 4);
  auto made = std::make_unique<PyTensors>(body);
  made->body.require(Dtype::kUint8, 1);
  if (begin > made->body.size(0)) throw nb::value_error("begin: expected a place in the body");
  std::string_view rest(made->body.data<const char>() + begin, made->body.size(0) - begin);
  made->tensors.reserve(forms.size(0));
  for (size_t i = 0; i < forms.size(0); ++i) {
    const int64_t* const form = forms.data<const int64_t>() + 4 * i;
    if (form[1] < 0 || form[3] < 0) throw nb::value_error("forms: expected numbers of items");
    if (form[2] < 0 || static_cast<size_t>(form[2]) > rest.size())
      throw nb::value_error("forms: the body has fewer bytes");
    Tensor& tensor = made->tensors.emplace_back();
    tensor.datatype = datatype_of(form[0]);
    tensor.count = static_cast<size_t>(form[1]);
    tensor.rows = static_cast<size_t>(form[3]);
    tensor.bytes = rest.substr(0, static_cast<size_t>(form[2]));
    if (!tensor.has_right_size()) throw nb::value_error("forms: the items need another number of bytes");
    rest.remove_prefix(tensor.bytes.size());
  }
  if (!rest.empty()) throw nb::value_error("forms: the body has more bytes");
  size_t number = 0, found = 0;
  {
    std::optional<GilRelease> release;
    release_gil_unless(made->body.size(0) <= 64 * kTinyKeys, release);
    for (; number < made->tensors.size(); ++number)
      if ((found = made->tensors[number].read()) != made->tensors[number].count) break;
  }
  if (number < made->tensors.size()) return nb::make_tuple(number, found);
  return nb::cast(made.release(), nb::rv_policy::take_ownership);
}

// The columns of a request, and the memory that they need.
struct Columns {
  Borrowed borrowed;
  std::vector<TensorColumn> tensors;
  TensorMemory memory;
  std::vector<Column> columns;
};

// A column is a tuple: ("tensor", number, lists). `lists` is None, True if the first extent says how many lists of the
// same length there are, or a tuple with the number of the tensor of their offsets.
Column tensor_column_of(Columns& columns, const nb::tuple& given, const PyTensors* tensors) {
  if (given.size() != 3 || !tensors) throw nb::value_error("column: expected a tensor, and tensors");
  TensorColumn tensor{columns.columns.size(), &tensors->at(nb::cast<size_t>(given[1]))};
  Column column;
  column.is_given = true;
  column.kind = kind_of(tensor.values->datatype);
  column.count = column.rows = tensor.values->count;
  const nb::object lists = given[2];
  column.has_lists = tensor.has_lists = !lists.is_none();
  if (nb::tuple offsets; nb::try_cast(lists, offsets)) {
    tensor.offsets = &tensors->at(offsets.size() ? nb::cast<size_t>(offsets[0]) : SIZE_MAX);
    if (kind_of(tensor.offsets->datatype) != ValueKind::kInteger || !tensor.offsets->count)
      throw nb::value_error("offsets: expected at least one integer");
    column.rows = tensor.offsets->count - 1;
  } else if (tensor.has_lists) {
    column.rows = tensor.values->rows;
    if (column.rows ? column.count % column.rows : column.count)
      throw nb::value_error("lists: expected rows of the same length");
  }
  columns.tensors.push_back(tensor);
  return column;
}

// Where lists begin: a copy, because an offset that changed after its check could point outside of the values. Null for
// lists of one value each.
const int64_t* splits_of(Columns& columns, const Array& given, size_t count) {
  const size_t rows = given.size(0) - 1;
  const int64_t* const first = given.data<const int64_t>();
  std::vector<int64_t> splits(first, first + rows + 1);
  if (splits[0] != 0 || splits[rows] != static_cast<int64_t>(count) || !std::is_sorted(splits.begin(), splits.end()))
    throw nb::value_error("splits: expected offsets from 0 to the number of values that never fall");
  bool has_one_each = count == rows;
  for (size_t row = 0; has_one_each && row < rows; ++row) has_one_each = splits[row] == static_cast<int64_t>(row);
  if (has_one_each) return nullptr;
  columns.memory.integers.push_back(std::move(splits));
  return columns.memory.integers.back().data();
}

// A column is a tuple: ("text", bytes, begins, ends, valid, splits), or ("integer" or "float", values, valid, splits),
// or a tensor.
Column column_of(Columns& columns, const nb::tuple& given, const PyTensors* tensors) {
  Borrowed& borrowed = columns.borrowed;
  const nb::str form = nb::cast<nb::str>(given[0]);
  if (PyUnicode_CompareWithASCIIString(form.ptr(), "tensor") == 0) return tensor_column_of(columns, given, tensors);
  Column column;
  column.kind = kind_of(form.c_str());
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
  column.is_given = true;
  column.rows = column.count;
  if (const Array* splits = borrow(borrowed, given[next + 1], "splits", "int64[R + 1]", Dtype::kInt64, SIZE_MAX)) {
    if (!splits->size(0)) throw nb::value_error("splits: expected at least one offset");
    column.rows = splits->size(0) - 1;
    column.splits = splits_of(columns, *splits, column.count);
    column.has_lists = column.splits;
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

  // The values of the list feature that was added last have slots of their own, from its slot on.
  void spread(size_t slots) {
    if (features_.empty() || features_.back().kind == Feature::kDense || features_.back().kind == Feature::kCross ||
        !slots || features_.back().place + slots > slots_)
      throw nb::value_error("slots: expected slots of the feature that was added last");
    features_.back().slots = slots;
  }

  // The dense feature that was added last has a number for each key of a list feature, in places of its own.
  void weigh(size_t feature) {
    if (features_.empty() || features_.back().kind != Feature::kDense || feature >= features_.size() ||
        features_[feature].kind == Feature::kDense ||
        features_.back().most_values > dense_dim_ - features_.back().place)
      throw nb::value_error("feature: expected one with keys, and a limit of the weights that there are places for");
    features_.back().weighs = feature;
    features_.back().slots = features_.back().most_values;
  }

  // What stands for the missing values of a column, in each feature that reads it.
  void fill(size_t column, const std::string& kind, const std::string& text, int64_t integer, float number) {
    require_column(column);
    fills_[column] = Fill{kind_of(kind), text, integer, number};
  }

  // The transform of all slots as one table; see read().
  nb::tuple run(const nb::sequence& columns, size_t samples) const {
    const nb::tuple found = read(columns, samples, {slots_}, nb::none(), nullptr);
    if (found.size() == 4) return found;
    return nb::make_tuple(found[1], found[2], found[0], found[6], found[7]);
  }

  // (dense, keys, row_ptrs, lengths, bags, most keys, known, unknown), or (feature, row, value, why) of the first
  // fault. The reason "offsets" is a fault of the lists of a column, whose number comes first. It has so many values.
  nb::tuple read(const nb::sequence& given, size_t samples, const std::vector<size_t>& tables, nb::handle users,
                 const PyTensors* tensors) const {
    Columns columns;
    for (const nb::handle column : given)
      columns.columns.push_back(column.is_none() ? Column() : column_of(columns, nb::cast<nb::tuple>(column), tensors));
    for (size_t i = 0; i < columns.columns.size() && i < fills_.size(); ++i)
      columns.columns[i].fill = fills_[i] ? &*fills_[i] : nullptr;
    std::vector<int32_t> user_of;
    const size_t user_count = read_users(users, samples, user_of);
    check(columns.columns, samples, user_count, tables);
    std::optional<TransformFault> fault;
    try {
      const Transform transform(features_, columns.columns, {samples, user_of.data()}, tables, dense_dim_);
      return run_into_arrays(transform, columns, samples, tables);
    } catch (const TransformFault& found) {
      fault = found;
    } catch (const TensorFault& found) {
      fault = {found.column, 0, found.values, "offsets"};
    }
    return nb::make_tuple(fault->feature, fault->row, fault->value, fault->why);
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

  // The number of users, and the user of each sample; None: one user.
  static size_t read_users(nb::handle given, size_t samples, std::vector<int32_t>& user_of) {
    if (given.is_none()) return 1;
    const Array users(given, "users", "int32[B]");
    users.require(Dtype::kInt32, 1);
    users.require_shape(samples);
    user_of.assign(users.data<const int32_t>(), users.data<const int32_t>() + samples);
    int32_t last = 0;
    for (const int32_t user : user_of) {
      if (user != last && user != last + 1) throw nb::value_error("users: expected 0, and then steps of 0 or 1");
      last = user;
    }
    return static_cast<size_t>(last) + 1;
  }

  // Text has no number, and a float no key: the caller has given each column the type of its features. Columns that no
  // feature reads may be None.
  void check(const std::vector<Column>& columns, size_t samples, size_t users,
             const std::vector<size_t>& tables) const {
    if (columns.size() != fills_.size()) throw nb::value_error("columns: expected as many as the transform has");
    if (std::accumulate(tables.begin(), tables.end(), size_t{0}) != slots_)
      throw nb::value_error("tables: expected the slots of the transform");
    if (samples > INT32_MAX / std::max<size_t>(slots_, 1))
      throw nb::value_error("samples: too many for 32-bit offsets");
    for (const Column& column : columns)
      if (column.is_given && column.rows != samples && (!samples || (column.rows != 1 && column.rows != users)))
        throw nb::value_error("values: expected one for each sample, for each user or for all, or splits");
    std::vector<size_t> of_slots(slots_), of_dense(dense_dim_);
    for (const Feature& feature : features_) {
      std::vector<size_t>& places = feature.kind == Feature::kDense ? of_dense : of_slots;
      for (size_t place = 0; place < feature.slots; ++place) ++places[feature.place + place];
      const Column& column = columns[feature.column];
      bool is_right = column.is_given;
      if (feature.kind == Feature::kDense || feature.kind == Feature::kBucketize)
        is_right &= column.kind != ValueKind::kText;
      if (feature.kind == Feature::kHash || feature.kind == Feature::kVocabulary)
        is_right &= column.kind != ValueKind::kFloat;
      if (feature.kind == Feature::kIdentity) is_right &= column.kind == ValueKind::kInteger;
      for (const CrossPart& part : feature.parts) {
        const Column& of_part = columns[part.column];
        is_right &= of_part.is_given && !of_part.has_lists &&
                    (of_part.kind == ValueKind::kFloat) <= !part.boundaries.empty() &&
                    (of_part.kind == ValueKind::kText) <= part.is_text;
      }
      if (!is_right) throw nb::value_error("columns: a feature cannot read a column of this kind");
    }
    const auto is_one = [](size_t count) { return count == 1; };
    if (!std::all_of(of_slots.begin(), of_slots.end(), is_one) || !std::all_of(of_dense.begin(), of_dense.end(), is_one))
      throw nb::value_error("expected one feature for each slot and for each dense column");
  }

  nb::tuple run_into_arrays(const Transform& transform, Columns& columns, size_t samples,
                            const std::vector<size_t>& tables) const {
    size_t offsets = 0;
    nb::list lengths, bags;
    std::vector<std::unique_ptr<Array>> arrays;
    const auto array = [&](size_t items, const nb::object& dtype) {
      nb::object made = python().empty(items, dtype);
      arrays.push_back(std::make_unique<Array>(made, "items", "items[N]", Array::kWrite));
      return made;
    };
    nb::object dense = array(samples * dense_dim_, python().float32);
    nb::object keys = array(transform.most_keys(), python().int64);
    Transform::Out out{arrays[0]->data<float>(), arrays[1]->data<int64_t>(), nullptr, {}};
    for (size_t t = 0; t < tables.size(); ++t) {
      lengths.append(transform.bags(t) + 1);
      offsets += transform.bags(t) + 1;
      bags.append(transform.has_bags(t) ? array(samples * tables[t], python().int32) : nb::none());
      out.bags.push_back(transform.has_bags(t) ? arrays.back()->data<int32_t>() : nullptr);
    }
    nb::object row_ptrs = array(offsets, python().int32);
    out.row_ptrs = arrays.back()->data<int32_t>();
    Transform::Counts counts;
    {
      std::optional<GilRelease> release;
      release_gil_unless(transform.most_keys() + samples * dense_dim_ <= kTinyKeys, release);
      for (const TensorColumn& tensor : columns.tensors)
        read_tensor(tensor, columns.columns[tensor.column], columns.memory);
      counts = transform.run(out);
    }
    arrays.clear();
    if (counts.keys < transform.most_keys()) keys = keys[nb::slice(nb::int_(0), nb::int_(counts.keys), nb::none())];
    return nb::make_tuple(dense.attr("reshape")(samples, dense_dim_), keys, row_ptrs, lengths, bags, counts.most_keys,
                          array_of(counts.known), array_of(counts.unknown));
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
      .def("spread", &PyTransform::spread, nb::arg("slots"))
      .def("weigh", &PyTransform::weigh, nb::arg("feature"))
      .def("run", &PyTransform::run, nb::arg("columns"), nb::arg("samples"))
      .def("read", &PyTransform::read, nb::arg("columns"), nb::arg("samples"), nb::arg("tables"),
           nb::arg("users").none(), nb::arg("tensors").none() = nb::none());
  nb::class_<PyTensors>(module, "Tensors").def("texts", [](const PyTensors& tensors, size_t number) {
    return places(tensors.at(number).texts, false);
  }, nb::arg("tensor"));
  module.def("tensor_forms", &tensor_forms, nb::arg("places"), nb::arg("numbers"), nb::arg("size"));
  module.def("numbers_in_json", &numbers_of_json, nb::arg("text"), nb::arg("are_numbered") = false);
  module.def("split_message", &split_message, nb::arg("data"), nb::arg("most_fields"));
  module.def("read_tensors", &read_tensors, nb::arg("forms"), nb::arg("body"), nb::arg("begin"));
  module.def("find_texts", &find, nb::arg("bytes"), nb::arg("count"));
  module.def("cut_texts", &cut, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"), nb::arg("valid").none(),
             nb::arg("separator"));
  module.def("integers_of", &integers_of, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"),
             nb::arg("valid").none());
  module.def("floats_of", &floats_of, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"), nb::arg("valid").none());
  module.def("vocabulary_file", &vocabulary_file, nb::arg("bytes"), nb::arg("begins"), nb::arg("ends"));
}

}  // namespace hotrow
