// Shared memory whose size the launch decides. A kernel says HOTROW_DYNAMIC_SHARED(type, name); all names of a kernel
// are the same memory, aligned to 16 bytes.
#pragma once

#ifdef HOTROW_RUNNER
#define HOTROW_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(cpu_dynamic_shared())
#else
#define HOTROW_DYNAMIC_SHARED(type, name)                      \
  extern __shared__ __align__(16) unsigned char hotrow_dynamic[]; \
  type* const name = reinterpret_cast<type*>(hotrow_dynamic)
#endif
