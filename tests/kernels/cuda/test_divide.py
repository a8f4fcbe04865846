"""The divisor of a pooled row; longer bags than a test can pool."""

from pathlib import Path

import numpy as np
import pytest

from gpu_cache.bag_layout import COMBINERS, TABLE_BAGS

SOURCE = Path(__file__).parent / "divide.cu"
SUMS = np.array([3.0, -7.5, 0.0, 1e7], np.float32)


def divided(device, combiner, keys, total, is_weighted):
    bags = np.zeros(1, TABLE_BAGS)
    bags["combiner"], bags["weights_at"] = COMBINERS.index(combiner), 64 * is_weighted
    stream = device.stream()
    with device.using(stream):
        head, columns = device.xp.asarray(bags.view(np.uint8)), device.xp.asarray(SUMS)
    kernel = device.kernel(SOURCE, "divide", HOTROW_KEY="i64", HOTROW_LINE_KEYS=15, HOTROW_FORMS="FORM(0, fp32, 4)")
    kernel((1,), (1,), (head, np.uint32(keys), np.float32(total), columns), stream)
    with device.using(stream):
        return device.to_host(columns)


@pytest.mark.parametrize("keys", [1, 3, 2**24 + 2, 2**24 + 3, 2**30])
def test_a_bag_without_weights_is_divided_by_the_number_of_its_keys(device, keys):
    total = min(keys, 2**24)  # where a float32 sum of ones ends

    mean = divided(device, "mean", keys, total, is_weighted=False)
    root = divided(device, "sqrtn", keys, total, is_weighted=False)

    assert mean.tobytes() == (SUMS / np.float32(keys)).tobytes()
    assert root.tobytes() == (SUMS / np.sqrt(np.float32(keys))).tobytes()


def test_a_bag_with_weights_is_divided_by_their_total(device):
    assert divided(device, "mean", 5, 1.25, is_weighted=True).tobytes() == (SUMS / np.float32(1.25)).tobytes()
    assert divided(device, "mean", 5, 0.0, is_weighted=True).tolist() == [0] * 4
    assert divided(device, "sqrtn", 5, 2.0, is_weighted=True).tobytes() == (SUMS / np.sqrt(np.float32(2))).tobytes()
    assert divided(device, "mean", 0, 0.0, is_weighted=False).tolist() == [0] * 4
    assert divided(device, "sum", 5, 2.0, is_weighted=True).tobytes() == SUMS.tobytes()
