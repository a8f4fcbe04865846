#include "features/transform.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <numeric>

namespace hotrow {
namespace {

constexpr int64_t kLargestKey = INT64_MAX - 2, kSmallestKey = INT64_MIN + 2;
constexpr uint64_t kCrossSeed = 0xDECAFCAFFE;  // TensorFlow's
// Rows are transformed in blocks of this size: feature by feature, and then put in the order of rows.
constexpr size_t kBlockRows = 256;
constexpr const char* kTooMany = "gives more keys than 32-bit offsets reach";

// A value as text. An integer is its decimal digits, as in TensorFlow and Keras.
class Text {
 public:
  Text(const Value& value, ValueKind kind) : text_(value.text) {
    if (kind == ValueKind::kText) return;
    const auto end = std::to_chars(digits_, digits_ + sizeof digits_, value.integer).ptr;
    text_ = {digits_, static_cast<size_t>(end - digits_)};
  }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  std::string_view view() const { return text_; }

 private:
  char digits_[24] = {};
  std::string_view text_;
};

uint64_t hash_of(const Feature& feature, std::string_view text) {
  switch (feature.hash) {
    case Hash::kSip: return siphash64(text, feature.salt[0], feature.salt[1]);
    case Hash::kMurmur3: return murmur3_64(text);
    case Hash::kXxh64: return xxh64(text);
    default: return fingerprint64(text);
  }
}

// A hash as a key. Without buckets the key has 63 bits, and the two that are reserved become others.
int64_t bucket_of(uint64_t hash, const Feature& feature) {
  if (feature.buckets.count()) return feature.offset + static_cast<int64_t>(feature.buckets.remainder(hash));
  const auto key = static_cast<int64_t>(hash & INT64_MAX);
  return key > kLargestKey ? key - 2 : key;
}

uint64_t place_among(const std::vector<float>& boundaries, const Value& value, ValueKind kind) {
  const float number = kind == ValueKind::kInteger ? static_cast<float>(value.integer) : value.number;
  return static_cast<uint64_t>(std::upper_bound(boundaries.begin(), boundaries.end(), number) - boundaries.begin());
}

// The keys of one feature, row by row, in memory with room for all of them.
struct Bags {
  int64_t* keys = nullptr;
  size_t count = 0;
  std::vector<uint32_t> ends;  // of each row's keys; empty: so far each row has one key

  void add(int64_t key) { keys[count++] = key; }
  // Where the keys of a row begin and end.
  std::pair<size_t, size_t> of_row(size_t row) const {
    if (ends.empty()) return {row, row + 1};
    return {row ? ends[row - 1] : 0, ends[row]};
  }
};

// Makes the keys or the numbers of one feature.
class FeatureValues {
 public:
  FeatureValues(size_t number, const Feature& feature, const std::vector<Column>& columns, const Samples& samples,
                size_t rows)
      : number_(number),
        feature_(feature),
        columns_(columns),
        column_(columns[feature.column]),
        samples_(samples),
        rows_(rows) {}

  int64_t known() const { return known_; }
  int64_t unknown() const { return unknown_; }

  // Append the keys of the rows from `begin` to `end` to `bags`, which have those of the rows before.
  void add_rows(size_t begin, size_t end, Bags& bags) {
    size_t row = begin;
    if (bags.ends.empty() && !column_.splits) row = add_one_each(begin, end, bags);
    if (row == end) return;
    while (bags.ends.size() < row) bags.ends.push_back(static_cast<uint32_t>(bags.ends.size() + 1));
    for (; row < end; ++row) {
      add_keys(row, bags);
      bags.ends.push_back(static_cast<uint32_t>(bags.count));
    }
  }

  // One number for each row.
  void set_numbers(std::vector<float>& numbers) const {
    numbers.resize(rows_);
    for (size_t row = 0; row < rows_; ++row) {
      const auto [begin, end] = values_of(row);
      numbers[row] = number(row, begin, begin == end || column_.is_missing(begin));
    }
  }

