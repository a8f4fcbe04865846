#include "features/transform.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace hotrow {
namespace {

constexpr int64_t kLargestKey = INT64_MAX - 2, kSmallestKey = INT64_MIN + 2;
constexpr uint64_t kCrossSeed = 0xDECAFCAFFE;  // TensorFlow's
// Samples are transformed in blocks of this size: feature by feature, and then put in the order of samples.
constexpr size_t kBlockSamples = 256;
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

// The keys of one feature for a block of samples.
struct Bags {
  std::vector<int64_t> keys;
  std::vector<uint32_t> ends;  // of each sample's keys; empty: each sample has one key

  void clear() {
    keys.clear();
    ends.clear();
  }
};

// Makes the keys or the numbers of one feature.
class FeatureValues {
 public:
  FeatureValues(size_t number, const Feature& feature, const std::vector<Column>& columns)
      : number_(number), feature_(feature), columns_(columns), column_(columns[feature.column]) {}

  int64_t known() const { return known_; }
  int64_t unknown() const { return unknown_; }

  // Put the keys of the samples from `begin` to `end` into `bags`.
  void add_block(size_t begin, size_t end, Bags& bags) {
    bags.clear();
    size_t sample = begin;
    if (feature_.kind == Feature::kHash && feature_.hash == Hash::kFarm && column_.kind == ValueKind::kText &&
        !column_.splits) {
      bags.keys.resize(end - begin);
      for (; sample < end && !column_.is_missing(sample); ++sample) {
        const std::string_view text(column_.text + column_.begins[sample],
                                    static_cast<size_t>(column_.ends[sample] - column_.begins[sample]));
        require(is_utf8(text), sample, sample, "is not UTF-8");
        bags.keys[sample - begin] = bucket_of(fingerprint64(text), feature_);
      }
      bags.keys.resize(sample - begin);
    }
    if (sample < end) {
      for (size_t i = 0; i < sample - begin; ++i) bags.ends.push_back(static_cast<uint32_t>(i + 1));
      for (; sample < end; ++sample) {
        add_keys(sample, bags.keys);
        require(bags.keys.size() <= INT32_MAX, sample, 0, kTooMany);
        bags.ends.push_back(static_cast<uint32_t>(bags.keys.size()));
      }
    }
  }

  // Append the keys of a sample.
  void add_keys(size_t sample, std::vector<int64_t>& keys) {
    if (feature_.kind == Feature::kCross) return add_cross(sample, keys);
    const auto [begin, end] = values_of(sample);
    const Fill* const fill = column_.fill;
    if (begin == end && fill) return add_key(sample, begin, fill->value(), fill->kind, keys);
    for (size_t at = begin; at < end; ++at) {
      if (!column_.is_missing(at)) add_key(sample, at, column_.value(at), column_.kind, keys);
      else if (fill) add_key(sample, at, fill->value(), fill->kind, keys);
    }
  }

  float number(size_t sample) {
    const auto [begin, end] = values_of(sample);
    const bool is_missing = begin == end || column_.is_missing(begin);
    require(!is_missing || column_.fill, sample, begin, "is missing");
    const Value value = is_missing ? column_.fill->value() : column_.value(begin);
    const ValueKind kind = is_missing ? column_.fill->kind : column_.kind;
    float single = kind == ValueKind::kInteger ? static_cast<float>(value.integer) : value.number;
    require(std::isfinite(single), sample, begin, "is infinite");
    if (feature_.lowest < feature_.highest) single = std::min(std::max(single, feature_.lowest), feature_.highest);
    double number = single;
    if (feature_.takes_log) {
      require(number > -1, sample, begin, "has no logarithm");
      number = std::log1p(number);
    }
    single = static_cast<float>((number - feature_.mean) / feature_.scale);
    require(std::isfinite(single), sample, begin, "is too large");
    return single;
  }

 private:
  void require(bool is_right, size_t sample, size_t at, const char* why) const {
    if (!is_right) throw TransformFault{number_, sample, at, why};
  }

  // Which values of the column are the sample's.
  std::pair<size_t, size_t> values_of(size_t sample) const {
    if (!column_.splits) return {sample, sample + 1};
    size_t begin = static_cast<size_t>(column_.splits[sample]), end = static_cast<size_t>(column_.splits[sample + 1]);
    if (end - begin > feature_.most_values) {
      require(feature_.keep != Feature::kAll, sample, begin, "has too many values");
      if (feature_.keep == Feature::kFirst) end = begin + feature_.most_values;
      else begin = end - feature_.most_values;
    }
    return {begin, end};
  }

