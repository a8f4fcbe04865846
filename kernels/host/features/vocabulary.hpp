// A vocabulary: a list of distinct texts, and the place of a text in the list.
//
// The file, little-endian, is mapped and shared by all processes that read it:
//
//   char[8]      "HRVOCAB1"
//   uint64       N, the number of texts
//   uint64       B, the number of buckets: a power of two, at least 2 N
//   uint64       T, the bytes of all texts
//   uint64[N+1]  where each text begins among the bytes, and T
//   uint32[B]    1 + the place of a text, or 0; a text is in the first free bucket from fingerprint64 % B on
//   char[T]      the texts, one after another
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "features/hashes.hpp"
#include "memory/mapped_file.hpp"

namespace hotrow {

// A text that is in a list twice.
struct RepeatedText {
  uint64_t first, second;
};

class Vocabulary {
 public:
  static constexpr uint64_t kMostTexts = (uint64_t{1} << 31) - 1;

  // Maps the file at `path`, and checks its sizes. Throws FileFault. What is read later is checked then, so opening
  // takes no longer for a large file, and a damaged file leads to no other memory.
  explicit Vocabulary(const std::string& path);

  // The place of a text; -1: the vocabulary does not have it.
  int64_t find(std::string_view text) const {
    uint64_t bucket = fingerprint64(text) & mask_;
    for (uint64_t tries = 0; tries <= mask_; ++tries, bucket = (bucket + 1) & mask_) {
      const uint32_t place = buckets_[bucket];
      if (place == 0 || place > count_) return -1;
      if (text == this->text(place - 1)) return place - 1;
    }
    return -1;
  }

  std::string_view text(uint64_t place) const {
    const uint64_t begin = begins_[place], end = begins_[place + 1];
    if (begin > end || end > text_bytes_) return {};
    return {texts_ + begin, static_cast<size_t>(end - begin)};
  }
  uint64_t count() const { return count_; }
  size_t bytes() const { return file_.bytes(); }

  // The bytes of the file of some texts. Throws RepeatedText.
  static std::string file_of(const std::vector<std::string_view>& texts);

 private:
  const MappedFile file_;
  uint64_t count_, mask_, text_bytes_;
  const uint64_t* begins_;
  const uint32_t* buckets_;
  const char* texts_;
};

}  // namespace hotrow
