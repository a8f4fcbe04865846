// Random values through every kind of feature, and damaged vocabularies, for the sanitizers. Exits 0 if nothing was read
// outside of the values, and if several threads got the same keys from one transform.
//
//   features_stress <rounds> <file for vocabularies>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "features/json_numbers.hpp"
#include "features/tensors.hpp"
#include "features/transform.hpp"

using namespace hotrow;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// A text in memory of its own: a sanitizer sees each byte that is read behind it.
struct OwnText {
  explicit OwnText(const std::string& text) : bytes(new char[text.size()]), size(text.size()) {
    std::memcpy(bytes.get(), text.data(), size);
  }
  std::string_view view() const { return {bytes.get(), size}; }
  std::unique_ptr<char[]> bytes;
  size_t size;
};

std::string random_text(std::mt19937_64& random, size_t most) {
  std::string text(random() % (most + 1), 'x');
  const bool is_ascii = random() % 2;
  for (char& letter : text) letter = static_cast<char>(is_ascii ? 'a' + random() % 26 : random());
  return text;
}

void hash_texts_of_every_length(std::mt19937_64& random) {
  for (size_t length = 0; length < 300; ++length) {
    std::string text(length, 'x');
    for (char& letter : text) letter = static_cast<char>(random());
    const OwnText own(text);
    require(fingerprint64(own.view()) == fingerprint64(text), "fingerprint64");
    require(siphash64(own.view(), 1, 2) == siphash64(text, 1, 2), "siphash64");
    require(murmur3_64(own.view()) == murmur3_64(text), "murmur3_64");
    require(xxh64(own.view()) == xxh64(text), "xxh64");
    require(is_utf8(own.view()) == is_utf8(text), "is_utf8");
    require(!is_ascii(text) || is_utf8(text), "ASCII is UTF-8");
    for (char& letter : text) letter = "\"\\0123-e., a"[random() % 13];
    const OwnText json(text);
    const JsonNumbers numbers = json_numbers(json.view(), false);
    require(numbers.form.size() + 17 * numbers.numbers.size() >= length, "json_numbers");
    TextPlaces found;
    find_texts(own.view().data(), length, random() % 20, found);
    for (size_t i = 0; i < found.ends.size(); ++i)
      require(found.begins[i] <= found.ends[i] && found.ends[i] <= static_cast<int64_t>(length), "find_texts");
  }
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
}

// A damaged vocabulary is refused, or it has some place for each text.
void read_damaged_vocabularies(std::mt19937_64& random, const std::string& path) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < 50; ++i) texts.push_back("text" + std::to_string(i) + random_text(random, 9));
  const std::string whole = Vocabulary::file_of({texts.begin(), texts.end()});
  write_file(path, whole);
  {
    const Vocabulary vocabulary(path);
    for (size_t i = 0; i < texts.size(); ++i) require(vocabulary.find(texts[i]) == static_cast<int64_t>(i), "find");
    require(vocabulary.find("absent") == -1, "an absent text");
  }
  for (int round = 0; round < 40; ++round) {
    std::string damaged = whole;
    for (int flips = 0; flips < 3; ++flips) damaged[random() % damaged.size()] = static_cast<char>(random());
    if (random() % 4 == 0) damaged.resize(random() % damaged.size());
    const std::string other = path + ".damaged";
    write_file(other, damaged);
    try {
      const Vocabulary vocabulary(other);
      for (const std::string& text : texts) require(vocabulary.find(text) < 1000, "a place of a damaged vocabulary");
    } catch (const FileFault&) {
    }
  }
}

struct Texts {
  std::string bytes;
  std::vector<int64_t> begins, ends;
  void add(const std::string& text) {
    begins.push_back(static_cast<int64_t>(bytes.size()));
    bytes += text;
    ends.push_back(static_cast<int64_t>(bytes.size()));
  }
};

// What a transform makes, in memory that is no larger than it says.
struct Made {
  std::vector<float> dense;
  std::vector<int64_t> keys;
  std::vector<int32_t> row_ptrs;
  std::vector<std::vector<int32_t>> bags;

