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

void transform_in_threads(std::mt19937_64& random, const std::string& path) {
  const size_t samples = 1 + random() % 600;
  Texts single, many;
  std::vector<int64_t> splits = {0}, integers(samples);
  std::vector<float> floats(samples);
  std::vector<uint8_t> valid(samples);
  for (size_t i = 0; i < samples; ++i) {
    single.add(std::string(random() % 20, static_cast<char>('a' + random() % 26)));
    for (size_t values = random() % 5; values; --values) many.add("text" + std::to_string(random() % 99));
    splits.push_back(static_cast<int64_t>(many.ends.size()));
    integers[i] = static_cast<int64_t>(random() % 1000);
    floats[i] = static_cast<float>(random() % 100);
    valid[i] = random() % 4 != 0;
  }
  std::vector<Column> columns(4);
  const auto text = [](Column& column, const Texts& texts) {
    column.count = texts.ends.size();
    column.text = texts.bytes.data();
    column.begins = texts.begins.data();
    column.ends = texts.ends.data();
  };
  text(columns[0], single);
  text(columns[1], many);
  columns[1].splits = splits.data();
  columns[2] = {ValueKind::kInteger, samples, nullptr, nullptr, nullptr, integers.data(), nullptr, valid.data(), nullptr};
  columns[3] = {ValueKind::kFloat, samples, nullptr, nullptr, nullptr, nullptr, floats.data(), valid.data(), nullptr};
  const Fill fill = {ValueKind::kFloat, "", 0, 15};
  columns[3].fill = &fill;
  std::vector<Feature> features(6);
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
  features[5].kind = Feature::kDense;
  features[5].column = 3;
  const Transformed expected = transform(features, columns, samples, 5, 1);
  require(expected.row_ptrs.back() == static_cast<int32_t>(expected.keys.size()), "row_ptrs");
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      const Transformed found = transform(features, columns, samples, 5, 1);
      require(found.keys == expected.keys && found.row_ptrs == expected.row_ptrs && found.dense == expected.dense,
              "another thread got other keys");
    });
  for (std::thread& thread : threads) thread.join();
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
  }
  std::printf("%d rounds\n", rounds);
}
