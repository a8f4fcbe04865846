// Readers in parallel with several writers, for the sanitizers. Exits 0 if every answer was right.
//
//   host_table_stress <milliseconds> <avx2|portable> <fp32|int8>
//
// Every column of a row, except the first, holds the key or the version of its write. int8 rows keep these numbers
// unchanged: the first column, 127, makes their scale 1. So a torn row shows, and so does another key's row or a row
// that was reused under a reader. Keys of the lower half are never evicted and must always be found. Each writer owns
// every n-th of the other keys; it evicts them, inserts them again and replaces them by fresh keys.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lookup/core_pool.hpp"
#include "lookup/pooled_lookup.hpp"
#include "table/host_table.hpp"
#include "table/key_index.hpp"

using namespace hotrow;

namespace {

constexpr uint32_t kDim = 24;
constexpr int64_t kFixed = 300;   // keys 0 .. kFixed - 1 are always there
constexpr int kWriters = 3;
constexpr int kReaders = 3;
constexpr size_t kBatch = 96;
constexpr size_t kBigBatch = 20'000;  // shared over the cores

std::atomic<bool> stop{false};
std::atomic<int64_t> rows_checked{0};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

int of_key(int64_t key) { return static_cast<int>(key % 113); }

// Columns hold 127, key, version, key, version, ...
void fill(float* row, int64_t key, int version) {
  row[0] = 127.0f;
  for (uint32_t c = 1; c < kDim; ++c) row[c] = static_cast<float>(c % 2 ? of_key(key) : version % 128);
}

void check(const float* row, int64_t key) {
  require(row[0] == 127.0f && row[1] == static_cast<float>(of_key(key)), "a row of another key");
  for (uint32_t c = 3; c < kDim; ++c) require(row[c] == row[c - 2], "a torn row");
}

void check_zeros(const float* row) {
  for (uint32_t c = 0; c < kDim; ++c) require(row[c] == 0.0f, "an absent key's row is not zeros");
}

void replace_rows(HostTable& table, int writer) {
  std::mt19937_64 random(static_cast<uint64_t>(writer));
  std::vector<int64_t> keys(kBatch);
  std::vector<float> rows(kBatch * kDim);
  int64_t fresh = 1'000'000 * (writer + 1);
  for (int version = 1; !stop.load(); version = version % 1000 + 1) {
    for (size_t i = 0; i < kBatch; ++i) {
      keys[i] = i % 2 ? static_cast<int64_t>(random() % kFixed) : fresh++;
      fill(&rows[i * kDim], keys[i], version);
    }
    table.insert(keys.data(), rows.data(), kBatch);
    std::vector<int64_t> volatile_keys;
    for (const int64_t key : keys)
      if (key >= kFixed) volatile_keys.push_back(key);
    require(table.evict(volatile_keys.data(), volatile_keys.size()) == static_cast<int64_t>(volatile_keys.size()),
            "an inserted key was not there to be evicted");
    if (version % 2) fresh -= static_cast<int64_t>(kBatch) / 2;  // every other time the same keys again
  }
}

void look_up(HostTable& table, int reader, size_t batch) {
  std::mt19937_64 random(100 + static_cast<uint64_t>(reader));
  std::vector<int64_t> keys(batch);
  std::vector<float> out(batch * kDim);
  const std::unique_ptr<bool[]> found(new bool[batch]);
  while (!stop.load()) {
    for (size_t i = 0; i < batch; ++i)
      keys[i] = i % 2 ? static_cast<int64_t>(random() % kFixed)
                      : static_cast<int64_t>(1'000'000 * (1 + random() % kWriters) + random() % 4096);
    std::fill(out.begin(), out.end(), -1.0f);
    table.fetch(keys.data(), batch, out.data(), found.get());
    for (size_t i = 0; i < batch; ++i) {
      require(found[i] || keys[i] >= kFixed, "a key that is always there was not found");
      found[i] ? check(&out[i * kDim], keys[i]) : check_zeros(&out[i * kDim]);
    }
    table.holds(keys.data(), batch, found.get());
    for (size_t i = 0; i < batch; ++i) require(found[i] || keys[i] >= kFixed, "a key that is always there is not held");
    rows_checked.fetch_add(static_cast<int64_t>(batch));
  }
}

// Bags of one key, three times, which is always present: columns with the key must be three times the key.
void look_up_pooled(HostTable& table) {
  const std::vector<int64_t> row_ptrs{0, 3, 6};
  std::vector<float> out(2 * kDim);
  bool found[6];
  for (int64_t key = 0; !stop.load(); key = (key + 1) % (kFixed - 1)) {
    const int64_t keys[] = {key, key, key, key + 1, key + 1, key + 1};
    table.fetch_pooled(keys, {row_ptrs.data(), 2, Combiner::kSum, nullptr}, out.data(), found);
    for (uint32_t c = 1; c < kDim; c += 2) {
      require(out[c] == static_cast<float>(3 * of_key(key)), "a wrong sum");
      require(out[kDim + c] == static_cast<float>(3 * of_key(key + 1)), "a wrong sum");
    }
  }
}

// Lasting keys of several tables in one call; the cores share it if there are many.
void look_up_in_one_call(const std::vector<HostTable*>& tables, size_t count) {
  std::vector<int64_t> row_ptrs(count + 1), keys(count);
  std::vector<float> out(tables.size() * count * kDim);
  const std::unique_ptr<bool[]> found(new bool[tables.size() * count]);
  for (size_t i = 0; i < count; ++i) row_ptrs[i + 1] = static_cast<int64_t>(i) + 1;
  for (int64_t key = 0; !stop.load(); ++key) {
    for (size_t i = 0; i < count; ++i) keys[i] = (key + static_cast<int64_t>(i)) % kFixed;
    std::vector<TableLookup> lookups(tables.size());
    for (size_t t = 0; t < tables.size(); ++t) {
      lookups[t].set_table(*tables[t]);
      lookups[t].keys = keys.data();
      lookups[t].key_count = count;
      lookups[t].bags = {row_ptrs.data(), count, Combiner::kSum, nullptr};
      lookups[t].out = &out[t * count * kDim];
      lookups[t].found = &found[t * count];
    }
    look_up_tables(lookups);
    for (size_t t = 0; t < tables.size(); ++t) {
      require(lookups[t].is_read && !lookups[t].misses, "a lasting key was not found");
      for (size_t i = 0; i < count; ++i) check(&out[(t * count + i) * kDim], keys[i]);
    }
  }
}

void walk(HostTable& table) {
  std::vector<int64_t> keys(64);
  std::vector<float> rows(64 * kDim);
  while (!stop.load()) {
    int64_t fixed = 0;
    for (uint64_t cursor = 0;;) {
      const size_t n = table.read_items(cursor, keys.size(), keys.data(), rows.data());
      if (n == 0) break;
      for (size_t i = 0; i < n; ++i) {
        check(&rows[i * kDim], keys[i]);
        fixed += keys[i] < kFixed;
      }
    }
    require(fixed == kFixed, "a walk did not meet each lasting key exactly once");
  }
}

void number_keys(KeyIndex& index) {
  std::vector<int64_t> keys(kBatch), rows(kBatch);
  for (int64_t start = 0; !stop.load() && start < 200'000; start += kBatch / 2) {
    for (size_t i = 0; i < kBatch; ++i) keys[i] = start + static_cast<int64_t>(i);
    index.find_or_insert(keys.data(), kBatch, rows.data());
    const std::vector<int64_t> numbers = rows;
    index.find(keys.data(), kBatch, rows.data());
    require(rows == numbers, "a key's row number changed");
  }
}

// Fresh keys evict other keys. The writer checks that its call never evicts its own keys, and that the bound holds.
void overflow(HostTable& table) {
  constexpr int64_t kFresh = 4000;
  std::vector<int64_t> keys(kBatch);
  std::vector<float> rows(kBatch * kDim), out(kBatch * kDim);
  const std::unique_ptr<bool[]> found(new bool[kBatch]);
  int64_t next = 0;
  for (int version = 1; !stop.load(); version = version % 1000 + 1) {
    for (size_t i = 0; i < kBatch; ++i) {
      keys[i] = next++ % kFresh;
      fill(&rows[i * kDim], keys[i], version);
    }
    table.insert(keys.data(), rows.data(), kBatch);
    require(table.rows() <= static_cast<int64_t>(table.capacity_rows()), "a table grew beyond its capacity");
    table.fetch(keys.data(), kBatch, out.data(), found.get());
    require(std::all_of(found.get(), found.get() + kBatch, [](bool one) { return one; }), "an insert evicted its own");
  }
}

void look_up_what_overflows(HostTable& table, int reader) {
  std::mt19937_64 random(200 + static_cast<uint64_t>(reader));
  std::vector<int64_t> keys(kBatch);
  std::vector<float> out(kBatch * kDim);
  const std::unique_ptr<bool[]> found(new bool[kBatch]);
  while (!stop.load()) {
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 4000);
    table.fetch(keys.data(), kBatch, out.data(), found.get());
    for (size_t i = 0; i < kBatch; ++i) found[i] ? check(&out[i * kDim], keys[i]) : check_zeros(&out[i * kDim]);
    rows_checked.fetch_add(kBatch);
  }
}

