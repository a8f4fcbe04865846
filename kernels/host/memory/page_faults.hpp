// Whether this thread has waited for the disk to fill a page.
#pragma once

#include <sys/resource.h>

#include <cstddef>

namespace hotrow {

class PageFaults {
 public:
  // Starts to count for a lookup of `keys` keys. A few keys are not worth the two system calls.
  explicit PageFaults(size_t keys) : counts_(keys > kFewKeys), before_(counts_ ? now() : 0) {}

  bool have_waited() const { return counts_ && now() != before_; }

 private:
  static constexpr size_t kFewKeys = 64;

  static long now() {
    rusage usage = {};
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_majflt : 0;
  }

  bool counts_;
  long before_;
};

}  // namespace hotrow
