#include "block.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.hpp"
#include "sanitizer.hpp"

namespace cpu {
namespace {

constexpr size_t stack_bytes = 128 << 10;
constexpr uint64_t most_switches = 50'000'000;  // of one block, a few seconds: it will never end
constexpr unsigned patience = 64;                // uncached accesses before a thread must give up its turn

// The block whose fibers run on this OS thread. Never inlined, because the compiler must not keep the address across a
// switch of fibers.
thread_local Block* current_block = nullptr;
__attribute__((noinline)) Block& current() { return *current_block; }

uint64_t mix(uint64_t a, uint64_t b) {  // splitmix64's finish
  uint64_t x = a * 0x9e3779b97f4a7c15ull + b;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

}  // namespace

void Launch::fail(const char* what) {
  if (!failed.exchange(true)) snprintf(message, message_bytes, "%s", what);
}

Block::~Block() {
  sanitizer::leave(sanitizers_);
  if (publisher_) sanitizer::destroy(publisher_);
  if (stacks_) munmap(stacks_, stack_count_ * stack_bytes);
}

void Block::run(Launch& launch, uint64_t number) {
  prepare(launch, number);
  run_fibers();
  if (alive_ && !launch.has_failed()) report_deadlock();
  sanitizer::acquire(&end_order_);
  if (launch.has_failed()) forget_sanitizers();  // their shadow stacks still hold the abandoned calls
}

void Block::prepare(Launch& launch, uint64_t number) {
  launch_ = &launch;
  const dim3 shape = launch.block, grid = launch.grid;
  const unsigned threads = shape.x * shape.y * shape.z;
  prepare_stacks(threads);
  sanitizer::forget_frames(stacks_, threads * stack_bytes);
  fibers_.resize(threads);
  warps_.assign((threads + 31) / 32, Warp{});
  dynamic_shared_.assign(launch.shared_bytes + 15, 0xa5);  // a block must not read an earlier block's content
  schedule_.start(threads, launch.seed ? mix(launch.seed, number) | 1 : 0);
  alive_ = threads;
  at_barrier_ = 0;
  switches_ = 0;
  scheduler_sanitizer_ = sanitizer::current();
  if (!publisher_) publisher_ = sanitizer::create();  // before the threads begin: it sees what its creator did
  sanitizer::release(&begin_order_);
  const uint3 index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                       static_cast<unsigned>(number / (static_cast<uint64_t>(grid.x) * grid.y))};
  for (unsigned i = 0; i < threads; ++i) place_fiber(i, index);
}

void Block::forget_sanitizers() {
  for (void* each : sanitizers_) sanitizer::destroy(each);
  sanitizers_.clear();
  if (publisher_) sanitizer::destroy(publisher_);
  publisher_ = nullptr;
}

void Block::prepare_stacks(unsigned threads) {
  if (stack_count_ >= threads) return;
  if (stacks_) munmap(stacks_, stack_count_ * stack_bytes);
  void* stacks = mmap(nullptr, threads * stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    perror("kernel runner: no memory for the stacks of a block");
    abort();
  }
  stacks_ = static_cast<char*>(stacks);
  stack_count_ = threads;
}

void Block::place_fiber(unsigned number, uint3 block_index) {
  const dim3 shape = launch_->block;
  Fiber& fiber = fibers_[number];
  fiber = Fiber{};
  fiber.thread.index = {number % shape.x, number / shape.x % shape.y, number / (shape.x * shape.y)};
  fiber.thread.block_index = block_index;
  fiber.thread.block_dim = shape;
  fiber.thread.grid_dim = launch_->grid;
  fiber.thread.lane = number % 32;
  fiber.thread.fuzzed = schedule_.fuzzed();
  const uintptr_t shared = reinterpret_cast<uintptr_t>(dynamic_shared_.data());
  fiber.thread.dynamic_shared = reinterpret_cast<unsigned char*>((shared + 15) & ~uintptr_t{15});
  fiber.warp = &warps_[number / 32];
  fiber.stack_pointer = first_frame(stacks_ + (number + 1) * stack_bytes, &Block::enter_fiber);
  if (number == sanitizers_.size()) sanitizers_.push_back(sanitizer::take());
  fiber.sanitizer = sanitizers_[number];
  fiber.state = State::ready;
  schedule_.add(number);
}

void Block::run_fibers() {
  current_block = this;
  while (!schedule_.empty() && !launch_->has_failed()) {
    running_ = &fibers_[schedule_.take()];
    sanitizer::switch_to(running_->sanitizer);
    hotrow_switch_stack(&scheduler_stack_, running_->stack_pointer);
    if (++switches_ == most_switches) launch_->fail("a block does not end: its threads keep giving up their turns");
  }
  running_ = nullptr;
  current_block = nullptr;
}

void Block::enter_fiber() {
  Block& block = current();
  sanitizer::acquire(&block.begin_order_);
  block.launch_->kernel(block.launch_->arguments);
  sanitizer::release(&block.end_order_);
  block.running_->state = State::ended;
  --block.alive_;
  if (block.alive_ && block.at_barrier_ == block.alive_) block.open_barrier();  // it does not wait for ended threads
  for (;;) block.to_scheduler();
}

void Block::to_scheduler() {
  Fiber& fiber = *running_;
  sanitizer::switch_to(scheduler_sanitizer_);
  hotrow_switch_stack(&fiber.stack_pointer, scheduler_stack_);
}

void Block::wake(Fiber& fiber) {
  fiber.state = State::ready;
  schedule_.add(static_cast<unsigned>(&fiber - fibers_.data()));
}

void Block::give_turn() {
  running_->thread.accesses = 0;
  wake(*running_);
  to_scheduler();
}

void Block::preemption_point() {
  if (++running_->thread.accesses >= patience || schedule_.interrupts()) give_turn();
}

void Block::fence() {
  static char order;  // of the whole device: a later fence sees writes before an earlier fence
  sanitizer::release(&order);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  sanitizer::acquire(&order);
  sanitizer::release(&running_->fenced);
  preemption_point();
}

void Block::publish(void* word) {
  sanitizer::switch_to(publisher_);  // the thread itself would also publish its work since the fence
  sanitizer::acquire(&running_->fenced);
  sanitizer::release(word);
  sanitizer::switch_to(running_->sanitizer);
}

void Block::barrier(const char* file, int line) {
  Fiber& fiber = *running_;
  fiber.file = file;
  fiber.line = line;
  sanitizer::release(&barrier_order_);
  fiber.state = State::at_barrier;
  if (++at_barrier_ == alive_) open_barrier();
  to_scheduler();
  sanitizer::acquire(&barrier_order_);
}

void Block::open_barrier() {
  at_barrier_ = 0;
  const Fiber* first = nullptr;
  for (Fiber& fiber : fibers_) {
    if (fiber.state != State::at_barrier) continue;
    if (first && (fiber.line != first->line || strcmp(fiber.file, first->file) != 0)) {
      char what[256];
      snprintf(what, sizeof what, "__syncthreads of line %d met that of line %d: all threads must reach the same one",
               first->line, fiber.line);
      launch_->fail(what);
    }
    if (!first) first = &fiber;
    wake(fiber);
  }
}

void Block::fail(const char* what) {
  launch_->fail(what);
  for (;;) to_scheduler();  // never resumed: the launch has failed
}

// Whether two threads wait at the same place for the same lanes.
bool Block::wait_alike(const Fiber& a, const Fiber& b) {
  if (a.state != b.state || a.line != b.line || a.warp->mask[a.thread.lane] != b.warp->mask[b.thread.lane]) return false;
  return a.state == State::at_barrier || a.warp == b.warp;
}

void Block::report_deadlock() {
  constexpr unsigned most_named = 8;
  char text[1536];
  const uint3 block = fibers_[0].thread.block_index;
  int at = snprintf(text, sizeof text, "deadlock in block (%u, %u, %u), %u threads wait:", block.x, block.y, block.z, alive_);
  unsigned named = 0;
  for (unsigned first = 0, last; first < fibers_.size() && named < most_named; first = last + 1) {
    last = first;
    if (fibers_[first].state == State::ended) continue;
    while (last + 1 < fibers_.size() && wait_alike(fibers_[first], fibers_[last + 1])) ++last;
    ++named;
    at += snprintf(text + at, sizeof text - at, first == last ? " thread %u" : " threads %u to %u", first, last);
    at += describe_wait(fibers_[first], text + at, sizeof text - at);
  }
  launch_->fail(text);
}

int Block::describe_wait(const Fiber& fiber, char* text, size_t bytes) {
  if (fiber.state == State::at_barrier) return snprintf(text, bytes, " at __syncthreads, line %d;", fiber.line);
  const Warp& warp = *fiber.warp;
  const unsigned lane = fiber.thread.lane;
  return snprintf(text, bytes, " at %s, line %d, mask %08x of which %08x arrived;", collective_name(warp.kind[lane]),
                  fiber.line, warp.mask[lane], warp.arrived & warp.mask[lane]);
}

}  // namespace cpu

cpu::Thread* cpu_thread() { return &cpu::current().running().thread; }
void cpu_give_turn() { cpu::current().give_turn(); }
void cpu_preemption_point() { cpu::current().preemption_point(); }
void cpu_barrier(const char* file, int line) { cpu::current().barrier(file, line); }
void cpu_fence() { cpu::current().fence(); }
void cpu_publish(void* word) { cpu::current().publish(word); }
void cpu_consume(const void* word) { cpu::sanitizer::acquire(const_cast<void*>(word)); }
void cpu_fail(const char* message) { cpu::current().fail(message); }
uint64_t cpu_collective(cpu::Collective kind, unsigned mask, uint64_t value, int source, const char* file, int line) {
  return cpu::current().collective(kind, mask, value, source, file, line);
}
