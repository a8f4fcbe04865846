// CUDA C++ on the CPU: g++ includes this file before a .cu file. It replaces the built-ins of nvcc and NVRTC.
//
// It offers what Hotrow's kernels use: warp intrinsics, atomics, cache hints, bit operations and exact floats. It does
// not offer inline PTX, cp.async, TMA, cooperative groups, the toolkit's headers, or textures. A kernel that needs one
// of these features puts it into a separate function, with another body under HOTROW_RUNNER.
#pragma once
#include "arithmetic.h"
#include "atomics.h"
#include "entry.h"
#include "memory.h"
#include "qualifiers.h"
#include "vectors.h"
#include "warp.h"
