#include "core_pool.hpp"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hotrow {
namespace {

#if defined(__linux__)
constexpr bool kHasFutex = true;

// Sleep until woken, unless the word has changed. May also return for no reason.
void wait_on(const std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word, size_t sleepers) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, static_cast<int>(sleepers), nullptr, nullptr, 0);
}

// Those of the process: the calling thread may be bound to one of them.
bool read_usable_cores(cpu_set_t& cores) { return sched_getaffinity(getpid(), sizeof cores, &cores) == 0; }

unsigned usable_cores() {
  cpu_set_t cores;
  return read_usable_cores(cores) ? static_cast<unsigned>(CPU_COUNT(&cores)) : std::thread::hardware_concurrency();
}

int this_core() { return sched_getcpu(); }

void name_helper(pthread_t thread) { pthread_setname_np(thread, "hotrow-lookup"); }

// Where that leaves no core, the system refuses, and the thread may run where it could before.
void keep_off(const std::vector<pthread_t>& threads, int core) {
  cpu_set_t cores;
  if (core < 0 || core >= CPU_SETSIZE || !read_usable_cores(cores)) return;
  CPU_CLR(core, &cores);
  for (const pthread_t thread : threads) pthread_setaffinity_np(thread, sizeof cores, &cores);
}
#else
constexpr bool kHasFutex = false;
void wait_on(const std::atomic<uint32_t>&, uint32_t) { std::this_thread::yield(); }
void wake(const std::atomic<uint32_t>&, size_t) {}
unsigned usable_cores() { return 1; }
int this_core() { return -1; }
void name_helper(pthread_t) {}
void keep_off(const std::vector<pthread_t>&, int) {}
#endif

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

CorePool& CorePool::shared() {
  static CorePool* const pool = new CorePool;
  return *pool;
}

CorePool::CorePool() : threads_(std::clamp(usable_cores(), 1u, kDefaultMaxThreads)) {
  pthread_atfork(nullptr, nullptr, &forget_helpers_after_fork);
  std::atexit(&end_with_the_process);
}

// The pool stays taken: whoever still looks rows up works alone.
void CorePool::end_with_the_process() {
  shared().take_waiting();
  shared().stop_helpers();
}

void CorePool::take_waiting() {
  while (!take()) std::this_thread::yield();
}

void CorePool::set_threads(unsigned threads) {
  take_waiting();
  stop_helpers();
  starts_failed_ = false;
  threads_.store(threads, std::memory_order_relaxed);
  give_back();
}

void CorePool::run_alone(const Job& job) {
  for (size_t chunk = 0; chunk < job.chunks; ++chunk) job.call(job.work, chunk);
}

// Between enter() and leave() a helper reads the job; so it is written before the gate opens (release, acquired by
// enter) and stays until the last one has left (release, acquired by close_and_wait).
void CorePool::share(const Job& job) {
  if (helpers_.empty() && !starts_failed_) start_helpers();
  if (helpers_.empty()) {
    give_back();
    return run_alone(job);
  }
  leave_the_callers_core();
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  inside_.store(kOpen, std::memory_order_release);
  calls_.fetch_add(1, std::memory_order_release);
  wake(calls_, std::min(helpers_.size(), job.chunks - 1));
  work_on_chunks();
  close_and_wait();
  const std::exception_ptr error = std::exchange(error_, nullptr);
  has_error_.store(false, std::memory_order_relaxed);
  give_back();
  if (error) std::rethrow_exception(error);
}

// The system often wakes a thread on the core of the one that wakes it, above all after a pause. That core is about to
// be busy, and the thread would sit there until the lookup is over.
void CorePool::leave_the_callers_core() {
  const int core = this_core();
  if (core == left_core_) return;
  keep_off(helpers_, core);
  left_core_ = core;
}

void CorePool::work_on_chunks() {
  try {
    for (size_t chunk; (chunk = next_.fetch_add(1, std::memory_order_relaxed)) < job_.chunks;)
      job_.call(job_.work, chunk);
  } catch (...) {
    if (!has_error_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    next_.store(job_.chunks, std::memory_order_relaxed);
  }
}

// A helper is mostly about to end its last chunk: look a while before going to sleep, about as long as a chunk takes.
void CorePool::close_and_wait() {
  constexpr int kLooks = 2000;
  inside_.fetch_and(~kOpen, std::memory_order_relaxed);
  for (int look = 0; look < kLooks; ++look) {
    if (inside_.load(std::memory_order_acquire) == 0) return;
    pause_briefly();
  }
  while (const uint32_t inside = inside_.load(std::memory_order_acquire)) wait_on(inside_, inside);
}

bool CorePool::enter() {
  uint32_t inside = inside_.load(std::memory_order_relaxed);
  while (inside & kOpen)
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
  return false;
}

void CorePool::leave() {
  if (inside_.fetch_sub(1, std::memory_order_release) == 1) wake(inside_, 1);
}

// Look out for a new call for a moment: where one model's tables are looked up one after the other, the next call comes
// soon, and finds a helper that need not be woken.
void CorePool::look_out(uint32_t seen) const {
  constexpr auto kMoment = std::chrono::microseconds(50);
  constexpr int kLooks = 64;  // per look at the clock
  const auto end = std::chrono::steady_clock::now() + kMoment;
  do
    for (int look = 0; look < kLooks; ++look) {
      if (calls_.load(std::memory_order_relaxed) != seen) return;
      pause_briefly();
    }
  while (std::chrono::steady_clock::now() < end);
}

// A helper's life. One that comes late may enter a later job than the one it was called for, or find the gate shut.
void CorePool::serve() {
  uint32_t seen = 0;  // before any call: the first one a helper hears of is new to it
  for (;;) {
    uint32_t call;
    while ((call = calls_.load(std::memory_order_acquire)) == seen) wait_on(calls_, seen);
    seen = call;
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;
    work_on_chunks();
    leave();
    look_out(seen);
  }
}

void* CorePool::help(void* pool) {
  static_cast<CorePool*>(pool)->serve();
  return nullptr;
}

// Signals that are sent are for threads that know what to do with them; a fault is the business of its own thread.
void CorePool::start_helpers() {
  sigset_t all, before;
  sigfillset(&all);
  for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const unsigned wanted = threads() - 1;
  helpers_.reserve(wanted);
  while (kHasFutex && helpers_.size() < wanted) {
    pthread_t helper;
    if (pthread_create(&helper, nullptr, &help, this) != 0) break;
    name_helper(helper);
    helpers_.push_back(helper);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  starts_failed_ = helpers_.empty();
  left_core_ = -1;
}

void CorePool::stop_helpers() {
  stop_.store(true, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_release);  // publishes stop_
  wake(calls_, helpers_.size());
  for (const pthread_t helper : helpers_) pthread_join(helper, nullptr);
  helpers_.clear();
  stop_.store(false, std::memory_order_relaxed);
}

// In a forked child, where only the forking thread lives: it is in no job, whoever was is gone.
void CorePool::forget_helpers_after_fork() {
  CorePool& pool = shared();
  pool.helpers_.clear();
  pool.starts_failed_ = false;
  pool.stop_.store(false, std::memory_order_relaxed);
  pool.inside_.store(0, std::memory_order_relaxed);
  pool.has_error_.store(false, std::memory_order_relaxed);
  pool.give_back();
}

}  // namespace hotrow