  Made(const Transform& transform, size_t samples, const std::vector<size_t>& tables, size_t dense_dim)
      : dense(samples * dense_dim), keys(transform.most_keys()) {
    size_t offsets = 0;
    std::vector<int32_t*> places;
    bags.reserve(tables.size());
    for (size_t t = 0; t < tables.size(); ++t) {
      offsets += transform.bags(t) + 1;
      bags.emplace_back(transform.has_bags(t) ? samples * tables[t] : 0);
      places.push_back(bags.back().data());
    }
    row_ptrs.resize(offsets);
    const Transform::Counts counts = transform.run({dense.data(), keys.data(), row_ptrs.data(), places});
    keys.resize(counts.keys);
    size_t first = 0, all = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      const size_t count = transform.bags(t);
      require(row_ptrs[first] == 0, "row_ptrs");
      for (size_t bag = 0; bag < count; ++bag) require(row_ptrs[first + bag] <= row_ptrs[first + bag + 1], "row_ptrs");
      for (const int32_t bag : bags[t]) require(static_cast<size_t>(bag) < count, "bags");
      all += static_cast<size_t>(row_ptrs[first + count]);
      first += count + 1;
    }
    require(all == keys.size(), "keys");
  }
  bool operator==(const Made& other) const {
    return dense == other.dense && keys == other.keys && row_ptrs == other.row_ptrs && bags == other.bags;
  }
};

// Features of columns that samples share, in any way, from one transform in several threads.
void transform_in_threads(std::mt19937_64& random, const std::string& path) {
  const size_t users = 1 + random() % 4;
  std::vector<int32_t> user_of;
  for (size_t user = 0; user < users; ++user)
    user_of.insert(user_of.end(), 1 + random() % 200, static_cast<int32_t>(user));
  const size_t samples = user_of.size();
  const auto some_rows = [&] {
    const size_t rows[] = {1, users, samples};
    return rows[random() % 3];
  };
  std::vector<Column> columns(5);
  for (Column& column : columns) column.rows = column.count = some_rows();
  Texts single, many;
  std::vector<int64_t> splits = {0}, integers(samples);
  std::vector<float> floats(samples);
  std::vector<uint8_t> valid(samples);
  for (size_t i = 0; i < columns[0].rows; ++i)
    single.add(std::string(random() % 20, static_cast<char>('a' + random() % 26)));
  for (size_t i = 0; i < columns[1].rows; ++i) {
    for (size_t values = random() % 5; values; --values) many.add("text" + std::to_string(random() % 99));
    splits.push_back(static_cast<int64_t>(many.ends.size()));
  }
  for (size_t i = 0; i < samples; ++i) {
    integers[i] = static_cast<int64_t>(random() % 1000);
    floats[i] = static_cast<float>(random() % 100);
    valid[i] = random() % 4 != 0;
  }
  const auto text = [](Column& column, const Texts& texts) {
    column.count = texts.ends.size();
    column.text = texts.bytes.data();
    column.begins = texts.begins.data();
    column.ends = texts.ends.data();
  };
  text(columns[0], single);
  text(columns[1], many);
  columns[1].splits = splits.data();
  columns[1].has_lists = true;
  columns[2].kind = ValueKind::kInteger;
  columns[2].integers = integers.data();
  columns[2].valid = random() % 2 ? valid.data() : nullptr;
  columns[3].kind = ValueKind::kFloat;
  columns[3].floats = floats.data();
  columns[3].valid = valid.data();
  const std::vector<float> weights(many.ends.size(), 0.5f);
  columns[4] = columns[1];
  columns[4].kind = ValueKind::kFloat;
  columns[4].floats = weights.data();
  const Fill fill = {ValueKind::kFloat, "", 0, 15}, text_fill = {ValueKind::kText, "filled", 0, 0};
  columns[3].fill = &fill;
  if (random() % 4 == 0) columns[1].fill = &text_fill;
  std::vector<Feature> features(8);
  features[0].kind = Feature::kHash;
  features[0].buckets = Buckets(1 + random() % 100000);
  features[1].kind = Feature::kVocabulary;
  features[1].column = 1;
  features[1].place = 1;
  features[1].vocabulary = std::make_shared<const Vocabulary>(path);
  features[1].unknown_buckets = Buckets(random() % 3);
  features[1].most_values = 1 + random() % 4;
  features[1].keep = Feature::kLast;
  features[2].column = 2;
  features[2].place = 2;
  features[3].kind = Feature::kBucketize;
  features[3].column = 3;
  features[3].place = 3;
  features[3].boundaries = {10, 20, 50};
  features[4].kind = Feature::kCross;
  features[4].place = 4;
  features[4].parts = {{0, {}, true}, {2, {}, random() % 2 == 0}, {3, {10, 20}, false}};
  features[5].kind = Feature::kHash;
  features[5].column = 1;
  features[5].place = 5;
  features[5].slots = 3;
  features[5].most_values = 3;
  features[5].keep = Feature::kFirst;
  features[6].kind = Feature::kDense;
  features[6].column = 3;
  features[7].kind = Feature::kDense;
  features[7].column = 4;
  features[7].place = 1;
  features[7].weighs = 5;
  features[7].slots = features[7].most_values = 3;
  features[7].keep = Feature::kFirst;
  const std::vector<size_t> tables = random() % 2 ? std::vector<size_t>{8} : std::vector<size_t>{1, 4, 3};
  const Transform transform(features, columns, {samples, user_of.data()}, tables, 4);
  try {
    const Made expected(transform, samples, tables, 4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] {
        require(Made(transform, samples, tables, 4) == expected, "another thread got other keys");
      });
    for (std::thread& thread : threads) thread.join();
  } catch (const TransformFault&) {
    require(columns[1].fill, "a weight for each key");  // the fill is a key without a weight
  }
}

