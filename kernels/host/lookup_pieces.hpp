// A lookup cut into pieces, which the cores share where it is big.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core_pool.hpp"
#include "lookup.hpp"

namespace hotrow {

constexpr size_t kPieceKeys = 2048;
constexpr size_t kSharedKeys = 16384;  // about half a millisecond's work: fewer are not worth a wake-up

// From one number, of keys or of bags, up to another.
struct Piece {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Call work(piece of the keys) for each, in any order, from several threads at a time where there are kSharedKeys.
template <class Work>
void do_in_pieces(size_t keys, const Work& work) {
  const size_t pieces = std::max<size_t>(1, (keys + kPieceKeys - 1) / kPieceKeys);
  const auto one = [&](size_t piece) {
    work(Piece{piece * kPieceKeys, std::min(keys, (piece + 1) * kPieceKeys)});
  };
  if (keys >= kSharedKeys) return CorePool::shared().run(pieces, one);
  for (size_t piece = 0; piece < pieces; ++piece) one(piece);
}

// The bags that belong to a piece of their keys: those that begin in it, an empty one at the end to the last. None where
// all of the piece is the rest of a long bag.
inline Piece bags_of(const Bags& bags, Piece keys) {
  const int64_t* row_ptrs = bags.row_ptrs;
  const auto first_bag = [&](size_t key) {
    return static_cast<size_t>(std::lower_bound(row_ptrs, row_ptrs + bags.count, static_cast<int64_t>(key)) - row_ptrs);
  };
  const bool is_last = keys.end == static_cast<size_t>(row_ptrs[bags.count]);
  return {first_bag(keys.begin), is_last ? bags.count : first_bag(keys.end)};
}

}  // namespace hotrow
