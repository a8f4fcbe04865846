#include "lookup/core_pool.hpp"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace hotrow {
namespace {

#if defined(__linux__)
// The cores of the process: the calling thread may be bound to one of them.
bool read_usable_cores(cpu_set_t& cores) { return sched_getaffinity(getpid(), sizeof cores, &cores) == 0; }

int this_core() { return sched_getcpu(); }

void name_helper(pthread_t thread) { pthread_setname_np(thread, "hotrow-lookup"); }

// If no core is left, the system refuses, and the thread may run where it could before.
void keep_off(const std::vector<pthread_t>& threads, int core) {
  cpu_set_t cores;
  if (core < 0 || core >= CPU_SETSIZE || !read_usable_cores(cores)) return;
  CPU_CLR(core, &cores);
  for (const pthread_t thread : threads) pthread_setaffinity_np(thread, sizeof cores, &cores);
}
#else
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

CorePool::CorePool() {
  pthread_atfork(nullptr, nullptr, &forget_helpers_after_fork);
  std::atexit(&end_with_the_process);
}

// The pool stays taken: a thread that still looks rows up works alone.
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
  call_helpers(std::min(helpers_.size(), job.chunks - 1));
  work_on_chunks();
  close_and_wait();
  const std::exception_ptr error = std::exchange(error_, nullptr);
  has_error_.store(false, std::memory_order_relaxed);
  give_back();
  if (error) std::rethrow_exception(error);
}

// The system often wakes a thread on the core of its waker, above all after a pause. That core is about to be busy, and
// the woken thread would sit there until the lookup is over.
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

// Publishes what was written before.
void CorePool::call_helpers(size_t helpers) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.fetch_add(1, std::memory_order_release);
  }
  if (helpers == helpers_.size()) return called_.notify_all();
  for (size_t helper = 0; helper < helpers; ++helper) called_.notify_one();
}

// A helper is usually about to end its last chunk: spin about as long as a chunk takes, then sleep.
void CorePool::close_and_wait() {
  constexpr int kLooks = 2000;
  inside_.fetch_and(~kOpen, std::memory_order_relaxed);
  for (int look = 0; look < kLooks; ++look) {
    if (inside_.load(std::memory_order_acquire) == 0) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  all_left_.wait(lock, [this] { return inside_.load(std::memory_order_acquire) == 0; });
}

bool CorePool::enter() {
  uint32_t inside = inside_.load(std::memory_order_relaxed);
  while (inside & kOpen)
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
  return false;
}

void CorePool::leave() {
  if (inside_.fetch_sub(1, std::memory_order_release) != 1) return;
  { const std::lock_guard<std::mutex> lock(mutex_); }  // the caller sleeps by now, or has seen the 0
  all_left_.notify_one();
}

// Perhaps spin for a moment, then sleep: the tables of one model are looked up one after the other, so the next call
// often comes soon and finds a helper that is awake.
uint32_t CorePool::wait_for_call(uint32_t seen, bool spins) {
  constexpr auto kMoment = std::chrono::microseconds(50);
  constexpr int kLooks = 64;  // per look at the clock
  const auto end = std::chrono::steady_clock::now() + kMoment;
  while (spins && std::chrono::steady_clock::now() < end)
    for (int look = 0; look < kLooks; ++look) {
      const uint32_t calls = calls_.load(std::memory_order_acquire);
      if (calls != seen) return calls;
      pause_briefly();
    }
  std::unique_lock<std::mutex> lock(mutex_);
  called_.wait(lock, [&] { return calls_.load(std::memory_order_relaxed) != seen; });
  return calls_.load(std::memory_order_acquire);
}

// A helper's life. A helper that comes late may enter a later job than the job it was called for, or find the gate
// shut.
void CorePool::serve() {
  uint32_t seen = 0;  // 0 calls: every call is new to a new helper
  for (bool was_in_time = false;;) {
    seen = wait_for_call(seen, was_in_time);
    if (stop_.load(std::memory_order_relaxed)) return;
    was_in_time = enter();
    if (!was_in_time) continue;
    work_on_chunks();
    leave();
  }
}

void* CorePool::help(void* pool) {
  static_cast<CorePool*>(pool)->serve();
  return nullptr;
}

// Helpers block every signal that another process may send. A fault still reaches the thread that caused it.
void CorePool::start_helpers() {
  sigset_t all, before;
  sigfillset(&all);
  for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const unsigned wanted = threads() - 1;
  helpers_.reserve(wanted);
  while (helpers_.size() < wanted) {
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
  call_helpers(helpers_.size());
  for (const pthread_t helper : helpers_) pthread_join(helper, nullptr);
  helpers_.clear();
  stop_.store(false, std::memory_order_relaxed);
}

// In a forked child only the forking thread lives, and it works on no job. Helpers that are gone may have held the
// mutex or waited on the condition variables, so these are made again.
void CorePool::forget_helpers_after_fork() {
  CorePool& pool = shared();
  pool.helpers_.clear();
  pool.starts_failed_ = false;
  pool.stop_.store(false, std::memory_order_relaxed);
  pool.inside_.store(0, std::memory_order_relaxed);
  pool.has_error_.store(false, std::memory_order_relaxed);
  new (&pool.mutex_) std::mutex;
  new (&pool.called_) std::condition_variable;
  new (&pool.all_left_) std::condition_variable;
  pool.give_back();
}

}  // namespace hotrow
