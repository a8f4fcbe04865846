import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.storage.rocksdb import sort as rocksdb_sort
from serving.storage.rocksdb.sort import RowSorter, keys_of_ordinals, ordinals

WIDE = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
NARROW = st.integers(0, 2**32 - 1) | st.integers(0, 300)


@settings(deadline=None, max_examples=25)
@given(data=st.data(), key_bytes=st.sampled_from([4, 8]), run_rows=st.sampled_from([1, 2, 7, 30, 1000]))
def test_rows_come_in_the_order_of_their_keys_bytes_each_key_once_and_the_last_of_it(
    tmp_path_factory, data, key_bytes, run_rows
):
    batches = data.draw(st.lists(st.lists(WIDE if key_bytes == 8 else NARROW, max_size=50), max_size=6))
    last, number = {}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rocksdb_sort, "RUN_BYTES", run_rows * 16)
        sorter = RowSorter(tmp_path_factory.mktemp("runs"), key_bytes, 8)
        for batch in batches:
            numbers = np.arange(number, number + len(batch))
            sorter.add(np.array(batch, dtype=np.int64), numbers.view(np.uint8).reshape(-1, 8))
            last |= dict(zip(batch, numbers.tolist(), strict=True))
            number += len(batch)

        parts = [(keys.tolist(), values.view(np.int64)[:, 0].tolist()) for keys, values in sorter.parts()]

    found = [pair for keys, numbers in parts for pair in zip(keys, numbers, strict=True)]
    assert found == sorted(last.items(), key=lambda pair: pair[0].to_bytes(8, "little", signed=True)[:key_bytes])
    assert all(len(keys) <= max(run_rows, 1) for keys, _ in parts)


@pytest.mark.parametrize("keys", [np.arange(20_000) * 2**40, np.arange(20_000), np.full(20_000, 7)])
def test_parts_are_bounded_however_the_keys_lie(tmp_path, monkeypatch, keys):
    monkeypatch.setattr(rocksdb_sort, "RUN_BYTES", 16 * 1000)
    sorter = RowSorter(tmp_path, 8, 8)
    sorter.add(np.random.default_rng(0).permutation(keys), np.zeros((keys.size, 8), np.uint8))

    sizes = [part.size for part, _ in sorter.parts()]

    assert sum(sizes) == np.unique(keys).size
    assert max(sizes) <= 1000


@pytest.mark.parametrize(("key_bytes", "keys"), [(8, [-(2**63), -1, 0, 255, 2**63 - 1]), (4, [0, 256, 2**32 - 1])])
def test_ordinals_are_undone(key_bytes, keys):
    keys = np.array(keys, dtype=np.int64)

    assert keys_of_ordinals(ordinals(keys, key_bytes)).tolist() == keys.tolist()
