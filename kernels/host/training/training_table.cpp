#include "training/training_table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lookup/lookup_pieces.hpp"

namespace hotrow {
namespace {

constexpr size_t kAhead = 8;  // keys whose bucket is asked for before their turn

// Random numbers of a key, as training/keyed_random.py draws them.
class KeyedRandom {
 public:
  KeyedRandom(int64_t key, uint64_t seed) : start_(mixed(static_cast<uint64_t>(key) ^ mixed(seed))) {}

  // In [0, 1).
  double uniform(uint64_t column) const {
    return static_cast<double>(mixed(start_ + (column + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
  }

  // Box and Muller's transformation of two uniform numbers.
  double normal(uint64_t column) const {
    constexpr double kTwoPi = 6.283185307179586;
    return std::sqrt(-2 * std::log1p(-uniform(2 * column))) * std::cos(kTwoPi * uniform(2 * column + 1));
  }

 private:
  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  uint64_t start_;
};

size_t stride_of(const TrainingOptions& options) {
  const size_t offset = TrainedRows::states_offset(options.type, options.dim);
  return is_row_wise(options.rule) ? offset : offset + options.state_floats() * sizeof(float);
}

size_t mark_bytes_of(const TrainingOptions& options) {
  return sizeof(int32_t) + (is_row_wise(options.rule) ? options.state_floats() * sizeof(float) : 0);
}

}  // namespace

TrainingTable::TrainingTable(TrainingOptions options)
    : options_(std::move(options)), stride_bytes_(stride_of(options_)), mark_bytes_(mark_bytes_of(options_)) {
  if (options_.fixed_rows)
    make_fixed_rows();
  else
    index_ = std::make_unique<BucketIndex>(index_keys_);
}

TrainedRows TrainingTable::view() const {
  const bool apart = is_row_wise(options_.rule);
  auto* states = apart ? marks_.data() : values_.data();
  if (states != nullptr)  // an empty table has no memory
    states += apart ? sizeof(int32_t) : TrainedRows::states_offset(options_.type, options_.dim);
  return {values_.data(),
          stride_bytes_,
          options_.dim,
          options_.type,
          options_.absent,
          options_.max_norm,
          states,
          apart ? mark_bytes_ : stride_bytes_};
}

// Throws before it writes a number that is no row.
void TrainingTable::number_fixed(const int64_t* keys, size_t n, int64_t* rows) const {
  const bool is_shared = options_.step > 1;  // divisions take longer than the rest
  for (size_t i = 0; i < n; ++i) {
    const auto key = static_cast<uint64_t>(keys[i]);  // a negative key is large
    if (key >= options_.fixed_rows || (is_shared && key % options_.step != options_.first))
      throw KeyBeyondRows{keys[i], i, options_.fixed_rows};
    rows[i] = static_cast<int64_t>(is_shared ? key / options_.step : key);
  }
}

void TrainingTable::find(const int64_t* keys, size_t n, int64_t* rows) const {
  if (index_) return find_indexed(keys, n, rows);
  number_fixed(keys, n, rows);
}

void TrainingTable::find_indexed(const int64_t* keys, size_t n, int64_t* rows) const {
  do_in_pieces(n, [&](Piece piece) {
    lookup_loops().find(index_->view(), keys + piece.begin, piece.size(), rows + piece.begin);
  });
}

void TrainingTable::find_or_insert(const int64_t* keys, size_t n, const KeySlots& slots, int64_t* rows) {
  find(keys, n, rows);
  if (!index_) return;
  std::vector<size_t> missing;
  for (size_t i = 0; i < n; ++i)
    if (rows[i] < 0) missing.push_back(i);
  for (size_t i = 0; options_.max_rows && i < n; ++i)
    if (rows[i] >= 0) touched_[static_cast<size_t>(rows[i])] = ++clock_;
  if (missing.empty()) return;
  if (options_.admit_after > 1 && !count_sightings(keys, missing)) return;
  size_t bag = 0;
  for (const size_t i : missing) {
    if (const auto place = index_->find(keys[i])) {
      rows[i] = index_->row_at(*place);
      if (options_.max_rows) touched_[static_cast<size_t>(rows[i])] = ++clock_;
      continue;
    }
    if (!is_admitted(keys[i])) continue;
    if (slots.row_ptrs)
      while (slots.row_ptrs[bag + 1] <= static_cast<int64_t>(i)) ++bag;
    else
      bag = i;
    rows[i] = add(keys[i], slots.of_keys ? slots.of_keys[i] : static_cast<int64_t>(bag % slots.slots));
  }
}

// Count the keys at these places. Returns whether one of them may now get a row.
bool TrainingTable::count_sightings(const int64_t* keys, const std::vector<size_t>& places) {
  bool admits = false;
  for (const size_t i : places) {
    const auto place = sightings_ ? sightings_->find(keys[i]) : std::nullopt;
    const uint32_t count = place ? std::min(sightings_->row_at(*place) + 1, options_.admit_after) : 1;
    if (place)
      sightings_->overwrite(*place, count);
    else
      write_sighting(keys[i], count);
    admits |= count == options_.admit_after;
  }
  return admits;
}

void TrainingTable::write_sighting(int64_t key, uint32_t count) {
  if (!sightings_) sightings_ = std::make_unique<BucketIndex>(sightings_fit_);
  if (sighted_keys_ == sightings_fit_) {
    sightings_->grow(2 * sightings_fit_);
    sightings_fit_ *= 2;
  }
  sightings_->insert(key, count);
  ++sighted_keys_;
}

std::vector<std::pair<int64_t, uint32_t>> TrainingTable::sightings() const {
  std::vector<std::pair<int64_t, uint32_t>> counts;
  for (uint64_t b = 0; sightings_ && b < sightings_->bucket_count(); ++b)
    for (int slot = 0; slot < kSlots; ++slot)
      if (const int64_t key = sightings_->key_at({b, slot}); key != kEmpty)
        counts.emplace_back(key, sightings_->row_at({b, slot}));
  return counts;
}

// Whether a key was seen often enough. If so, its count is no longer needed.
bool TrainingTable::is_admitted(int64_t key) {
  if (options_.admit_after == 1) return true;
  const auto place = sightings_->find(key);
  if (!place || sightings_->row_at(*place) < options_.admit_after) return false;
  sightings_->erase(key, *place);
  --sighted_keys_;
  return true;
}

uint32_t TrainingTable::add(int64_t key, int64_t slot) {
  uint32_t row = 0;
  if (options_.max_rows && used_ == options_.max_rows) {
    row = evict();
  } else {
    if (used_ == index_keys_) grow_index();
    make_room(used_ + 1);
    row = static_cast<uint32_t>(used_++);
  }
  index_->insert(key, row);
  keys_[row] = key;
  last_step_of(row) = 0;
  slots_[row] = static_cast<uint32_t>(slot);
  if (options_.max_rows) touched_[row] = ++clock_;
  initialize(row, key);
  return row;
}

// Remove the row that was read least recently, and return its number.
uint32_t TrainingTable::evict() {
  for (bool chosen = false;; victims_.pop_back()) {
    if (victims_.empty()) {
      if (!chosen) choose_victims();
      if (chosen || victims_.empty()) throw CallBeyondRows{options_.max_rows};
      chosen = true;
    }
    const auto [touched, row] = victims_.back();
    if (touched_[row] != touched) continue;
    victims_.pop_back();
    index_->erase(keys_[row], *index_->find(keys_[row]));
    ++generation_;
    return row;
  }
}

// The eighth of the rows that were read least recently, without those of this call. Sorting an eighth at a time costs
// little for each row that is replaced.
void TrainingTable::choose_victims() {
  for (size_t row = 0; row < used_; ++row)
    if (touched_[row] <= call_began_) victims_.emplace_back(touched_[row], static_cast<uint32_t>(row));
  const size_t most = std::max<size_t>(options_.max_rows / 8, 1);
  if (victims_.size() > most) {
    std::nth_element(victims_.begin(), victims_.begin() + static_cast<ptrdiff_t>(most), victims_.end());
    victims_.resize(most);
  }
  std::sort(victims_.rbegin(), victims_.rend());
}

void TrainingTable::grow_index() {
  if (index_keys_ >= kMaxRows) throw std::bad_alloc();
  const uint64_t fits = std::min(2 * index_keys_, kMaxRows);
  index_->grow(fits);
  index_keys_ = fits;
}

void TrainingTable::make_room(size_t rows) {
  values_.reserve(rows * stride_bytes_);
  keys_.reserve(rows);
  marks_.reserve(rows * mark_bytes_);
  slots_.reserve(rows);
  if (options_.max_rows) touched_.reserve(rows);
}

void TrainingTable::initialize(size_t row, int64_t key) {
  const TrainedRows table = view();
  const Initializer& draw = options_.initializer;
  const KeyedRandom random(key, options_.seed);
  thread_local std::vector<float> weights;
  weights.resize(options_.dim);
  for (uint32_t c = 0; c < options_.dim; ++c) {
    double value = draw.a;
    if (draw.kind == Initializer::kUniform) value += (draw.b - draw.a) * random.uniform(c);
    if (draw.kind == Initializer::kNormal) value += draw.b * random.normal(c);
    weights[c] = static_cast<float>(value);
  }
  const auto number = static_cast<int64_t>(row);
  table.write(number, weights.data());
  first_states(table.states(number));
}

void TrainingTable::first_states(float* states) const {
  for (const float first : options_.initial_states)
    states = std::fill_n(states, state_floats(options_.rule, options_.dim), first);
}

void TrainingTable::make_fixed_rows() {
  used_ = options_.fixed_rows > options_.first ? (options_.fixed_rows - options_.first - 1) / options_.step + 1 : 0;
  make_room(used_);
  CorePool::shared().run((used_ + kPieceKeys - 1) / kPieceKeys, [&](size_t piece) {
    for (size_t row = piece * kPieceKeys; row < std::min(used_, (piece + 1) * kPieceKeys); ++row) {
      keys_[row] = static_cast<int64_t>(options_.first + row * options_.step);
      last_step_of(row) = 0;
      slots_[row] = 0;
      initialize(row, keys_[row]);
    }
  });
}

std::vector<int64_t> TrainingTable::rows_changed_since(int64_t since) const {
  std::vector<int64_t> numbers;
  for (size_t row = 0; row < used_; ++row)
    if (last_step_of(row) == 0 || last_step_of(row) > since) numbers.push_back(static_cast<int64_t>(row));
  if (options_.max_rows)
    std::sort(numbers.begin(), numbers.end(), [this](int64_t one, int64_t other) {
      return touched_[static_cast<size_t>(one)] < touched_[static_cast<size_t>(other)];
    });
  return numbers;
}

void TrainingTable::read(const int64_t* rows, size_t n, int64_t* keys, float* vectors, float* states,
                         int64_t* last_steps, uint64_t* slots) const {
  const TrainedRows table = view();
  const size_t dim = options_.dim, floats = options_.state_floats();
  for (size_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    float* weights = vectors + i * dim;
    keys[i] = keys_[row];
    std::copy_n(table.read(rows[i], weights), table.type == RowType::kFp32 ? dim : 0, weights);
    std::copy_n(table.states(rows[i]), floats, states + i * floats);
    last_steps[i] = last_step_of(row);
    slots[i] = slots_[row];
  }
}

void TrainingTable::write(const int64_t* keys, size_t n, const float* vectors, const float* states,
                          const int64_t* last_steps, const uint64_t* slots) {
  std::vector<int64_t> fixed(index_ ? 0 : n);
  if (!index_) number_fixed(keys, n, fixed.data());
  const size_t dim = options_.dim, floats = options_.state_floats();
  begin_call();
  for (size_t i = 0; i < n; ++i) {
    size_t row = 0;
    if (!index_) {
      row = static_cast<size_t>(fixed[i]);
    } else {
      if (i + kAhead < n) index_->prefetch(keys[i + kAhead]);
      const auto place = index_->find(keys[i]);
      row = place ? index_->row_at(*place) : add(keys[i], 0);
      if (options_.max_rows) touched_[row] = ++clock_;
    }
    const TrainedRows table = view();
    const auto number = static_cast<int64_t>(row);
    table.write(number, vectors + i * dim);
    std::copy_n(states + i * floats, floats, table.states(number));
    last_step_of(row) = static_cast<int32_t>(last_steps[i]);
    slots_[row] = static_cast<uint32_t>(slots[i]);
    step_ = std::max(step_, last_steps[i]);
  }
}

void TrainingTable::clear() {
  ++generation_;
  step_ = 0;
  if (options_.fixed_rows) return make_fixed_rows();
  index_keys_ = sightings_fit_ = 1024;
  index_ = std::make_unique<BucketIndex>(index_keys_);
  sightings_.reset();
  sighted_keys_ = 0;
  used_ = 0;
  victims_.clear();
  values_ = {};
  keys_ = {};
  marks_ = {};
  slots_ = {};
  touched_ = {};
}

void TrainingTable::set_states(Rule rule, const std::vector<float>& initial_states) {
  TrainingOptions options = options_;
  options.rule = rule;
  options.initial_states = initial_states;
  const size_t stride = stride_of(options);
  values_.reserve(used_ * stride);
  marks_.reserve(used_ * mark_bytes_of(options));
  // nothing throws from here on
  const TrainedRows before = view();
  options_ = std::move(options);
  stride_bytes_ = stride;
  mark_bytes_ = mark_bytes_of(options_);
  const TrainedRows after = view();
  const auto move = [&](size_t row) {
    const auto number = static_cast<int64_t>(row);
    std::memmove(after.row(number), before.row(number), row_bytes(options_.type, options_.dim));
    first_states(after.states(number));
    last_step_of(row) = 0;
  };
  // In place, in an order in which no row overwrites a row that has not moved.
  if (stride > before.stride_bytes)
    for (size_t row = used_; row-- > 0;) move(row);
  else
    for (size_t row = 0; row < used_; ++row) move(row);
  values_.shrink(used_ * stride);
}

}  // namespace hotrow