  // The weights of each row's keys, and then zeros. A missing value has no key, and may come with a weight or without.
  void set_weights(const FeatureValues& keys, std::vector<float>* places) const {
    for (size_t i = 0; i < feature_.slots; ++i) places[i].resize(rows_);
    if (column_.fill) return;  // nobody reads them
    for (size_t row = 0; row < rows_; ++row) {
      const size_t of_weights = row_of(column_, row), of_keys = row_of(keys.column_, row);
      const auto [begin, end] = weights_of(of_weights);
      const auto [first, last] = keys.all_values_of(of_keys);
      const auto [from, to] = keys.values_of(of_keys);
      const size_t count = keys.count_present(first, last);
      const bool is_for_each_value = end - begin == last - first;
      require(is_for_each_value || end - begin == count, of_weights, count, "has another number of keys");
      size_t at = begin + (is_for_each_value ? from - first : keys.count_present(first, from)), place = 0;
      for (size_t key = from; key < to; ++key) {
        const bool has_key = !keys.column_.is_missing(key);
        if (has_key) places[place++][row] = number(of_weights, at, column_.is_missing(at));
        at += is_for_each_value || has_key;
      }
    }
  }

  void require(bool is_right, size_t row, size_t at, const char* why) const {
    if (!is_right) throw TransformFault{number_, row, at, why};
  }

 private:
  float number(size_t row, size_t at, bool is_missing) const {
    require(!is_missing || column_.fill, row, at, "is missing");
    const Value value = is_missing ? column_.fill->value() : column_.value(at);
    const ValueKind kind = is_missing ? column_.fill->kind : column_.kind;
    float single = kind == ValueKind::kInteger ? static_cast<float>(value.integer) : value.number;
    require(std::isfinite(single), row, at, "is infinite");
    if (feature_.lowest < feature_.highest) single = std::min(std::max(single, feature_.lowest), feature_.highest);
    double number = single;
    if (feature_.takes_log) {
      require(number > -1, row, at, "has no logarithm");
      number = std::log1p(number);
    }
    single = static_cast<float>((number - feature_.mean) / feature_.scale);
    require(std::isfinite(single), row, at, "is too large");
    return single;
  }

  // Append the keys of rows that have one value and one key each, up to the first row that may have none.
  size_t add_one_each(size_t begin, size_t end, Bags& bags) const {
    size_t row = begin;
    int64_t* const keys = bags.keys;  // a row has the key of its number
    if (feature_.kind == Feature::kHash && feature_.hash == Hash::kFarm && column_.kind == ValueKind::kText) {
      for (; row < end && !column_.is_missing(row); ++row) {
        const std::string_view text(column_.text + column_.begins[row],
                                    static_cast<size_t>(column_.ends[row] - column_.begins[row]));
        require(is_utf8(text), row, row, "is not UTF-8");
        keys[row] = bucket_of(fingerprint64(text), feature_);
      }
    } else if (feature_.kind == Feature::kIdentity && !column_.valid) {
      const int64_t* const integers = column_.integers;
      for (; row < end; ++row) keys[row] = checked_key(row, row, integers[row]);
    }
    bags.count += row - begin;
    return row;
  }

  // Which values of the column are the row's.
  std::pair<size_t, size_t> all_values_of(size_t row) const {
    if (!column_.splits) return {row, row + 1};
    return {static_cast<size_t>(column_.splits[row]), static_cast<size_t>(column_.splits[row + 1])};
  }

  // If each row has one value, a missing value is no weight.
  std::pair<size_t, size_t> weights_of(size_t row) const {
    if (!column_.splits && column_.is_missing(row)) return {row, row};
    return all_values_of(row);
  }

  // A missing value is present if something stands for it.
  bool is_present(size_t at) const { return column_.fill || !column_.is_missing(at); }

  size_t count_present(size_t begin, size_t end) const {
    size_t count = 0;
    for (; begin < end; ++begin) count += is_present(begin);
    return count;
  }

  // Which values of the row are kept. Missing values are left out first, so they do not count.
  std::pair<size_t, size_t> values_of(size_t row) const {
    auto [begin, end] = all_values_of(row);
    if (end - begin <= feature_.most_values) return {begin, end};
    size_t kept = 0, at = feature_.keep == Feature::kLast ? end : begin;
    switch (feature_.keep) {
      case Feature::kFirst:
        while (at < end && kept < feature_.most_values) kept += is_present(at++);
        return {begin, at};
      case Feature::kLast:
        while (at > begin && kept < feature_.most_values) kept += is_present(--at);
        return {at, end};
      default:
        kept = count_present(begin, end);
        require(kept <= feature_.most_values, row, kept, "has too many values");
        return {begin, end};
    }
  }

