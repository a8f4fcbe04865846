// Packs a request of bags into one piece of memory, in the layout of kernels/cuda/bags.cuh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "lookup/split.hpp"

namespace hotrow {

// ``struct TableBags`` of kernels/cuda/bags.cuh.
struct TableBags {
  int64_t row_ptrs_at, keys_at, weights_at, first_float;
  uint32_t bags, first_item, item_bags, first_bag, first_position, keys, combiner;
  float max_norm;
};
static_assert(sizeof(TableBags) == 64, "as gpu_cache/bag_layout.py has it");

// What is the same in all requests for one table.
struct PackedTable {
  size_t slots;
  uint32_t combiner;
  float max_norm;
};

// One table's part of a request. The arrays are copied as bytes, once: they need not be aligned, and another thread may
// write to them meanwhile.
struct GivenBags {
  const int32_t* row_ptrs;  // [samples * slots + 1]
  const int64_t* keys;
  size_t key_count;
  const float* weights;  // or nullptr: every weight is 1
};

struct PackedSize {
  size_t items, bytes;
};

// The layout: TableBags[T], float32[max_samples, F] if there are dense features, then row_ptrs, keys and weights of all
// tables without gaps, except that the keys begin at a multiple of 16 bytes. A table whose bags all have equally many
// keys has no row_ptrs.
class RequestPacker {
 public:
  RequestPacker(uint8_t* bytes, std::vector<PackedTable> tables) : bytes_(bytes), tables_(std::move(tables)) {}

  const std::vector<PackedTable>& tables() const { return tables_; }
  static constexpr size_t aligned(size_t size) { return (size + 15) / 16 * 16; }
  size_t head_bytes() const { return tables_.size() * sizeof(TableBags); }

  // The heads are written last, so a refused request keeps those of the request before. Returns nothing unless each
  // table's offsets go from 0 to its number of keys and never fall.
  std::optional<PackedSize> pack(const std::vector<GivenBags>& given, size_t samples, const float* dense,
                                 size_t dense_dim, const int64_t* first_floats) {
    size_t at = head_bytes();
    if (dense) {
      std::memcpy(bytes_ + at, dense, samples * dense_dim * sizeof(float));
      at += aligned(samples * dense_dim * sizeof(float));
    }
    heads_.assign(tables_.size(), TableBags{});
    if (!pack_row_ptrs(given, samples, at)) return std::nullopt;
    at = aligned(at);
    pack_keys(given, at);
    pack_weights(given, at);
    const size_t items = deal_items(first_floats);
    std::memcpy(bytes_, heads_.data(), head_bytes());
    return PackedSize{items, at};
  }

 private:
  // Whether the offsets give each bag the same number of keys.
  static bool have_equal_sizes(const int32_t* row_ptrs, size_t bags, size_t keys) {
    if (keys % bags) return false;
    const auto offset = [&](size_t i) {
      uint32_t value;
      std::memcpy(&value, row_ptrs + i, sizeof value);
      return value;
    };
    const auto size = static_cast<uint32_t>(keys / bags);
    if (offset(1) != size) return false;  // most others end here
    uint32_t differs = 0;
    for (size_t i = 0; i <= bags; ++i) differs |= offset(i) ^ (size * static_cast<uint32_t>(i));
    return differs == 0;
  }

  bool pack_row_ptrs(const std::vector<GivenBags>& given, size_t samples, size_t& at) {
    uint32_t bag = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      TableBags& head = heads_[t];
      const size_t bags = samples * tables_[t].slots, keys = given[t].key_count;
      head.bags = static_cast<uint32_t>(bags);
      head.first_bag = bag;
      bag += head.bags;
      if (have_equal_sizes(given[t].row_ptrs, bags, keys)) {
        head.row_ptrs_at = -static_cast<int64_t>(keys / bags);
        continue;
      }
      auto* row_ptrs = reinterpret_cast<int32_t*>(bytes_ + at);
      std::memcpy(row_ptrs, given[t].row_ptrs, (bags + 1) * sizeof(int32_t));
      if (!is_csr(row_ptrs, bags, keys) || static_cast<size_t>(row_ptrs[bags]) != keys) return false;
      head.row_ptrs_at = static_cast<int64_t>(at);
      at += (bags + 1) * sizeof(int32_t);
    }
    return true;
  }

  void pack_keys(const std::vector<GivenBags>& given, size_t& at) {
    uint32_t position = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      TableBags& head = heads_[t];
      head.keys_at = static_cast<int64_t>(at);
      head.keys = static_cast<uint32_t>(given[t].key_count);
      head.first_position = position;
      position += head.keys;
      if (head.keys) std::memcpy(bytes_ + at, given[t].keys, head.keys * sizeof(int64_t));
      at += head.keys * sizeof(int64_t);
    }
  }

  void pack_weights(const std::vector<GivenBags>& given, size_t& at) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!given[t].weights) continue;
      heads_[t].weights_at = static_cast<int64_t>(at);
      if (heads_[t].keys) std::memcpy(bytes_ + at, given[t].weights, heads_[t].keys * sizeof(float));
      at += heads_[t].keys * sizeof(float);
    }
  }

  // In small requests, each of a block's tiles works on four keys: more blocks are faster than longer blocks. In
  // requests with more blocks than a GPU runs at a time, a block takes a whole round: few long bags leave many threads
  // idle.
  size_t deal_items(const int64_t* first_floats) {
    const TableBags& last = heads_.back();
    const uint64_t item_keys = last.first_position + uint64_t{last.keys} < kManyKeys ? 128 : 256;
    uint32_t item = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      TableBags& head = heads_[t];
      const uint64_t fitting = item_keys * head.bags / std::max(head.keys, 1u);
      head.item_bags = static_cast<uint32_t>(std::clamp<uint64_t>(fitting, 1, kMostItemBags));
      head.first_item = item;
      head.first_float = first_floats[t];
      head.combiner = tables_[t].combiner;
      head.max_norm = tables_[t].max_norm;
      item += (head.bags + head.item_bags - 1) / head.item_bags;
    }
    return item;
  }

  static constexpr uint64_t kManyKeys = 1 << 18, kMostItemBags = 128;

  uint8_t* bytes_;
  std::vector<PackedTable> tables_;
  std::vector<TableBags> heads_;
};

}  // namespace hotrow
