// Which thread of a block runs next. Without a seed, threads run in the order in which they became ready. With a seed,
// half of the blocks draw any ready thread. The other blocks run the first warp of a random order, which sometimes
// changes; this finds a missing barrier after one warp's work.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace cpu {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed ? seed : 1) {}
  // xorshift64 (Marsaglia, 2003); the upper half is the better one.
  unsigned below(unsigned end) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>((state_ >> 32) * end >> 32);
  }

 private:
  uint64_t state_;
};

// The ready threads. It allocates room for all threads once, so a turn never allocates.
class Schedule {
 public:
  void start(unsigned threads, uint64_t seed) {
    fuzzed_ = seed != 0;
    random_ = Random(seed);
    ready_.assign(threads, 0);
    first_ = count_ = 0;
    by_warp_ = fuzzed_ && random_.below(2) == 0;
    rank_.resize((threads + 31) / 32);
    for (unsigned i = 0; i < rank_.size(); ++i) rank_[i] = i;
    for (unsigned i = static_cast<unsigned>(rank_.size()); i > 1; --i) std::swap(rank_[i - 1], rank_[random_.below(i)]);
  }

  bool fuzzed() const { return fuzzed_; }
  bool empty() const { return count_ == 0; }
  void clear() { count_ = 0; }
  void add(unsigned thread) { at(count_++) = thread; }

  unsigned take() {
    if (fuzzed_) std::swap(at(0), at(by_warp_ ? first_of_best_warp() : random_.below(count_)));
    const unsigned thread = at(0);
    first_ = first_ + 1 == ready_.size() ? 0 : first_ + 1;
    --count_;
    return thread;
  }

  // Whether the running thread loses its turn here although it could continue.
  bool interrupts() { return fuzzed_ && random_.below(4) == 0; }

 private:
  unsigned& at(unsigned i) {
    const size_t place = first_ + i;
    return ready_[place < ready_.size() ? place : place - ready_.size()];
  }

  unsigned first_of_best_warp() {
    const unsigned warps = static_cast<unsigned>(rank_.size());
    if (random_.below(256) == 0) std::swap(rank_[random_.below(warps)], rank_[random_.below(warps)]);
    unsigned best = 0;
    for (unsigned i = 1; i < count_; ++i)
      if (rank_[at(i) / 32] < rank_[at(best) / 32]) best = i;
    return best;
  }

  std::vector<unsigned> ready_;  // a ring
  std::vector<unsigned> rank_;   // of each warp; the smallest runs first
  size_t first_ = 0;
  unsigned count_ = 0;
  bool fuzzed_ = false, by_warp_ = false;
  Random random_{1};
};

}  // namespace cpu
