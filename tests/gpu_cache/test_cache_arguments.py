"""A cache refuses wrong arguments."""

import numpy as np
import pytest

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError, CacheFullError
from kernels.errors import KernelError, ReservedKeyError

ONE = np.array([1], dtype=np.int64)
ROW = np.zeros((1, 4), dtype=np.float32)


@pytest.fixture(scope="module")
def cache(device):
    cache = EmbeddingCache(4, 100, device=device)
    yield cache
    cache.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim: expected 1 to 65536, got 0"),
        ({"dim": 65537}, "dim: expected 1 to 65536, got 65537"),
        ({"capacity_rows": 0}, "capacity_rows: expected at least 1, got 0"),
        ({"capacity_rows": -5}, "capacity_rows: expected at least 1, got -5"),
        ({"capacity_rows": 2**40}, "expected 1 to 4294967295 lines"),
        ({"row_dtype": "fp64"}, "row_dtype: expected one of fp32, fp16, bf16, int8, uint8, fp8, got 'fp64'"),
        ({"key_type": "I32"}, "got 'I32' with 15"),
        ({"line_keys": 8}, "got 'I64' with 8"),
        ({"key_type": "U32", "line_keys": 7}, "got 'U32' with 7"),
        ({"kind": "lru"}, "kind: expected one of dynamic, static, uvm, got 'lru'"),
        ({"seed": -1}, "seed: expected 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed: expected 0 to 4294967295, got 4294967296"),
        ({"device": "tpu:0"}, "tpu:0"),
    ],
)
def test_an_impossible_cache_is_refused(device, options, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingCache(**{"dim": 4, "capacity_rows": 100, "device": device} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "8"}, "dim: expected a whole number, got '8'"),
        ({"dim": 8.0}, "dim: expected a whole number, got 8.0"),
        ({"capacity_rows": 1.5}, "capacity_rows: expected a whole number, got 1.5"),
        ({"capacity_rows": True}, "capacity_rows: expected a whole number, got True"),
        ({"capacity_rows": "5"}, "capacity_rows: expected a whole number, got '5'"),
        ({"seed": "a"}, "seed: expected a whole number, got 'a'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"device": None}, "device: expected a device, or its name such as 'cuda:0', got None"),
        ({"readers": 5}, "readers: expected Readers or None, got 5"),
        ({"device": 0}, "device: expected a device, or its name such as 'cuda:0', got 0"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused(device, options, message):
    with pytest.raises(TypeError, match=message):
        EmbeddingCache(**{"dim": 4, "capacity_rows": 100, "device": device} | options)


def test_numpy_numbers_are_accepted(device):
    with EmbeddingCache(np.int64(4), np.int32(100), device, seed=np.uint32(3)) as cache:
        assert cache.answer(np.int64(2)).max_keys == 2


def test_an_answer_for_an_invalid_number_of_keys_is_refused(cache):
    with pytest.raises(ValueError, match="max_keys: expected at least 0, got -1"):
        cache.answer(-1)
    with pytest.raises(TypeError, match="max_keys: expected a whole number, got '3'"):
        cache.answer("3")


def test_an_out_that_is_not_an_answer_is_refused(cache):
    with pytest.raises(TypeError, match=r"out: expected what answer\(\) returns, got 5"):
        cache.query(ONE, out=5)


@pytest.mark.parametrize("verb", ["query", "erase", "replace", "update"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (ONE.astype(np.int32), r"keys: expected int64\[N\], got int32\[1\]"),
        (ONE.astype(np.uint64), r"keys: expected int64\[N\], got uint64\[1\]"),
        (ONE.astype(np.float64), r"keys: expected int64\[N\], got float64\[1\]"),
        (ONE.reshape(1, 1), r"keys: expected int64\[N\], got int64\[1, 1\]"),
        (np.int64(1).reshape(()), r"keys: expected int64\[N\], got int64\[\]"),
        (np.arange(10, dtype=np.int64)[::2], "keys: expected a C-contiguous array"),
    ],
)
def test_keys_of_the_wrong_form_are_refused(cache, verb, keys, message):
    for given in (keys, cache.device.xp.asarray(keys)):
        if "contiguous" in message and given is not keys:
            given = cache.device.xp.asarray(np.arange(10, dtype=np.int64))[::2]
        with pytest.raises(ValueError, match=message):
            getattr(cache, verb)(given, *([ROW] if verb in ("replace", "update") else []))


@pytest.mark.parametrize("verb", ["query", "erase", "replace", "update"])
def test_a_list_instead_of_an_array_is_refused(cache, verb):
    with pytest.raises(TypeError, match=r"keys: expected an array int64\[N\], got list"):
        getattr(cache, verb)([1], *([ROW] if verb in ("replace", "update") else []))


@pytest.mark.parametrize("verb", ["replace", "update"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROW.astype(np.float64), r"rows: expected float32\[1, 4\], got float64\[1, 4\]"),
        (np.zeros((1, 5), np.float32), r"rows: expected float32\[1, 4\], got float32\[1, 5\]"),
        (np.zeros((2, 4), np.float32), r"rows: expected float32\[1, 4\], got float32\[2, 4\]"),
        (np.zeros(4, np.float32), r"rows: expected float32\[1, 4\], got float32\[4\]"),
        (np.zeros((1, 8), np.float32)[:, ::2], "rows: expected a C-contiguous array"),
    ],
)
def test_rows_of_the_wrong_form_are_refused(cache, verb, rows, message):
    with pytest.raises(ValueError, match=message):
        getattr(cache, verb)(ONE, rows)


@pytest.mark.parametrize("misses", [np.ones(1, np.int32), np.ones(2, np.uint32)])
def test_misses_of_the_wrong_form_are_refused(cache, misses):
    with pytest.raises(ValueError, match=r"misses: expected uint32\[1\]"):
        cache.replace(ONE, ROW, misses=misses)


@pytest.mark.parametrize("key", [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
@pytest.mark.parametrize("verb", ["query", "erase", "replace", "update"])
def test_reserved_host_keys_are_refused_by_name(cache, verb, key):
    keys = np.array([5, key], dtype=np.int64)

    with pytest.raises(ReservedKeyError, match=f"key {key} at position 1"):
        getattr(cache, verb)(keys, *([np.zeros((2, 4), np.float32)] if verb in ("replace", "update") else []))


@pytest.mark.parametrize("kind", ["dynamic", "static", "uvm"])
@pytest.mark.parametrize("verb", ["replace", "update"])
def test_a_repeated_host_key_is_refused_and_nothing_is_written(device, kind, verb):
    """A key held twice would be erased once, and later queries would return its old row."""
    keys, rows = np.array([8, -7, 9, -7, 8, 8]), np.ones((6, 4), np.float32)

    with EmbeddingCache(4, 100, device=device, kind=kind) as cache:
        with pytest.raises(ValueError, match="keys: expected each key once, got -7 at positions 1 and 3"):
            getattr(cache, verb)(keys, rows)
        assert cache.stats().rows == 0
        cache.replace(keys[:3], rows[:3])
        assert cache.stats().rows == 3
        cache.erase(keys)
        assert cache.stats().rows == 0


@pytest.mark.parametrize("key", [-1, 2**32 - 2, 2**40])
def test_keys_that_do_not_fit_into_32_bits_are_refused(device, key):
    cache = EmbeddingCache(4, 100, device=device, key_type="U32")

    with pytest.raises(ValueError, match=f"expected 0 to 4294967293 for U32 lines, got {key} at position 0"):
        cache.replace(np.array([key]), ROW)
    cache.close()


def test_an_answer_without_room_is_refused(cache):
    with pytest.raises(ValueError, match=r"out: expected room for 2 rows of 4 columns, got \[1, 4\]"):
        cache.query(np.array([1, 2]), out=cache.answer(1))


def test_an_answer_for_rows_of_the_wrong_dim_is_refused(cache, device):
    other = EmbeddingCache(8, 15, device=device)

    with pytest.raises(ValueError, match=r"out: expected room for 1 rows of 4 columns, got \[1, 8\]"):
        cache.query(ONE, out=other.answer(1))
    other.close()


def test_arrays_of_another_device_are_refused(runner):
    from kernels.device import open_device

    cache = EmbeddingCache(4, 100, device=runner)

    with pytest.raises(KernelError, match="expected an array of runner"):
        cache.query(open_device("runner:1").xp.asarray(ONE))
    cache.close()


def test_a_closed_cache_refuses_every_call_except_close(device):
    cache = EmbeddingCache(4, 100, device=device)
    cache.close()
    cache.close()

    calls = [
        lambda: cache.query(ONE),
        lambda: cache.answer(1),
        lambda: cache.replace(ONE, ROW),
        lambda: cache.update(ONE, ROW),
        lambda: cache.erase(ONE),
        cache.dump,
        cache.stats,
    ]
    for call in calls:
        with pytest.raises(CacheClosedError, match="was closed"):
            call()


def test_a_with_block_closes_the_cache_at_its_end(device):
    with EmbeddingCache(4, 100, device=device) as cache:
        cache.query(ONE)

    with pytest.raises(CacheClosedError):
        cache.query(ONE)


def test_an_error_of_the_cache_can_be_pickled():
    import pickle

    error = pickle.loads(pickle.dumps(CacheFullError(1, 2, 3)))

    assert (error.left_out_rows, error.rows, error.capacity_rows) == (1, 2, 3)
