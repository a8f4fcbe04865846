// Run a grid on a few OS threads. Each OS thread runs one block after another.
#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "block.hpp"

namespace cpu {
namespace {

// A fuzzed schedule permutes the blocks: it multiplies their numbers by a factor that is coprime to their count.
uint64_t block_at(uint64_t turn, uint64_t blocks, uint64_t seed) {
  if (!seed) return turn;
  uint64_t factor = seed % blocks | 1;
  while (std::__gcd(factor, blocks) != 1) factor += 2;
  return static_cast<uint64_t>((static_cast<unsigned __int128>(turn) * factor + seed) % blocks);
}

void run_blocks(Launch& launch, uint64_t blocks) {
  static thread_local Block block;  // keeps its stacks from launch to launch
  launch.prepare();
  for (;;) {
    const uint64_t turn = launch.next_block++;
    if (turn >= blocks || launch.has_failed()) return;
    block.run(launch, block_at(turn, blocks, launch.seed));
  }
}

// The other OS threads of a thread that launches kernels. They stay from launch to launch, as their blocks do.
class OtherThreads {
 public:
  OtherThreads() = default;
  OtherThreads(const OtherThreads&) = delete;
  OtherThreads& operator=(const OtherThreads&) = delete;

  ~OtherThreads() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    begin_.notify_all();
    for (std::thread& each : threads_) each.join();
  }

  // Run blocks on `count` of these threads and on the calling thread, until all have ended.
  void run(unsigned count, Launch& launch, uint64_t blocks) {
    while (threads_.size() < count) threads_.emplace_back([this] { work(); });
    {
      std::lock_guard lock(mutex_);
      launch_ = &launch;
      blocks_ = blocks;
      called_ = busy_ = count;
    }
    begin_.notify_all();
    run_blocks(launch, blocks);
    std::unique_lock lock(mutex_);
    end_.wait(lock, [this] { return !busy_; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      begin_.wait(lock, [this] { return called_ || ended_; });
      if (ended_) return;
      --called_;
      lock.unlock();
      run_blocks(*launch_, blocks_);
      lock.lock();
      if (!--busy_) end_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable begin_, end_;
  Launch* launch_ = nullptr;
  uint64_t blocks_ = 0;
  unsigned called_ = 0, busy_ = 0;  // threads that have to begin, and those that have to end
  bool ended_ = false;
};

}  // namespace
}  // namespace cpu

// Run `kernel` and return 0, or return 1 and write a message. `prepare` is of the kernel's library. `shape` is x, y and
// z of the grid and then of the block, each at least 1, with at most 1024 threads per block. `seed` 0 is the fixed
// schedule.
extern "C" int hotrow_runner_launch(cpu::Kernel kernel, cpu::Prepare prepare, void** arguments, const unsigned* shape,
                                    size_t shared_bytes, unsigned os_threads, uint64_t seed, char* message,
                                    size_t message_bytes) {
  cpu::Launch launch;
  launch.kernel = kernel;
  launch.prepare = prepare;
  launch.arguments = arguments;
  launch.grid = {shape[0], shape[1], shape[2]};
  launch.block = {shape[3], shape[4], shape[5]};
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  launch.message = message;
  launch.message_bytes = message_bytes;
  const uint64_t blocks = static_cast<uint64_t>(shape[0]) * shape[1] * shape[2];
  // On the heap: the loader frees a thread's own memory in another thread, which ThreadSanitizer takes for a race.
  static thread_local const auto others = std::make_unique<cpu::OtherThreads>();
  others->run(static_cast<unsigned>(std::min<uint64_t>(os_threads, blocks)) - 1, launch, blocks);
  return launch.has_failed() ? 1 : 0;
}
