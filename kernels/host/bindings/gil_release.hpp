// Release Python's lock for the length of a scope.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace hotrow {

// As nb::gil_scoped_release, except at the interpreter's end. Python up to 3.13 then ends a daemon thread that asks for
// the lock with pthread_exit. Its unwinding must not leave a destructor, or the process aborts. So such a thread stops
// here until the process is gone, as in Python 3.14 and later.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // from pthread_exit: Python throws nothing
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace hotrow
