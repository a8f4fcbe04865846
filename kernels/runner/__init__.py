"""The kernel runner: ``kernels/cuda`` on the CPU, for tests, for sanitizers and for reading along. Never fast."""