  void add_cross(size_t sample, std::vector<int64_t>& keys) const {
    uint64_t hash = kCrossSeed;
    for (const CrossPart& part : feature_.parts) {
      const Column& column = columns_[part.column];
      const bool is_missing = column.is_missing(sample);
      if (is_missing && !column.fill) return;
      const Value value = is_missing ? column.fill->value() : column.value(sample);
      const ValueKind kind = is_missing ? column.fill->kind : column.kind;
      if (kind == ValueKind::kText) require(is_utf8(value.text), sample, sample, "is not UTF-8");
      hash = cross(hash, part.is_text              ? fingerprint64(Text(value, kind).view())
                         : part.boundaries.empty() ? static_cast<uint64_t>(value.integer)
                                                   : place_among(part.boundaries, value, kind));
    }
    keys.push_back(bucket_of(hash, feature_));
  }

  void add_key(size_t sample, size_t at, const Value& value, ValueKind kind, std::vector<int64_t>& keys) {
    if (kind == ValueKind::kText) require(is_utf8(value.text), sample, at, "is not UTF-8");
    switch (feature_.kind) {
      case Feature::kHash: keys.push_back(bucket_of(hash_of(feature_, Text(value, kind).view()), feature_)); return;
      case Feature::kVocabulary: return add_place(Text(value, kind).view(), keys);
      case Feature::kBucketize:
        keys.push_back(feature_.offset + static_cast<int64_t>(place_among(feature_.boundaries, value, kind)));
        return;
      default: break;
    }
    const int64_t key = value.integer;
    const uint64_t size = feature_.buckets.count();
    require(!size || static_cast<uint64_t>(key) < size, sample, at, "is outside of its range");
    require(key >= kSmallestKey && key <= kLargestKey, sample, at, "is reserved");
    keys.push_back(feature_.offset + key);
  }

  void add_place(std::string_view text, std::vector<int64_t>& keys) {
    const int64_t place = feature_.vocabulary->find(text);
    const Buckets& unknown = feature_.unknown_buckets;
    ++(place < 0 ? unknown_ : known_);
    if (place < 0 && !unknown.count()) return;
    const uint64_t key = place < 0 ? unknown.remainder(fingerprint64(text)) : unknown.count() + static_cast<uint64_t>(place);
    keys.push_back(feature_.offset + static_cast<int64_t>(key));
  }

  const size_t number_;
  const Feature& feature_;
  const std::vector<Column>& columns_;
  const Column& column_;
  int64_t known_ = 0, unknown_ = 0;
};

// Where the keys of a sample of the block begin and end.
std::pair<size_t, size_t> of_sample(const Bags& bags, size_t sample) {
  if (bags.ends.empty()) return {sample, sample + 1};
  return {sample ? bags.ends[sample - 1] : 0, bags.ends[sample]};
}

}  // namespace

Transformed transform(const std::vector<Feature>& features, const std::vector<Column>& columns, size_t samples,
                      size_t slots, size_t dense_dim) {
  Transformed out;
  out.dense.resize(samples * dense_dim);
  out.row_ptrs.resize(samples * slots + 1);
  out.keys.reserve(samples * slots);
  std::vector<FeatureValues> values;
  std::vector<size_t> of_slot(slots);
  values.reserve(features.size());
  for (size_t i = 0; i < features.size(); ++i) {
    values.emplace_back(i, features[i], columns);
    if (features[i].kind != Feature::kDense) of_slot[features[i].place] = i;
  }
  for (size_t i = 0; i < features.size(); ++i)
    if (features[i].kind == Feature::kDense)
      for (size_t sample = 0; sample < samples; ++sample)
        out.dense[sample * dense_dim + features[i].place] = values[i].number(sample);
  std::vector<Bags> bags(slots);
  size_t bag = 0;
  for (size_t begin = 0; begin < samples; begin += kBlockSamples) {
    const size_t end = std::min(samples, begin + kBlockSamples);
    size_t keys = out.keys.size();
    bool has_one_each = true;
    for (size_t slot = 0; slot < slots; ++slot) {
      values[of_slot[slot]].add_block(begin, end, bags[slot]);
      keys += bags[slot].keys.size();
      has_one_each &= bags[slot].ends.empty();
    }
    if (keys > INT32_MAX) throw TransformFault{of_slot[0], begin, 0, kTooMany};
    size_t at = out.keys.size();
    out.keys.resize(keys);
    for (size_t slot = 0; has_one_each && slot < slots; ++slot) {
      int64_t* key = out.keys.data() + at + slot;
      for (const int64_t of_sample : bags[slot].keys) *key = of_sample, key += slots;
    }
    for (size_t sample = 0; sample < end - begin; ++sample)
      for (size_t slot = 0; slot < slots; ++slot) {
        const auto [first, last] = has_one_each ? std::pair(sample, sample + 1) : of_sample(bags[slot], sample);
        const int64_t* const from = bags[slot].keys.data();
        if (!has_one_each) std::copy(from + first, from + last, out.keys.data() + at);
        at += last - first;
        out.row_ptrs[++bag] = static_cast<int32_t>(at);
      }
  }
  for (const FeatureValues& of_feature : values) {
    out.known.push_back(of_feature.known());
    out.unknown.push_back(of_feature.unknown());
  }
  return out;
}

}  // namespace hotrow
