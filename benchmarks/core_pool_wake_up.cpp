// The time until a second thread works: lines "<pause> <pool> <condition variable>", medians in microseconds.
//
//   core_pool_wake_up CALLS
//
// Pool: from the call of run to the first line of a chunk on a helper thread. The peer is a condition variable.
// The pause between two calls is 200 us, so that thread and core sleep, or 20 us, as between the tables of one batch.
// Caller and sleeper are pinned to different cores: on one core a thread wakes in a fifth of the time without any gain.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "lookup/core_pool.hpp"

using Clock = std::chrono::steady_clock;

namespace {

double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

// Two chunks that wait for each other, so that a helper runs one of them.
double wake_the_pool() {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> here{0};
  Clock::time_point awake;
  const auto start = Clock::now();
  hotrow::CorePool::shared().run(2, [&](size_t) {
    if (std::this_thread::get_id() != caller) awake = Clock::now();
    here.fetch_add(1);
    while (here.load() < 2) {
    }
  });
  return microseconds(awake - start);
}

void bind_to(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) != 0) std::perror("sched_setaffinity");
}

class Sleeper {
 public:
  explicit Sleeper(int core)
      : thread_([this, core] {
          bind_to(core);
          serve();
        }) {}
  ~Sleeper() {
    call(-1);
    thread_.join();
  }

  double wake() {
    const auto start = Clock::now();
    call(calls_ + 1);
    while (answered_.load() != calls_) {
    }
    return microseconds(awake_ - start);
  }

 private:
  void call(int number) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      calls_ = number;
    }
    called_.notify_one();
  }

  void serve() {
    for (int seen = 0; seen >= 0;) {
      std::unique_lock<std::mutex> lock(mutex_);
      called_.wait(lock, [&] { return calls_ != seen; });
      awake_ = Clock::now();
      seen = calls_;
      answered_.store(seen);
    }
  }

  std::mutex mutex_;
  std::condition_variable called_;
  int calls_ = 0;
  std::atomic<int> answered_{0};
  Clock::time_point awake_;
  std::thread thread_;  // last, because it uses the other members
};

// The caller spins: a sleeping caller would itself wake late.
void pause(int pause_us) {
  const auto start = Clock::now();
  while (microseconds(Clock::now() - start) < pause_us) {
  }
}

// The median time of `calls` calls of `wake`, each after a pause.
template <class Wake>
double median(size_t calls, int pause_us, const Wake& wake) {
  std::vector<double> times;
  for (size_t i = 0; i < calls; ++i) {
    pause(pause_us);
    times.push_back(wake());
  }
  std::nth_element(times.begin(), times.begin() + calls / 2, times.end());
  return times[calls / 2];
}

void measure(size_t calls, int core, int other_core) {
  bind_to(core);
  hotrow::CorePool::shared().set_threads(2);
  wake_the_pool();
  Sleeper sleeper(other_core);
  for (const int pause_us : {200, 20}) {
    const double pool = median(calls, pause_us, [] { return wake_the_pool(); });
    const double variable = median(calls, pause_us, [&] { return sleeper.wake(); });
    std::printf("%d %.3f %.3f\n", pause_us, pool, variable);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) < 2) return 3;
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  // On a new thread, because the pool's helpers inherit the affinity of the process's first thread.
  std::thread(measure, static_cast<size_t>(std::atoi(argv[1])), cores[0], cores[1]).join();
}
