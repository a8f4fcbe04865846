// A few threads with which one big lookup shares its work over the cores.
//
// A job is a number of chunks that may be done in any order. The caller works too, and takes chunks from the same
// counter as the helpers. A helper that gets no core, or gets it late, has taken no chunk and costs nothing. At the end
// the caller waits only for chunks that helpers are still working on.
//
// There is one pool per process and one job at a time. A caller that finds the pool busy does all its chunks itself:
// it does not wait, because the cores are busy anyway.
//
// Helpers spin for 50 us and then wait on a condition variable. Waking a helper whose core sleeps too takes about 20 us
// on a virtual machine; the caller loses 6 us of them (Zen 4, KVM). This is far less than the work that is shared.
// Helpers start with the first shared job, block signals, and are joined when the process exits. A forked child starts
// its own helpers.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

namespace hotrow {

class CorePool {
 public:
  static constexpr unsigned kMaxThreads = 64;

  // The pool of this process. Never destroyed: threads that nobody joined may look rows up until the very end.
  static CorePool& shared();

  CorePool(const CorePool&) = delete;
  CorePool& operator=(const CorePool&) = delete;

  // Threads that may work on one job, its caller among them. At first 1: kernels/host.py knows how many to use.
  unsigned threads() const { return threads_.load(std::memory_order_relaxed); }

  // 1 <= threads <= kMaxThreads; 1: nothing is shared. Waits for the running job, if there is one.
  void set_threads(unsigned threads);

  // Call work(chunk) once for each chunk below `chunks`, on this thread and on the helpers; return when all are done.
  // Rethrows the first exception of a chunk, after which some chunks may not have been done.
  template <class Work>
  void run(size_t chunks, const Work& work) {
    const Job job{[](const void* at, size_t chunk) { (*static_cast<const Work*>(at))(chunk); }, &work, chunks};
    if (chunks < 2 || threads() < 2 || !take()) return run_alone(job);
    share(job);
  }

 private:
  struct Job {
    void (*call)(const void* work, size_t chunk);
    const void* work;
    size_t chunks;
  };
  static constexpr uint32_t kOpen = 1u << 31;

  CorePool();
  static void run_alone(const Job& job);
  static void* help(void* pool);
  static void end_with_the_process();
  static void forget_helpers_after_fork();

  bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }
  void take_waiting();
  void share(const Job& job);
  void start_helpers();
  void leave_the_callers_core();
  void stop_helpers();
  void serve();
  bool enter();
  void leave();
  void call_helpers(size_t helpers);
  uint32_t wait_for_call(uint32_t seen, bool spins);
  void work_on_chunks();
  void close_and_wait();

  std::atomic<unsigned> threads_{1};
  std::atomic<bool> taken_{false};  // its setter owns the pool: the fields up to next_, starting and stopping
  std::vector<pthread_t> helpers_;
  bool starts_failed_ = false;  // the system refused a thread: do not ask again at every lookup
  int left_core_ = -1;          // where no helper may run; -1: they may run anywhere
  Job job_{};
  std::exception_ptr error_;              // of the chunk that raised has_error_
  std::atomic<bool> has_error_{false};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> calls_{0};   // goes up by one, under mutex_, to wake the helpers
  alignas(64) std::atomic<uint32_t> inside_{0};  // helpers at the job, plus kOpen while helpers may join
  alignas(64) std::atomic<size_t> next_{0};      // the next chunk
  alignas(64) std::mutex mutex_;                 // taken only to sleep and to wake
  std::condition_variable called_;               // calls_ has changed
  std::condition_variable all_left_;             // inside_ has become 0
};

}  // namespace hotrow
