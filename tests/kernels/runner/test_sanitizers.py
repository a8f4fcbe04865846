"""The sanitizers find races and accesses out of bounds, and a correct kernel passes."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sanitizers]

SCRIPT = """
import sys
import numpy as np
from kernels.device import open_device
runner = open_device("runner")
stream = runner.stream()
out = runner.zeros(64, np.int32)
with runner.scheduled(seed=1, os_threads=2):
    runner.kernel(sys.argv[1], "kernel")((2,), (64,), (out,), stream)
    stream.synchronize()
print("ran to its end")
"""
REVERSE = """extern "C" __global__ void kernel(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  BARRIER;
  if (blockIdx.x == 0) out[threadIdx.x] = values[63 - threadIdx.x];
}
"""
SUM_OF_A_WARP = """extern "C" __global__ void kernel(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  __ballot_sync(0xffffffffu, 1);
  BARRIER;
  if (blockIdx.x == 0) out[threadIdx.x] = values[threadIdx.x ^ 1];
}
"""
HAND_OVER = """extern "C" __global__ void kernel(int* out) {
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 1;
  FENCE;
  if (atomicAdd(out + 63, 1) == 0) return;
  FENCE;
  out[2] = out[0] + out[1];
}
"""
PUBLICATION = """extern "C" __global__ void kernel(int* out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    STEPS
    return;
  }
  while (__ldcg(out) == 0) __nanosleep(100);
  out[16] = out[8];
}
"""
WRITE, FENCE, PUBLISH = "out[8] = 1;", "__threadfence();", "atomicExch(out, 1);"


def run_under(sanitizer, source, tmp_path):
    """Run the script in a separate process with the sanitizer's libraries preloaded."""
    (tmp_path / "kernel.cu").write_text(source)
    names = {"thread": ["libtsan.so"], "address": ["libasan.so", "libubsan.so"]}[sanitizer]
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    if not all(os.path.isabs(library) for library in libraries):
        pytest.skip(f"this compiler has no {names}")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "HOTROW_RUNNER_SANITIZER": sanitizer,
        "TSAN_OPTIONS": "exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "kernel.cu")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize(
    ("source", "barrier"),
    [(REVERSE, "__syncthreads()"), pytest.param(SUM_OF_A_WARP, "__syncwarp()", marks=pytest.mark.long)],
    ids=["a block's barrier", "a warp's barrier, which a ballot is not"],
)
def test_a_race_on_shared_memory_is_found_with_its_line_and_a_barrier_fixes_it(source, barrier, tmp_path):
    racy = run_under("thread", source.replace("BARRIER", ""), tmp_path)
    ordered = run_under("thread", source.replace("BARRIER", barrier), tmp_path)

    assert racy.returncode == 66
    assert "ThreadSanitizer: data race" in racy.stderr
    assert "kernel.cu:3" in racy.stderr
    assert (ordered.returncode, ordered.stdout) == (0, "ran to its end\n"), ordered.stderr


@pytest.mark.long
def test_passing_values_between_blocks_without_fences_is_a_race(tmp_path):
    racy = run_under("thread", HAND_OVER.replace("FENCE", ""), tmp_path)
    fenced = run_under("thread", HAND_OVER.replace("FENCE", "__threadfence()"), tmp_path)

    assert racy.returncode == 66
    assert "ThreadSanitizer: data race" in racy.stderr
    assert fenced.returncode == 0, fenced.stderr


def test_a_value_fenced_before_it_is_published_is_read_without_a_race(tmp_path):
    published = run_under("thread", PUBLICATION.replace("STEPS", WRITE + FENCE + PUBLISH), tmp_path)

    assert (published.returncode, published.stdout) == (0, "ran to its end\n"), published.stderr


@pytest.mark.parametrize(
    "steps",
    [
        WRITE + PUBLISH,
        *(
            pytest.param(steps, marks=pytest.mark.long)
            for steps in (FENCE + WRITE + PUBLISH, FENCE + PUBLISH + WRITE, WRITE + FENCE + "atomicAdd(out, 1);")
        ),
    ],
    ids=["without a fence", "the fence before the write", "published before the write", "no exchange"],
)
def test_any_other_way_to_publish_is_a_race(steps, tmp_path):
    racy = run_under("thread", PUBLICATION.replace("STEPS", steps), tmp_path)

    assert racy.returncode == 66
    assert "ThreadSanitizer: data race" in racy.stderr


@pytest.mark.parametrize(
    ("access", "words"),
    [
        ("out[threadIdx.x + blockIdx.x] = 1;", "heap-buffer-overflow"),
        pytest.param(
            "__shared__ int few[63]; few[threadIdx.x] = 1; out[0] = few[0];",
            "index 63 out of bounds|buffer-overflow",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "*reinterpret_cast<int2*>(out + 1) = make_int2(1, 2);", "misaligned address", marks=pytest.mark.long
        ),
        ("out[0] = 1 << (threadIdx.x + 1);", "shift exponent"),
    ],
    ids=["beyond an array", "beyond shared memory", "misaligned", "undefined"],
)
def test_a_wrong_access_is_found_with_its_line(access, words, tmp_path):
    source = f'extern "C" __global__ void kernel(int* out) {{\n{access}\n}}\n'

    found = run_under("address", source, tmp_path)

    assert found.returncode != 0
    assert any(word in found.stderr for word in words.split("|")), found.stderr[-3000:]
    assert "kernel.cu:2" in found.stderr


def test_a_correct_kernel_passes_the_address_sanitizer(tmp_path):
    right = run_under("address", REVERSE.replace("BARRIER", "__syncthreads()"), tmp_path)

    assert (right.returncode, right.stdout) == (0, "ran to its end\n"), right.stderr
