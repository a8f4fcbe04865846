// Release Python's lock for the length of a scope.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace hotrow {

// What nb::gil_scoped_release does, and more at the interpreter's end. A daemon thread that asks for the lock then is
// ended by Python up to 3.13 with pthread_exit, whose unwinding no destructor here may let through: the process would
// abort. Such a thread stays where it is until the process is gone, as Python itself has it from 3.14 on.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // of pthread_exit: Python throws nothing
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace hotrow