// Inserting and evicting 50 times the capacity in fresh keys must leave no trace: not in the place of keys, and not in
// the length of a probe for an absent key.
void churn_an_index() {
  constexpr int64_t kCapacity = 1000;
  BucketIndex index(kCapacity);
  const auto longest_walk = [&] {
    uint64_t longest = 0, run = 0;
    for (uint64_t i = 0; i < 2 * index.bucket_count(); ++i) {
      run = index.view().buckets[i % index.bucket_count()].passed.load() ? run + 1 : 0;
      longest = std::max(longest, run);
    }
    return longest;
  };
  for (int64_t key = 0; key < 51 * kCapacity; ++key) {
    if (key >= kCapacity) index.erase(key - kCapacity, *index.find(key - kCapacity));
    index.insert(key, static_cast<uint32_t>(key));
    // A walk reads the whole index, which is slow under the sanitizers; what churn leaves behind stays.
    if (key % 100 == 0) require(longest_walk() <= 64, "churn lengthened the probes for absent keys");
  }
  for (int64_t key = 50 * kCapacity; key < 51 * kCapacity; ++key) {
    require(index.row_at(*index.find(key)) == key, "churn lost a key");
    index.erase(key, *index.find(key));
  }
  require(longest_walk() == 0 && index.longest_probe() == 0, "an emptied index remembers keys");
}