  // Append the keys of a row.
  void add_keys(size_t row, Bags& bags) {
    if (feature_.kind == Feature::kCross) return add_cross(row, bags);
    const auto [begin, end] = values_of(row);
    const Fill* const fill = column_.fill;
    if (begin == end && fill) return add_key(row, begin, fill->value(), fill->kind, bags);
    for (size_t at = begin; at < end; ++at) {
      if (!column_.is_missing(at)) add_key(row, at, column_.value(at), column_.kind, bags);
      else if (fill) add_key(row, at, fill->value(), fill->kind, bags);
    }
  }

  // The row of a column with fewer rows than the feature, whose rows are then samples or users.
  size_t row_of(const Column& column, size_t row) const {
    if (column.rows == rows_) return row;
    return column.rows == 1 ? 0 : samples_.row(row, column.rows);
  }

  void add_cross(size_t row, Bags& bags) const {
    uint64_t hash = kCrossSeed;
    for (const CrossPart& part : feature_.parts) {
      const Column& column = columns_[part.column];
      const size_t at = row_of(column, row);
      const bool is_missing = column.is_missing(at);
      if (is_missing && !column.fill) return;
      const Value value = is_missing ? column.fill->value() : column.value(at);
      const ValueKind kind = is_missing ? column.fill->kind : column.kind;
      if (kind == ValueKind::kText) require(is_utf8(value.text), row, row, "is not UTF-8");
      hash = cross(hash, part.is_text              ? fingerprint64(Text(value, kind).view())
                         : part.boundaries.empty() ? static_cast<uint64_t>(value.integer)
                                                   : place_among(part.boundaries, value, kind));
    }
    bags.add(bucket_of(hash, feature_));
  }

  void add_key(size_t row, size_t at, const Value& value, ValueKind kind, Bags& bags) {
    if (kind == ValueKind::kText) require(is_utf8(value.text), row, at, "is not UTF-8");
    switch (feature_.kind) {
      case Feature::kHash: return bags.add(bucket_of(hash_of(feature_, Text(value, kind).view()), feature_));
      case Feature::kVocabulary: return add_place(Text(value, kind).view(), bags);
      case Feature::kBucketize:
        return bags.add(feature_.offset + static_cast<int64_t>(place_among(feature_.boundaries, value, kind)));
      default: return bags.add(checked_key(row, at, value.integer));
    }
  }

  int64_t checked_key(size_t row, size_t at, int64_t key) const {
    const uint64_t size = feature_.buckets.count();
    require(!size || static_cast<uint64_t>(key) < size, row, at, "is outside of its range");
    require(key >= kSmallestKey && key <= kLargestKey, row, at, "is reserved");
    return feature_.offset + key;
  }

  void add_place(std::string_view text, Bags& bags) {
    const int64_t place = feature_.vocabulary->find(text);
    const Buckets& unknown = feature_.unknown_buckets;
    ++(place < 0 ? unknown_ : known_);
    if (place < 0 && !unknown.count()) return;
    const uint64_t key = place < 0 ? unknown.remainder(fingerprint64(text)) : unknown.count() + static_cast<uint64_t>(place);
    bags.add(feature_.offset + static_cast<int64_t>(key));
  }

  const size_t number_;
  const Feature& feature_;
  const std::vector<Column>& columns_;
  const Column& column_;
  const Samples& samples_;
  const size_t rows_;
  int64_t known_ = 0, unknown_ = 0;
};

}  // namespace

// One run of a transform.
class TransformRun {
 public:
  explicit TransformRun(const Transform& transform)
      : of_(transform),
        bags_(of_.features_.size()),
        numbers_(of_.dense_dim_),
        keys_(new int64_t[of_.most_keys_]) {
    values_.reserve(of_.features_.size());
    size_t first_key = 0;
    for (size_t i = 0; i < of_.features_.size(); ++i) {
      values_.emplace_back(i, of_.features_[i], of_.columns_, of_.samples_, of_.rows_[i]);
      if (of_.features_[i].kind == Feature::kDense) continue;
      bags_[i].keys = keys_.get() + first_key;
      first_key += of_.most_keys_of(i);
    }
  }

  // Make the keys and the dense numbers, feature by feature. Features with the fewest rows come first.
  void read() {
    std::vector<size_t> sizes(of_.rows_);
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    for (const size_t rows : sizes) {
      for (size_t i = 0; i < values_.size(); ++i)
        if (of_.features_[i].kind == Feature::kDense && of_.rows_[i] == rows) set_numbers(i);
      for (size_t begin = 0; begin < rows; begin += kBlockRows)
        for (const Transform::Slot& slot : of_.slots_)
          if (slot.rows == rows && slot.value == 0)
            values_[slot.feature].add_rows(begin, std::min(rows, begin + kBlockRows), bags_[slot.feature]);
    }
  }

