"""Drawn orders of threads and blocks: reproducible, different, and able to find faults that the fixed order hides."""

import numpy as np
import pytest

COUNT_BY_HAND = """
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  %s
  atomicAdd(&count, 1);
  __syncthreads();
  if (threadIdx.x == 0) *out = count;
"""
ORDER = "out[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);"


def count(run, runner, barrier):
    out = runner.zeros(1, np.int32)
    run(COUNT_BY_HAND % barrier, args=[out], block=(128,))
    return int(runner.to_host(out)[0])


def order(run, runner):
    out, place = runner.zeros(256, np.int32), runner.zeros(1, np.int32)
    run(ORDER, "int* out, int* next", args=[out, place], grid=(4,), block=(64,))
    return runner.to_host(out).tolist()


def test_the_fixed_order_is_the_order_of_the_threads(run, runner):
    with runner.scheduled(seed=0):
        assert order(run, runner) == list(range(256))


def test_a_seed_gives_the_same_order_again_and_seeds_differ(run, runner):
    orders = []
    for seed in (5, 5, 6):
        with runner.scheduled(seed):
            orders.append(order(run, runner))

    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(one) == list(range(256)) for one in orders)


def test_launches_under_one_seed_run_in_different_orders(run, runner):
    with runner.scheduled(seed=5):
        assert order(run, runner) != order(run, runner)


def test_drawn_orders_find_a_missing_barrier_that_the_fixed_order_hides(run, runner):
    with runner.scheduled(seed=0):
        assert count(run, runner, barrier="") == 128

    counts = set()
    for seed in range(1, 41):
        with runner.scheduled(seed):
            counts.add(count(run, runner, barrier=""))

    assert counts != {128}


@pytest.mark.parametrize("os_threads", [1, 2])
def test_with_the_barrier_the_count_is_right_in_every_order(run, runner, os_threads):
    for seed in range(1, 21):
        with runner.scheduled(seed, os_threads):
            assert count(run, runner, barrier="__syncthreads();") == 128


def test_on_several_os_threads_each_block_runs_once(run, runner):
    out = runner.zeros(1000, np.int32)

    with runner.scheduled(seed=0, os_threads=2):
        run("atomicAdd(out + blockIdx.x, 1);", args=[out], grid=(1000,), block=(3,))

    assert (runner.to_host(out) == 3).all()


def test_a_loop_that_waits_for_another_thread_lets_that_thread_run(run, runner):
    out = runner.zeros(1, np.int32)

    run("if (threadIdx.x == 1) atomicExch(out, 7);\nelse while (__ldcv(out) != 7) {}", args=[out], block=(2,))

    assert runner.to_host(out)[0] == 7


def test_dynamic_shared_memory_keeps_nothing_of_an_earlier_block(run, runner):
    out = runner.zeros(4, np.int32)

    run(
        "int* shared = reinterpret_cast<int*>(cpu_dynamic_shared());\nout[blockIdx.x] = shared[255];\nshared[255] = 1;",
        args=[out],
        grid=(4,),
        block=(1,),
        shared_bytes=1024,
    )

    assert (runner.to_host(out).view(np.uint32) == 0xA5A5A5A5).all()
