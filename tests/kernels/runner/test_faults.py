"""The runner names faults that make a GPU hang or compute silently wrong results."""

import subprocess
import sys

import numpy as np
import pytest

from kernels.errors import DeviceFaultError


def test_lanes_that_wait_for_an_ended_lane_are_a_deadlock_that_names_them(run):
    with pytest.raises(DeviceFaultError) as fault:
        run("if (threadIdx.x != 3) __syncwarp();", parameters="")

    assert "kernel: deadlock in block (0, 0, 0), 31 threads wait" in str(fault.value)
    where = "__syncwarp, line 2, mask ffffffff of which fffffff7 arrived"
    assert f"threads 0 to 2 at {where}; threads 4 to 31 at {where};" in str(fault.value)


def test_a_barrier_that_half_of_the_block_never_reaches_is_a_deadlock(run):
    with pytest.raises(DeviceFaultError, match=r"threads 0 to 39 at __syncthreads, line 2; thread 40 at __syncwarp, l"):
        run("if (threadIdx.x < 40) __syncthreads();\nelse if (threadIdx.x == 40) __syncwarp(3u << 8);", "", block=(42,))


def test_a_barrier_does_not_wait_for_ended_threads(run, runner):
    out = runner.zeros(1, np.int32)

    run("if (threadIdx.x >= 10) return;\n__syncthreads();\natomicAdd(out, 1);", args=[out], block=(64,))

    assert runner.to_host(out)[0] == 10


def test_barriers_of_two_branches_do_not_match(run):
    with pytest.raises(DeviceFaultError, match="__syncthreads of line 2 met that of line 3"):
        run("if (threadIdx.x < 16) __syncthreads();\nelse __syncthreads();", "")


def test_a_lane_outside_its_own_mask_is_named(run, runner):
    out = runner.zeros(1, np.int32)

    with pytest.raises(DeviceFaultError, match="__ballot_sync, line 2: lane 4 is not in its own mask 0000000f"):
        run("*out = __ballot_sync(0xfu, 1);", args=[out], block=(5,))


def test_lanes_with_different_masks_are_named(run):
    with pytest.raises(DeviceFaultError, match=r"__any_sync of lane 1, mask 00000003.* met __any_sync of lane 0, mask"):
        run("__any_sync(threadIdx.x ? 3u : 7u, 1);", "", block=(2,))


def test_different_collectives_do_not_match(run):
    with pytest.raises(DeviceFaultError, match="__all_sync of lane 1, mask 00000003, line 2, met __any_sync of lane 0"):
        run("threadIdx.x ? __all_sync(3u, 1) : __any_sync(3u, 1);", "", block=(2,))


def test_a_shuffle_from_a_lane_outside_the_mask_is_named(run):
    with pytest.raises(DeviceFaultError, match="__shfl_sync, line 2: lane 0 reads lane 9, which is not in the mask"):
        run("__shfl_sync(3u, 1, 9);", "", block=(2,))


def test_active_masks_are_refused(run):
    with pytest.raises(DeviceFaultError, match="__activemask depends on the schedule"):
        run("__activemask();", "")


@pytest.mark.long
def test_an_endless_loop_is_a_fault(run, runner):
    with pytest.raises(DeviceFaultError, match="a block does not end"):
        run("while (atomicCAS(out, 1, 1) != 1) {}", args=[runner.zeros(1, np.int32)], block=(1,))


def test_the_next_array_operation_raises_an_unreported_fault_once(runner, tmp_path):
    (tmp_path / "hangs.cu").write_text('extern "C" __global__ void hangs() { if (threadIdx.x) __syncwarp(); }\n')
    array, stream = runner.zeros(1, np.int32), runner.stream()

    runner.kernel(tmp_path / "hangs.cu", "hangs")((1,), (32,), (), stream)

    with pytest.raises(DeviceFaultError, match="hangs: deadlock"):
        array + 1
    assert runner.to_host(array + 1)[0] == 1


def test_after_a_fault_a_stream_runs_nothing_and_streams_that_waited_for_it_fail_too(runner, tmp_path):
    (tmp_path / "two.cu").write_text(
        'extern "C" __global__ void hangs() { if (threadIdx.x) __syncwarp(); }\n'
        'extern "C" __global__ void counts(int* out) { atomicAdd(out, 1); }\n'
    )
    hangs, counts = (runner.kernel(tmp_path / "two.cu", name) for name in ("hangs", "counts"))
    faulty, follower, bystander = (runner.stream() for _ in range(3))
    out = runner.zeros(1, np.int32)

    hangs((1,), (32,), (), faulty)
    counts((1,), (1,), (out,), faulty)
    follower.wait(faulty.record())
    counts((1,), (1,), (out,), follower)
    counts((1,), (1,), (out,), bystander)

    for stream in (faulty, follower, faulty):
        with pytest.raises(DeviceFaultError, match="hangs: deadlock"):
            stream.synchronize()
    bystander.synchronize()
    assert runner.to_host(out)[0] == 1


FORK = """
import os
from kernels.errors import DeviceUnavailableError
from kernels.runner.streams import RunnerStream

stream = RunnerStream("runner")
event = stream.record()
stream.synchronize()
child = os.fork()
if child == 0:
    other = RunnerStream("runner")
    other.synchronize()
    refused = 0
    for use in (stream.synchronize, stream.record, stream.drain, event.synchronize, lambda: stream.submit(int)):
        try:
            use()
        except DeviceUnavailableError as err:
            refused += "open devices after forking" in str(err)
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_gets_an_error_instead_of_waiting_forever():
    answer = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)

    assert answer.stdout == "5\n"
