// Reads of a mapped file that another process may truncate during the read.
//
// A read beyond a file's end, or a read that the disk fails, raises SIGBUS, which by default ends the process.
// `read_mapped` runs a reader under a handler. After a fault inside the mapping, the handler leaves the reader with a
// long jump. Every other SIGBUS goes to the previous handler, such as Python's faulthandler.
// The handler is installed once, when the first file is mapped. A handler that is installed later must pass on other
// faults: it calls this handler or, as faulthandler does after its report, raises the signal again. A thread that
// blocks SIGBUS is not protected.
#pragma once

#include <setjmp.h>

#include <atomic>
#include <cstddef>

namespace hotrow {

// The running read of one thread. Readers may nest.
struct MappedRead {
  const std::byte* begin;
  const std::byte* end;
  MappedRead* outer;
  sigjmp_buf leave;
};

// One per thread; initial-exec, because the handler must not allocate a thread's storage.
extern thread_local MappedRead* current_mapped_read __attribute__((tls_model("initial-exec")));

// Any thread may call it. Only the first call has an effect.
void install_mapped_read_handler();

// Run `read()`; false if a byte of [begin, begin + bytes) could not be read. `read` may then have stopped anywhere,
// without its destructors: it must own nothing, throw nothing, and call nothing that throws.
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
