// CUDA C++ on the CPU: included before a .cu file that g++ compiles, in place of what nvcc and NVRTC build in.
//
// Offered is what Hotrow's kernels use: intrinsics of warps, atomics, cache hints, bits and exact floats. Missing are
// inline PTX, cp.async, TMA, cooperative groups, the toolkit's headers, and textures; a kernel that needs one of them
// keeps it in a function of its own with another body under HOTROW_RUNNER.
#pragma once
#include "arithmetic.h"
#include "atomics.h"
#include "entry.h"
#include "memory.h"
#include "qualifiers.h"
#include "vectors.h"
#include "warp.h"
