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
// its first slot, or of a dense feature its column.
struct Feature {
  enum Kind { kHash, kVocabulary, kBucketize, kIdentity, kCross, kDense };
  enum Keep { kAll, kFirst, kLast };

  Kind kind = kIdentity;
  size_t column = 0;
  std::vector<CrossPart> parts;  // of a cross
  size_t place = 0;
  size_t slots = 1;  // several: the values of a list have slots of their own, and are no more than these
  size_t weighs = SIZE_MAX;  // a dense feature with a list has one number for each key of this feature, and `slots` places

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
  size_t feature, row, value;
  const char* why;
};

// B samples of several users. A column has a row for each sample, a row for each user, or one row for all samples.
struct Samples {
  size_t count = 0;                    // B
  const int32_t* user_of = nullptr;    // [B], ascending; null: there is one user

  int32_t user(size_t sample) const { return user_of ? user_of[sample] : 0; }
  // The row of a sample in a column, or in a slot, of so many rows.
  size_t row(size_t sample, size_t rows) const {
    if (rows == count) return sample;
    return rows == 1 ? 0 : static_cast<size_t>(user(sample));
  }
};

// The features of B samples: keys by table, and dense numbers.
//
// A slot has as many rows as the columns that it is made of, and a bag of each row. The bags of a table are those of
// its slots with the fewest rows, row by row, and then those of its slots with more rows. So without columns that
// samples share, a table has a bag for each slot of each sample, sample-major.
class Transform {
 public:
  // Where the results go.
  struct Out {
    float* dense;                // [B, F]
    int64_t* keys;               // [N], table after table; there is room for most_keys()
    int32_t* row_ptrs;           // one CSR per table, each from 0, table after table
    std::vector<int32_t*> bags;  // of each table that has_bags(): the bag of each slot of each sample, [B * S]
  };

  // What run() has counted.
  struct Counts {
    size_t keys = 0;
    std::vector<int64_t> most_keys;  // of each table: no sample has more
    std::vector<int64_t> known, unknown;  // of each feature: values that its vocabulary has, and does not have
  };

  // `tables` has the slots of each table. There is a feature for each slot and each dense number. The caller has
  // checked the columns and their rows.
  Transform(const std::vector<Feature>& features, const std::vector<Column>& columns, const Samples& samples,
            const std::vector<size_t>& tables, size_t dense_dim);

  size_t most_keys() const { return most_keys_; }
  size_t bags(size_t table) const;
  // Whether samples share bags of the table.
  bool has_bags(size_t table) const;

  // Throws TransformFault. Any thread may call it.
  Counts run(const Out& out) const;

 private:
  friend class TransformRun;
  // A slot, and which values of its feature it has.
  struct Slot {
    size_t feature, rows, value;
    bool is_last;  // it has all values from there on
  };
  // The slots of a table that have the same number of rows.
  struct Group {
    size_t rows;
    std::vector<size_t> slots;
  };
  struct Table {
    size_t first_slot, slots;
    std::vector<Group> groups;
  };

  // How many keys a feature has at most.
  size_t most_keys_of(size_t feature) const;

  const std::vector<Feature>& features_;
  const std::vector<Column>& columns_;
  const Samples samples_;
  const size_t dense_dim_;
  std::vector<size_t> rows_;  // of each feature
  std::vector<Slot> slots_;
  std::vector<Table> tables_;
  size_t most_keys_ = 0;
};

}  // namespace hotrow