// More readers at a time than one block of slots holds; the writer must see the earliest reader until it leaves.
void crowd_the_epochs() {
  Epochs epochs;
  const uint64_t first = epochs.end_epoch() + 1;
  std::vector<std::unique_ptr<Epochs::Reader>> readers;
  for (int i = 0; i < 200; ++i) {
    readers.push_back(std::make_unique<Epochs::Reader>(epochs));
    epochs.end_epoch();
    require(epochs.earliest_reader() == first, "a reader went unseen");
  }
  for (uint64_t i = 0; i < 200; ++i) {
    require(epochs.earliest_reader() == first + i, "a reader went unseen");
    readers[i].reset();
  }
  require(epochs.earliest_reader() == UINT64_MAX, "a reader that left is still seen");
}

// A row that a reader may hold is not reused before the reader has left.
void hold_back_a_retired_row() {
  Epochs epochs;
  RowArena arena(kDim * sizeof(float), 1, epochs);
  const uint32_t only = arena.take();
  arena.reserve_retired(1);
  auto reader = std::make_unique<Epochs::Reader>(epochs);
  arena.retire(only);
  std::atomic<bool> left{false};
  std::thread writer([&] {
    require(arena.take() == only, "there is only one row");
    require(left.load(), "a row was handed out under a reader");
  });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  left.store(true);
  reader.reset();
  writer.join();
}

// Two keys take turns in one slot, each time with another row. A reader that saw the row of the first key and then the
// second key would return the wrong row. The two loads are a nanosecond apart, so signals delay the reader in between.
void hold_up(int) {
  for (int i = 0; i < 2000; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
}

void share_one_slot() {
  constexpr int64_t kOurs = 1, kTheirs = 2;
  Epochs epochs;
  BucketIndex index(1);
  RowArena arena(kDim * sizeof(float), 64, epochs);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done.load()) {
      const Epochs::Reader stay(epochs);
      for (int i = 0; i < 100; ++i) {
        const Bucket& bucket = index.view().buckets[0];
        const uint32_t row = i % 2 ? bucket.row_of(kOurs, 0) : bucket.row_at_one_look(kOurs, 0);
        if (row != kNoRow) check(reinterpret_cast<const float*>(arena.row(row)), kOurs);
      }
    }
  });
  signal(SIGUSR1, hold_up);
  for (int turn = 0; turn < 60'000; ++turn) {
    const int64_t key = turn % 2 ? kOurs : kTheirs, other = kOurs + kTheirs - key;
    arena.reserve_retired(1);
    const uint32_t row = arena.take();
    fill(reinterpret_cast<float*>(arena.row(row)), key, turn % 1000);
    if (const auto place = index.find(other)) {
      arena.retire(index.row_at(*place));
      index.erase(other, *place);
    }
    index.insert(key, row);
    arena.end_epoch();
    arena.reclaim();
    pthread_kill(reader.native_handle(), SIGUSR1);
  }
  done.store(true);
  reader.join();
}

