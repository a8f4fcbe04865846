#include "memory/mapped_reads.hpp"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

namespace hotrow {

thread_local MappedRead* current_mapped_read __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

struct sigaction previous;  // written once, before the handler is installed

void pass_on(int signal, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  const bool was_sent = info->si_code <= 0;  // by kill, not by a fault
  if (was_sent && previous.sa_handler == SIG_IGN) return;
  ::signal(signal, SIG_DFL);
  if (was_sent) ::raise(signal);  // a fault happens again by itself
}

// Whether the thread's running read faulted. Readers raise no signal: if a reader seems to, another handler was called
// first and passed the fault on.
bool is_fault_of(const MappedRead& now, const siginfo_t& info) {
  if (info.si_code == SI_TKILL) return info.si_pid == getpid();
  const auto* at = static_cast<const std::byte*>(info.si_addr);
  return info.si_code > 0 && at >= now.begin && at < now.end;
}

// The mask that is restored is the one before the fault: a handler that was called first may have blocked signals.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  MappedRead* now = current_mapped_read;
  if (!now || !is_fault_of(*now, *info)) return pass_on(signal, info, context);
  pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
  siglongjmp(now->leave, 1);
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // NODEFER: a long jump leaves the signal unblocked
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, nullptr, &previous) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;  // cannot fail
}

}  // namespace

void install_mapped_read_handler() {
  static const bool installed = install();
  (void)installed;
}

}  // namespace hotrow
