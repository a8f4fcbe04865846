// One block of a launch, which runs on one OS thread: its fibers, what each fiber waits for, and failures.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "schedule.hpp"
#include "thread.h"

namespace cpu {

using Kernel = void (*)(void** arguments);
using Prepare = void (*)();

// The state that all blocks of a launch share.
struct Launch {
  Kernel kernel;
  Prepare prepare;  // called once on each OS thread, before its first block
  void** arguments;
  dim3 grid, block;
  size_t shared_bytes;
  uint64_t seed;
  std::atomic<uint64_t> next_block{0};
  std::atomic<bool> failed{false};
  char* message = nullptr;  // written once, by the thread that set `failed`
  size_t message_bytes = 0;

  bool has_failed() const { return failed.load(std::memory_order_relaxed); }
  void fail(const char* what);
};

enum class State : uint8_t { ready, in_warp, at_barrier, ended };

const char* collective_name(Collective kind);

struct Warp;

struct Fiber {
  Thread thread;
  void* stack_pointer;
  void* sanitizer;
  Warp* warp;
  State state;
  const char* file;  // of the collective or barrier it waits at
  int line;
  char fenced;  // sanitizer tag: its work before its last fence
};

// The arguments of the lanes that have arrived at a collective, until all lanes of the mask have arrived.
struct Warp {
  unsigned arrived = 0;
  unsigned mask[32];
  Collective kind[32];
  uint64_t value[32];
  int source[32];
  uint64_t result[32];
  char order[32];  // sanitizer tags: lanes that meet share the tag of the lowest lane

  void complete(unsigned lanes);
};

class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  void run(Launch& launch, uint64_t number);

  // Called on the running fiber.
  Fiber& running() { return *running_; }
  void give_turn();
  void preemption_point();
  void barrier(const char* file, int line);
  void fence();
  void publish(void* word);
  uint64_t collective(Collective kind, unsigned mask, uint64_t value, int source, const char* file, int line);
  [[noreturn]] void fail(const char* what);

 private:
  static void enter_fiber();
  void prepare(Launch& launch, uint64_t number);
  void prepare_stacks(unsigned threads);
  void forget_sanitizers();
  void place_fiber(unsigned number, uint3 block_index);
  void run_fibers();
  void to_scheduler();
  void wake(Fiber& fiber);
  void open_barrier();
  void check_partners(unsigned mask, Collective kind);
  void report_deadlock();
  static bool wait_alike(const Fiber& a, const Fiber& b);
  static int describe_wait(const Fiber& fiber, char* text, size_t bytes);

  Launch* launch_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<void*> sanitizers_;  // of each fiber; reused by later blocks, because they are slow to create
  std::vector<Warp> warps_;
  Schedule schedule_;
  std::vector<unsigned char> dynamic_shared_;
  char* stacks_ = nullptr;
  unsigned stack_count_ = 0;
  Fiber* running_ = nullptr;
  void* scheduler_stack_ = nullptr;
  void* scheduler_sanitizer_ = nullptr;
  void* publisher_ = nullptr;  // sees only the threads' work before their fences
  unsigned alive_ = 0, at_barrier_ = 0;
  uint64_t switches_ = 0;
  char begin_order_, end_order_, barrier_order_;  // sanitizer tags
};

}  // namespace cpu
