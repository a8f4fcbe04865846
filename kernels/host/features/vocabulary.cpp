#include "features/vocabulary.hpp"

#include <cstring>

namespace hotrow {
namespace {

constexpr char kMagic[] = "HRVOCAB1";
constexpr size_t kHeadBytes = 32;

}  // namespace

Vocabulary::Vocabulary(const std::string& path) : file_(path) {
  const auto refuse = [&](const char* why) { throw FileFault{path, why}; };
  const char* data = reinterpret_cast<const char*>(file_.data());
  if (file_.bytes() < kHeadBytes || std::memcmp(data, kMagic, 8) != 0) refuse("expected a vocabulary of Hotrow");
  uint64_t head[3];
  std::memcpy(head, data + 8, sizeof head);
  const auto [count, buckets, text_bytes] = head;
  if (count > kMostTexts || buckets < 2 * count || buckets > 8 * count + 8 || (buckets & (buckets - 1)) || !buckets)
    refuse("damaged: the number of buckets does not fit");
  if (text_bytes > file_.bytes() || file_.bytes() != kHeadBytes + 8 * (count + 1) + 4 * buckets + text_bytes)
    refuse("damaged: the file has another size than its texts");
  count_ = count;
  mask_ = buckets - 1;
  begins_ = reinterpret_cast<const uint64_t*>(data + kHeadBytes);
  buckets_ = reinterpret_cast<const uint32_t*>(begins_ + count + 1);
  texts_ = reinterpret_cast<const char*>(buckets_ + buckets);
  text_bytes_ = text_bytes;
}

std::string Vocabulary::file_of(const std::vector<std::string_view>& texts) {
  uint64_t buckets = 1, text_bytes = 0;
  while (buckets < 2 * texts.size()) buckets *= 2;
  for (const std::string_view text : texts) text_bytes += text.size();
  const uint64_t head[3] = {texts.size(), buckets, text_bytes};
  std::vector<uint64_t> begins(texts.size() + 1);
  std::vector<uint32_t> places(buckets);
  for (size_t place = 0; place < texts.size(); ++place) {
    begins[place + 1] = begins[place] + texts[place].size();
    uint64_t bucket = fingerprint64(texts[place]) & (buckets - 1);
    for (; places[bucket]; bucket = (bucket + 1) & (buckets - 1))
      if (texts[places[bucket] - 1] == texts[place]) throw RepeatedText{places[bucket] - 1, place};
    places[bucket] = static_cast<uint32_t>(place + 1);
  }
  std::string file(kMagic, 8);
  file.reserve(kHeadBytes + 8 * begins.size() + 4 * buckets + text_bytes);
  file.append(reinterpret_cast<const char*>(head), sizeof head);
  file.append(reinterpret_cast<const char*>(begins.data()), 8 * begins.size());
  file.append(reinterpret_cast<const char*>(places.data()), 4 * buckets);
  for (const std::string_view text : texts) file.append(text);
  return file;
}

}  // namespace hotrow
