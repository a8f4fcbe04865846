// A lookup in pieces, which the cores share if it is large.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lookup/core_pool.hpp"
#include "lookup/lookup.hpp"

namespace hotrow {

constexpr size_t kPieceKeys = 2048;
constexpr size_t kSharedKeys = 16384;  // about half a millisecond's work: fewer are not worth a wake-up

// A range of keys or of bags.
struct Piece {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Call work(piece of the keys) for each, in any order, from several threads at a time if there are kSharedKeys.
template <class Work>
void do_in_pieces(size_t keys, const Work& work) {
  const size_t pieces = std::max<size_t>(1, (keys + kPieceKeys - 1) / kPieceKeys);
  const auto one = [&](size_t piece) {
    work(Piece{piece * kPieceKeys, std::min(keys, (piece + 1) * kPieceKeys)});
  };
  if (keys >= kSharedKeys) return CorePool::shared().run(pieces, one);
  for (size_t piece = 0; piece < pieces; ++piece) one(piece);
}

// The bags of a piece of the keys: the bags that begin in the piece. Empty bags at the end belong to the last piece. A
// piece inside a long bag has none.
inline Piece bags_of(const Bags& bags, Piece keys) {
  const int64_t* row_ptrs = bags.row_ptrs;
  const auto first_bag = [&](size_t key) {
    return static_cast<size_t>(std::lower_bound(row_ptrs, row_ptrs + bags.count, static_cast<int64_t>(key)) - row_ptrs);
  };
  const bool is_last = keys.end == static_cast<size_t>(row_ptrs[bags.count]);
  return {first_bag(keys.begin), is_last ? bags.count : first_bag(keys.end)};
}

}  // namespace hotrow