  Transform::Counts write(const Transform::Out& out) const {
    Transform::Counts counts;
    write_dense(out.dense);
    int64_t* keys = out.keys;
    int32_t* row_ptrs = out.row_ptrs;
    for (size_t t = 0; t < of_.tables_.size(); ++t) {
      const Transform::Table& table = of_.tables_[t];
      size_t most = 0;
      *row_ptrs = 0;
      for (const Transform::Group& group : table.groups)
        most += has_one_each(group) ? write_one_each(group, keys, row_ptrs) : write_bags(group, keys, row_ptrs);
      keys += *row_ptrs++;
      counts.most_keys.push_back(static_cast<int64_t>(most));
      if (of_.has_bags(t)) write_places(table, out.bags[t]);
    }
    counts.keys = static_cast<size_t>(keys - out.keys);
    for (const FeatureValues& of_feature : values_) {
      counts.known.push_back(of_feature.known());
      counts.unknown.push_back(of_feature.unknown());
    }
    return counts;
  }

 private:
  void set_numbers(size_t feature) {
    const Feature& of = of_.features_[feature];
    if (of.weighs == SIZE_MAX) values_[feature].set_numbers(numbers_[of.place]);
    else values_[feature].set_weights(values_[of.weighs], &numbers_[of.place]);
  }

  // Write the dense numbers: those that samples share are copied from sample to sample.
  void write_dense(float* dense) const {
    const size_t samples = of_.samples_.count, width = numbers_.size();
    std::vector<float> shared(width);
    const auto is_shared = [samples](const std::vector<float>& numbers) { return numbers.size() < samples; };
    const bool has_shared = std::any_of(numbers_.begin(), numbers_.end(), is_shared);
    for (size_t sample = 0; has_shared && sample < samples; ++sample) {
      if (!sample || of_.samples_.user(sample) != of_.samples_.user(sample - 1))
        for (size_t i = 0; i < width; ++i)
          if (is_shared(numbers_[i])) shared[i] = numbers_[i][of_.samples_.row(sample, numbers_[i].size())];
      std::copy(shared.begin(), shared.end(), dense + sample * width);
    }
    for (size_t i = 0; i < width; ++i)
      for (size_t sample = 0; !is_shared(numbers_[i]) && sample < samples; ++sample)
        dense[sample * width + i] = numbers_[i][sample];
  }

  // Whether each bag has one key.
  bool has_one_each(const Transform::Group& group) const {
    return std::all_of(group.slots.begin(), group.slots.end(), [this](size_t place) {
      const Transform::Slot& slot = of_.slots_[place];
      return slot.value == 0 && slot.is_last && bags_[slot.feature].ends.empty();
    });
  }

  // Append the keys and the offsets of a group, row by row. `keys` are the table's, and `row_ptrs` is the last offset
  // so far. Both return the most keys of a row.
  size_t write_one_each(const Transform::Group& group, int64_t* keys, int32_t*& row_ptrs) const {
    const size_t slots = group.slots.size(), first = static_cast<size_t>(*row_ptrs);
    for (size_t begin = 0; begin < group.rows; begin += kBlockRows) {
      const size_t end = std::min(group.rows, begin + kBlockRows);
      for (size_t i = 0; i < slots; ++i) {
        const int64_t* const from = bags_[of_.slots_[group.slots[i]].feature].keys;
        int64_t* key = keys + first + begin * slots + i;
        for (size_t row = begin; row < end; ++row, key += slots) *key = from[row];
      }
    }
    for (size_t bag = 1; bag <= group.rows * slots; ++bag) row_ptrs[bag] = static_cast<int32_t>(first + bag);
    row_ptrs += group.rows * slots;
    return slots;
  }

  size_t write_bags(const Transform::Group& group, int64_t* keys, int32_t*& row_ptrs) const {
    size_t most = 0;
    for (size_t row = 0; row < group.rows; ++row) {
      const int32_t first = *row_ptrs;
      for (const size_t place : group.slots) {
        const Transform::Slot& slot = of_.slots_[place];
        const Bags& bags = bags_[slot.feature];
        const auto [begin, end] = bags.of_row(row);
        const size_t from = std::min(begin + slot.value, end), to = slot.is_last ? end : std::min(from + 1, end);
        std::copy(bags.keys + from, bags.keys + to, keys + *row_ptrs);
        row_ptrs[1] = *row_ptrs + static_cast<int32_t>(to - from);
        ++row_ptrs;
      }
      most = std::max(most, static_cast<size_t>(*row_ptrs - first));
    }
    return most;
  }

