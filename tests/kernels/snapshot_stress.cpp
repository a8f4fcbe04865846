// Parallel readers of one snapshot, and then of a file that is truncated while they read, for the sanitizers. Exits 0
// if every answer was right and every reader got the error.
//
//   snapshot_stress <milliseconds> <file>
//
// Every column of a row holds its key.
#include <fcntl.h>
#include <unistd.h>

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
#include "snapshot/snapshot.hpp"
#include "snapshot/snapshot_writer.hpp"

using namespace hotrow;

namespace {

constexpr uint32_t kDim = 12;
constexpr int64_t kRows = 50'000;
constexpr size_t kBatch = 100;
constexpr size_t kBigBatch = 20'000;  // shared over the cores
constexpr int64_t kBagKeys = 3;

std::atomic<int64_t> rows_checked{0};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void write_snapshot(const std::string& path) {
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  require(file >= 0, "the file cannot be made");
  SnapshotWriter writer(file, kDim, kRows, RowType::kFp32);
  std::vector<float> row(kDim);
  for (int64_t key = 0; key < kRows; ++key) {
    std::fill(row.begin(), row.end(), static_cast<float>(key));
    writer.append(&key, row.data(), 1);
  }
  const unsigned char source[kSourceBytes] = {};
  writer.finish(source);
  close(file);
}

// Twice as many keys as the snapshot has: half of them are absent.
void draw(std::mt19937_64& random, std::vector<int64_t>& keys) {
  for (int64_t& key : keys) key = static_cast<int64_t>(random() % (2 * kRows));
}

void check(int64_t key, bool found, const float* row) {
  require(found == (key < kRows), "a key was found that is not there, or the other way round");
  for (uint32_t c = 0; c < kDim; ++c) require(row[c] == (found ? static_cast<float>(key) : 0.0f), "a wrong row");
}

void look_up(Snapshot& snapshot, std::mt19937_64& random, size_t batch) {
  std::vector<int64_t> keys(batch);
  std::vector<float> out(batch * kDim);
  const std::unique_ptr<bool[]> found(new bool[batch]);
  draw(random, keys);
  snapshot.fetch(keys.data(), batch, out.data(), found.get());
  for (size_t i = 0; i < batch; ++i) check(keys[i], found[i], &out[i * kDim]);
  rows_checked.fetch_add(static_cast<int64_t>(batch));
}

void look_up_pooled(Snapshot& snapshot, std::mt19937_64& random, size_t bags) {
  std::vector<int64_t> keys(bags * kBagKeys), row_ptrs(bags + 1);
  std::vector<float> out(bags * kDim);
  const std::unique_ptr<bool[]> found(new bool[keys.size()]);
  draw(random, keys);
  for (size_t bag = 0; bag <= bags; ++bag) row_ptrs[bag] = static_cast<int64_t>(bag) * kBagKeys;
  snapshot.fetch_pooled(keys.data(), {row_ptrs.data(), bags, Combiner::kSum, nullptr}, out.data(), found.get());
  for (size_t bag = 0; bag < bags; ++bag) {
    float sum = 0.0f;
    for (size_t i = bag * kBagKeys; i < (bag + 1) * kBagKeys; ++i)
      if (keys[i] < kRows) sum += static_cast<float>(keys[i]);
    for (uint32_t c = 0; c < kDim; ++c) require(out[bag * kDim + c] == sum, "a wrong sum");
  }
}

// Read until the file is truncated. From then on every call must fail; a call that succeeds checks its rows.
template <class Read>
void read_until_cut(const Read& read) {
  try {
    for (;;) read();
  } catch (const FileFault& fault) {
    require(fault.reason.find(" bytes") != std::string::npos, fault.reason.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 3, "usage: snapshot_stress <milliseconds> <file>");
  const std::string path = argv[2];
  write_snapshot(path);
  CorePool::shared().set_threads(3);
  Snapshot snapshot(path);
  std::vector<std::thread> threads;
  for (const size_t batch : {kBatch, kBigBatch, kBigBatch})
    threads.emplace_back([&snapshot, batch, seed = threads.size()] {
      std::mt19937_64 random(seed);
      read_until_cut([&] {
        look_up(snapshot, random, batch);
        look_up_pooled(snapshot, random, batch);
      });
    });
  threads.emplace_back([&] {
    read_until_cut([&] {
      Snapshot(path).populate(0, snapshot.file_bytes());
      snapshot.check_content();
    });
    snapshot.populate(0, snapshot.file_bytes());  // of a truncated file: nothing happens
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(argv[1])));
  require(truncate(path.c_str(), 2 * static_cast<off_t>(kSnapshotPage)) == 0, "the file cannot be cut short");
  for (auto& thread : threads) thread.join();
  require(rows_checked.load() > 0, "nothing was read");
  std::printf("%lld rows checked\n", static_cast<long long>(rows_checked.load()));
}
