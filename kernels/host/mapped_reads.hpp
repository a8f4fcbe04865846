// Reads of a mapped file that another process may truncate meanwhile.
//
// The kernel answers a read beyond a file's end, or one that the disk fails, with SIGBUS, which by default ends the
// process. `read_mapped` runs a reader under a handler that takes faults inside the mapping as "could not be read" and
// leaves the reader with a long jump. Every other SIGBUS goes to the previous handler, such as Python's faulthandler.
// The handler is installed once, when the first file is mapped. A handler that is installed later must pass on other
// faults: it calls this handler or, as faulthandler does after its report, raises the signal again. A thread that
// blocks SIGBUS is not protected.
#pragma once

#include <setjmp.h>

#include <atomic>
#include <cstddef>

namespace hotrow {

// What one thread is reading now; readers may nest.
struct MappedRead {
  const std::byte* begin;
  const std::byte* end;
  MappedRead* outer;
  sigjmp_buf leave;
};

// By thread; initial-exec, for the handler must not meet the allocation of a thread's storage.
extern thread_local MappedRead* current_mapped_read __attribute__((tls_model("initial-exec")));

// Any thread; only the first call does something.
void install_mapped_read_handler();

// Run `read()`; false where a byte of [begin, begin + bytes) could not be read. It may then have stopped anywhere, its
// destructors not run: it must own nothing, and neither throw nor call what may.
template <class Read>
__attribute__((noinline)) bool read_mapped(const std::byte* begin, size_t bytes, const Read& read) {
  MappedRead now{begin, begin + bytes, current_mapped_read, {}};
  if (sigsetjmp(now.leave, 0) != 0) {  // 0: the handler restores the mask, which costs a reader nothing
    current_mapped_read = now.outer;
    return false;
  }
  current_mapped_read = &now;
  std::atomic_signal_fence(std::memory_order_seq_cst);  // no read before the handler knows of it
  read();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  current_mapped_read = now.outer;
  return true;
}

}  // namespace hotrow