// A table in shared memory: its file is removed at once, and the memory stays.
std::unique_ptr<SharedArea> share(RowType row_type) {
  const std::string path = "/tmp/host_table_stress." + std::to_string(getpid());
  auto area = std::make_unique<SharedArea>(path, SharedShape{kDim, row_type, kFixed + kWriters * kBatch});
  unlink(path.c_str());
  return area;
}

// Callers refuse reserved keys, but a key may change to the mark of a free slot after that check: it must be absent.
void look_up_the_mark_of_a_free_slot() {
  HostTable table(kDim, 1, RowType::kFp32);
  KeyIndex index(1);
  bool found = true;
  int64_t row = 0;
  std::vector<float> out(kDim, -1.0f);
  table.fetch(&kEmpty, 1, out.data(), &found);
  index.find(&kEmpty, 1, &row);
  require(!found && row == -1, "a free slot was taken for a key");
  check_zeros(out.data());
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 4, "usage: host_table_stress <milliseconds> <avx2|portable> <fp32|int8>");
  use_avx2(std::string(argv[2]) == "avx2");
  churn_an_index();
  crowd_the_epochs();
  hold_back_a_retired_row();
  look_up_the_mark_of_a_free_slot();
  share_one_slot();
  const RowType row_type = std::string(argv[3]) == "int8" ? RowType::kInt8 : RowType::kFp32;
  HostTable table(kDim, kFixed + kWriters * kBatch, row_type);
  HostTable random(kDim, 500, row_type, OverflowPolicy::kEvictRandom, 400);
  HostTable least_used(kDim, 500, row_type, OverflowPolicy::kEvictLeastUsed, 400);
  HostTable oldest(kDim, 500, row_type, OverflowPolicy::kEvictOldest, 400);
  KeyIndex index(1);
  CorePool::shared().set_threads(3);
  const HugeArray large(size_t{200} << 20);  // its pages are taken by all threads
  for (size_t at = 0; at < large.bytes(); at += kPage) require(large.data()[at] == std::byte{0}, "memory is not zeroed");
  std::vector<int64_t> keys(kFixed);
  std::vector<float> rows(kFixed * kDim);
  for (int64_t key = 0; key < kFixed; ++key) {
    keys[static_cast<size_t>(key)] = key;
    fill(&rows[static_cast<size_t>(key) * kDim], key, 0);
  }
  table.insert(keys.data(), rows.data(), keys.size());

  HostTable shared(share(row_type), true);
  shared.insert(keys.data(), rows.data(), keys.size());

  std::vector<std::thread> threads;
  threads.emplace_back(replace_rows, std::ref(shared), 0);
  for (int i = 0; i < 2; ++i) threads.emplace_back(look_up, std::ref(shared), i, kBatch);
  threads.emplace_back(walk, std::ref(shared));
  for (int i = 0; i < kWriters; ++i) threads.emplace_back(replace_rows, std::ref(table), i);
  for (int i = 0; i < kReaders; ++i) threads.emplace_back(look_up, std::ref(table), i, i ? kBatch : kBigBatch);
  threads.emplace_back(look_up_pooled, std::ref(table));
  for (const size_t count : {size_t{4}, kBigBatch / 2})
    threads.emplace_back(look_up_in_one_call, std::vector<HostTable*>{&table, &shared, &table}, count);
  threads.emplace_back(walk, std::ref(table));
  for (int i = 0; i < 2; ++i) threads.emplace_back(number_keys, std::ref(index));
  for (HostTable* evicting : {&random, &least_used, &oldest}) {
    threads.emplace_back(overflow, std::ref(*evicting));
    for (int i = 0; i < 2; ++i) threads.emplace_back(look_up_what_overflows, std::ref(*evicting), i);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(argv[1])));
  stop.store(true);
  for (auto& thread : threads) thread.join();

  for (const HostTable* written : {&table, &shared})
    require(written->rows() == kFixed, "rows were lost or left over");
  require(table.longest_probe() <= 16, "churn lengthened the probes");
  for (HostTable* evicting : {&random, &least_used, &oldest})
    require(evicting->evicted_rows() > 0 && evicting->longest_probe() <= 24, "a table that overflows is not as it was");
  std::printf("%s %lld rows checked\n", lookup_loops().name, static_cast<long long>(rows_checked.load()));
}