// Random bytes as tensors: each in memory of its own, at any alignment.
void read_random_tensors(std::mt19937_64& random) {
  for (int round = 0; round < 200; ++round) {
    const size_t padding = random() % 9;
    std::string bytes(random() % 64, 0);
    for (char& byte : bytes) byte = static_cast<char>(random() % 3 ? random() % 5 : random());
    const OwnText own(std::string(padding, 'x') + bytes);
    Tensor values;
    values.datatype = static_cast<Datatype>(random() % 5);
    values.bytes = own.view().substr(padding);
    values.count = values.datatype == Datatype::kBytes ? random() % 20 : bytes.size() / item_bytes(values.datatype);
    if (!values.has_right_size() || values.read() != values.count) continue;
    const OwnText own_offsets(std::string(4 * (1 + random() % 5), static_cast<char>(random() % 2)));
    Tensor offsets;
    offsets.datatype = Datatype::kInt32;
    offsets.count = own_offsets.size / 4;
    offsets.bytes = own_offsets.view();
    TensorColumn tensor{0, &values, random() % 2 == 0, nullptr};
    Column column;
    column.kind = kind_of(values.datatype);
    column.count = column.rows = values.count;
    if (tensor.has_lists && random() % 2) {
      tensor.offsets = &offsets;
      column.rows = offsets.count - 1;
    }
    TensorMemory memory;
    try {
      read_tensor(tensor, column, memory);
    } catch (const TensorFault&) {
      continue;
    }
    for (size_t at = 0; at < column.count; ++at)
      if (!column.is_missing(at)) is_utf8(column.value(at).text);
    if (column.splits) require(column.splits[column.rows] == static_cast<int64_t>(column.count), "splits");
  }
}

}  // namespace

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  const std::string path = arguments[2];
  std::mt19937_64 random(0);
  for (int round = 0; round < rounds; ++round) {
    hash_texts_of_every_length(random);
    read_damaged_vocabularies(random, path);
    transform_in_threads(random, path);
    read_random_tensors(random);
  }
  std::printf("%d rounds\n", rounds);
}
