// Several callers of one pool while its size changes, for the sanitizers. Exits 0 if every chunk of every job ran once
// before the job returned.
//
//   core_pool_stress <milliseconds>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "lookup/core_pool.hpp"

using hotrow::CorePool;

namespace {

std::atomic<bool> stop{false};
std::atomic<int64_t> jobs{0};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Plain numbers on purpose: the thread sanitizer reports a chunk that still runs after its job has returned.
void run_one_job(size_t chunks) {
  std::vector<int> done(chunks);
  CorePool::shared().run(chunks, [&](size_t chunk) { ++done[chunk]; });
  for (const int times : done) require(times == 1, "a chunk was not done exactly once");
  jobs.fetch_add(1);
}

void run_a_job_that_fails(size_t chunks) {
  std::atomic<size_t> begun{0};
  bool failed = false;
  try {
    CorePool::shared().run(chunks, [&](size_t) {
      begun.fetch_add(1);
      throw std::runtime_error("on purpose");
    });
  } catch (const std::runtime_error&) {
    failed = true;
  }
  require(failed && begun.load() >= 1, "a chunk's exception was lost");
}

void call(size_t most_chunks) {
  for (size_t round = 0; !stop.load(); ++round) {
    run_one_job(round % most_chunks);
    if (round % 64 == 0) run_a_job_that_fails(1 + round % most_chunks);
  }
}

void resize() {
  for (unsigned threads = 1; !stop.load(); threads = threads % 5 + 1) {
    CorePool::shared().set_threads(threads);
    std::this_thread::yield();
  }
}

// Two chunks that wait for each other: they need two threads.
void meet_a_helper() {
  CorePool::shared().set_threads(2);
  std::atomic<int> here{0};
  CorePool::shared().run(2, [&](size_t) {
    here.fetch_add(1);
    while (here.load() < 2) std::this_thread::yield();
  });
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 2, "usage: core_pool_stress <milliseconds>");
  meet_a_helper();
  std::vector<std::thread> threads;
  for (size_t caller = 0; caller < 3; ++caller) threads.emplace_back(call, 3 + 20 * caller);
  threads.emplace_back(resize);
  std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(argv[1])));
  stop.store(true);
  for (auto& thread : threads) thread.join();
  std::printf("%lld jobs\n", static_cast<long long>(jobs.load()));
}