  // Write the bag of each slot of each sample: the next sample's is the same, or some bags further on.
  void write_places(const Transform::Table& table, int32_t* places) const {
    std::vector<int32_t> bags(table.slots), of_sample(table.slots), of_user(table.slots);
    int32_t begin = 0;
    for (const Transform::Group& group : table.groups) {
      const auto slots = static_cast<int32_t>(group.slots.size());
      std::vector<int32_t>& steps = group.rows == of_.samples_.count ? of_sample : of_user;
      for (int32_t i = 0; i < slots; ++i) {
        const size_t slot = group.slots[static_cast<size_t>(i)] - table.first_slot;
        bags[slot] = begin + i;
        if (group.rows > 1) steps[slot] = slots;
      }
      begin += static_cast<int32_t>(group.rows) * slots;
    }
    for (size_t sample = 0; sample < of_.samples_.count; ++sample, places += table.slots) {
      if (sample && of_.samples_.user(sample) != of_.samples_.user(sample - 1)) add(of_user, bags.data());
      std::copy(bags.begin(), bags.end(), places);
      add(of_sample, bags.data());
    }
  }

  static void add(const std::vector<int32_t>& steps, int32_t* numbers) {
    for (size_t i = 0; i < steps.size(); ++i) numbers[i] += steps[i];
  }

  const Transform& of_;
  std::vector<FeatureValues> values_;
  std::vector<Bags> bags_;                   // of each feature
  std::vector<std::vector<float>> numbers_;  // of each dense number, row by row
  const std::unique_ptr<int64_t[]> keys_;
};

Transform::Transform(const std::vector<Feature>& features, const std::vector<Column>& columns, const Samples& samples,
                     const std::vector<size_t>& tables, size_t dense_dim)
    : features_(features), columns_(columns), samples_(samples), dense_dim_(dense_dim) {
  slots_.resize(std::accumulate(tables.begin(), tables.end(), size_t{0}));
  for (size_t i = 0; i < features.size(); ++i) {
    const Feature& feature = features[i];
    size_t rows = columns[feature.column].rows;
    for (const CrossPart& part : feature.parts) rows = std::max(rows, columns[part.column].rows);
    if (feature.weighs != SIZE_MAX) rows = std::max(rows, columns[features[feature.weighs].column].rows);
    rows_.push_back(rows);
    if (feature.kind == Feature::kDense) continue;
    for (size_t value = 0; value < feature.slots; ++value)
      slots_[feature.place + value] = {i, rows, value, value + 1 == feature.slots};
    most_keys_ += most_keys_of(i);
    if (most_keys_ > INT32_MAX) throw TransformFault{i, 0, 0, kTooMany};
  }
  size_t first = 0;
  for (const size_t slots : tables) {
    Table table{first, slots, {}};
    std::vector<size_t> order(slots);
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return slots_[a].rows < slots_[b].rows; });
    for (const size_t slot : order) {
      if (table.groups.empty() || table.groups.back().rows != slots_[slot].rows)
        table.groups.push_back({slots_[slot].rows, {}});
      table.groups.back().slots.push_back(slot);
    }
    tables_.push_back(std::move(table));
    first += slots;
  }
}

size_t Transform::most_keys_of(size_t feature) const {
  const Feature& of = features_[feature];
  const Column& column = columns_[of.column];
  const size_t rows = rows_[feature];
  if (!column.has_lists || !rows) return rows;
  const size_t values = of.most_values > column.count / rows ? column.count : rows * of.most_values;
  return values + (column.fill ? rows : 0);
}

size_t Transform::bags(size_t table) const {
  size_t bags = 0;
  for (const Group& group : tables_[table].groups) bags += group.rows * group.slots.size();
  return bags;
}

bool Transform::has_bags(size_t table) const {
  const std::vector<Group>& groups = tables_[table].groups;
  return groups.size() > 1 || (groups.size() == 1 && groups[0].rows != samples_.count);
}

Transform::Counts Transform::run(const Out& out) const {
  TransformRun run(*this);
  run.read();
  return run.write(out);
}

}  // namespace hotrow
