// The rows of one embedding table in training: key -> row, with the states of the table's update rule.
//
// Row numbers are positions in arrays that grow (growing_array.hpp). A table is one of two kinds:
//
//   dynamic   a key gets a row when training has seen it `admit_after` times; until then it counts as absent. With
//             `max_rows`, a new row replaces the row that training has not read for the longest time.
//   fixed     the keys are 0 to V - 1, and all rows exist from the beginning. One of n processes has the keys first,
//             first + n, first + 2 n, ... as its rows 0, 1, 2, ....
//
// A row's first weights depend only on its key and the table's seed, so they are the same in every process.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "table/bucket_index.hpp"
#include "table/growing_array.hpp"
#include "training/trained_rows.hpp"
#include "training/update_rule.hpp"

namespace hotrow {

// How first weights are drawn: uniformly from [a, b); from a normal distribution with mean a and standard deviation b;
// or all equal to a.
struct Initializer {
  enum Kind { kUniform, kNormal, kConstant } kind;
  double a, b;
};
constexpr size_t kInitializers = 3;
constexpr const char* kInitializerNames[kInitializers] = {"uniform", "normal", "constant"};

struct TrainingOptions {
  std::string name;  // for messages
  uint32_t dim;
  RowType type;
  Rule rule;                          // whose states the rows have
  std::vector<float> initial_states;  // the value of each state of a new row
  Initializer initializer;
  uint64_t seed;
  uint64_t fixed_rows;   // V; 0: dynamic
  uint64_t first, step;  // of the keys of fixed rows
  uint64_t max_rows;     // 0: no bound
  uint32_t admit_after;  // at least 1
  float absent;
  float max_norm;

  // S, the floats of all states of a row.
  size_t state_floats() const { return initial_states.size() * hotrow::state_floats(rule, dim); }
};

// A key outside the fixed rows of a table.
struct KeyBeyondRows {
  int64_t key;
  size_t position;
  uint64_t rows;
};

// One call has more distinct keys than the table may have rows.
struct CallBeyondRows {
  uint64_t max_rows;
};

// The slot of each key in its sample.
struct KeySlots {
  const int64_t* of_keys;   // nullptr: bag r is slot r % slots
  const int64_t* row_ptrs;  // nullptr: one key per bag
  size_t slots;
};

// Every method and the view need the table's mutex, except the constructor, and `options` without rule and
// initial_states.
class TrainingTable {
 public:
  static constexpr uint64_t kMaxRows = 3'500'000'000;

  // Throws std::bad_alloc, here and wherever a table grows.
  explicit TrainingTable(TrainingOptions options);

  std::mutex& mutex() const { return mutex_; }
  const TrainingOptions& options() const { return options_; }
  TrainedRows view() const;

  // The rows. Their numbers are below this.
  size_t size() const { return used_; }
  // Goes up when a row number that was handed out may name another key's row.
  uint64_t generation() const { return generation_; }
  // The last step in which a row was updated; 0: none.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }

  // A new row never replaces a row that was read since.
  void begin_call() { call_began_ = clock_; }
  // keys[n] -> rows[n], -1 where absent. Throws KeyBeyondRows.
  void find(const int64_t* keys, size_t n, int64_t* rows) const;
  // The same for a training step: keys are counted, get rows and replace rows. A key that occurs `admit_after` times
  // in all gets its row before this call ends, at each of its places. Throws KeyBeyondRows before any change, and
  // CallBeyondRows; keys that got rows before keep them.
  void find_or_insert(const int64_t* keys, size_t n, const KeySlots& slots, int64_t* rows);

  // The numbers of the rows whose last update was in a step after `since`, or is not known. With `max_rows` the row that
  // was read least recently comes first, so a table that gets them in this order replaces the same rows.
  std::vector<int64_t> rows_changed_since(int64_t since) const;
  // rows[n], below size() -> keys[n], vectors[n][dim], states[n][S], last_steps[n], slots[n].
  void read(const int64_t* rows, size_t n, int64_t* keys, float* vectors, float* states, int64_t* last_steps,
            uint64_t* slots) const;
  // Insert or overwrite rows. Throws KeyBeyondRows before any change, and CallBeyondRows.
  void write(const int64_t* keys, size_t n, const float* vectors, const float* states, const int64_t* last_steps,
             const uint64_t* slots);
  // Remove all rows and all sightings. Fixed rows get their first weights again.
  void clear();
  // Give every row the states of a rule, at their first values. If it throws, nothing has changed.
  void set_states(Rule rule, const std::vector<float>& initial_states);
  // states[S] of a new row.
  void first_states(float* states) const;
  // How often each key without a row was seen.
  std::vector<std::pair<int64_t, uint32_t>> sightings() const;
  // Undo sightings().
  void write_sighting(int64_t key, uint32_t count);

  int64_t key(int64_t row) const { return keys_[static_cast<size_t>(row)]; }
  int64_t last_step(int64_t row) const { return last_step_of(static_cast<size_t>(row)); }
  void set_last_step(int64_t row, int64_t step) { last_step_of(static_cast<size_t>(row)) = static_cast<int32_t>(step); }
  void prefetch_last_step(int64_t row) const { __builtin_prefetch(&last_step_of(static_cast<size_t>(row)), 1); }

 private:
  int32_t& last_step_of(size_t row) const {
    return *reinterpret_cast<int32_t*>(marks_.data() + row * mark_bytes_);
  }
  void number_fixed(const int64_t* keys, size_t n, int64_t* rows) const;
  void find_indexed(const int64_t* keys, size_t n, int64_t* rows) const;
  bool count_sightings(const int64_t* keys, const std::vector<size_t>& places);
  bool is_admitted(int64_t key);
  uint32_t add(int64_t key, int64_t slot);
  uint32_t evict();
  void choose_victims();
  void grow_index();
  void make_room(size_t rows);
  void initialize(size_t row, int64_t key);
  void make_fixed_rows();

  mutable std::mutex mutex_;
  TrainingOptions options_;
  size_t stride_bytes_, mark_bytes_;
  uint64_t generation_ = 0;
  int64_t step_ = 0;

  std::unique_ptr<BucketIndex> index_;  // key -> row; none with fixed rows
  uint64_t index_keys_ = 1024;          // that fit into the index
  std::unique_ptr<BucketIndex> sightings_;  // key without a row -> how often it was seen
  uint64_t sighted_keys_ = 0, sightings_fit_ = 1024;

  size_t used_ = 0;
  GrowingArray<std::byte> values_;
  GrowingArray<int64_t> keys_;
  GrowingArray<std::byte> marks_;     // of each row: the step of its last update, 0: not known; its row-wise states
  GrowingArray<uint32_t> slots_;      // in which the key was first seen

  // Of tables with max_rows: when each row was read last, in keys that training has looked up. The victims are the rows
  // that were read least recently when they were chosen, the oldest last. A victim that was read since is none.
  uint64_t clock_ = 0;
  uint64_t call_began_ = 0;
  GrowingArray<uint64_t> touched_;
  std::vector<std::pair<uint64_t, uint32_t>> victims_;
};

}  // namespace hotrow
