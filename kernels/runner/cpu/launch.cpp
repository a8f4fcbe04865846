// Run a grid on a few OS threads. Each OS thread runs one block after another.
#include <algorithm>
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
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min<uint64_t>(os_threads, blocks); ++i)
    others.emplace_back([&launch, blocks] { cpu::run_blocks(launch, blocks); });
  cpu::run_blocks(launch, blocks);
  for (std::thread& other : others) other.join();
  return launch.has_failed() ? 1 : 0;
}
