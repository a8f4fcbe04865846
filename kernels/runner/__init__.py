"""The kernel runner: runs ``kernels/cuda`` on the CPU, for tests, sanitizers and debugging. It is not fast."""
