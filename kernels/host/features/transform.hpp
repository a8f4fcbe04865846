// From the raw features of samples to keys and dense numbers. Training and serving run this code.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "features/values.hpp"
#include "features/vocabulary.hpp"

namespace hotrow {

enum class Hash { kFarm, kSip, kMurmur3, kXxh64 };

// One of the values that a cross joins: a text, an integer, or the number of boundaries that are at most a number.
struct CrossPart {
  size_t column;
  std::vector<float> boundaries;
  bool is_text;  // an integer of the column is its digits
};

// A number of buckets, and the remainder of a hash without a division.
class Buckets {
 public:
  Buckets() = default;
  explicit Buckets(uint64_t count) : count_(count), reciprocal_(count ? UINT64_MAX / count : 0) {}

  uint64_t count() const { return count_; }
  uint64_t remainder(uint64_t hash) const {
    const auto quotient = static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * reciprocal_ >> 64);
    const uint64_t rest = hash - quotient * count_;  // less than twice the count: the quotient is at most 1 too small
    return rest - (rest >= count_ ? count_ : 0);
  }

 private:
  uint64_t count_ = 0, reciprocal_ = 0;
};

// What a feature makes of a value. A value that stays missing has no key, and is a fault of a dense feature. `place` is
// its slot, or of a dense feature its column.
struct Feature {
  enum Kind { kHash, kVocabulary, kBucketize, kIdentity, kCross, kDense };
  enum Keep { kAll, kFirst, kLast };

  Kind kind = kIdentity;
  size_t column = 0;
  std::vector<CrossPart> parts;  // of a cross
  size_t place = 0;

  int64_t offset = 0;     // is added to each key
  Buckets buckets;        // of a hash or a cross; none: the low 63 bits. Of an identity: keys are less; none: any
  Hash hash = Hash::kFarm;
  uint64_t salt[2] = {0, 0};
  std::shared_ptr<const Vocabulary> vocabulary;
  Buckets unknown_buckets;  // before the vocabulary; none: an unknown value has no key
  std::vector<float> boundaries;

  size_t most_values = SIZE_MAX;  // of one sample
  Keep keep = kAll;               // of more values; kAll: more are a fault

  float lowest = 0, highest = 0;  // of a dense feature: the value is clipped, if lowest < highest
  bool takes_log = false;         // then log(1 + value)
  double mean = 0, scale = 1;     // then (value - mean) / scale
};

struct TransformFault {
  size_t feature, sample, value;
  const char* why;
};

// The features of B samples of S slots and F dense columns.
struct Transformed {
  std::vector<int64_t> keys;      // sample-major
  std::vector<int32_t> row_ptrs;  // [B * S + 1]
  std::vector<float> dense;       // [B, F]
  // Of each feature: values that its vocabulary has, and values that it does not have.
  std::vector<int64_t> known, unknown;
};

// Throws TransformFault.
Transformed transform(const std::vector<Feature>& features, const std::vector<Column>& columns, size_t samples,
                      size_t slots, size_t dense_dim);

}  // namespace hotrow
