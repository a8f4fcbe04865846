"""Damaged bytes in every kind of file: the file is read, if only a number changed, or refused by its name."""

import os
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch

from serving.errors import ModelFileError, ServingError
from serving.importers import plan_import
from serving.sources import open_table

VECTORS = np.ones((10, 4), np.float32)
WRITERS = {
    "ads.npy": lambda path: np.save(path, VECTORS),
    "ads.npz": lambda path: np.savez(path, keys=np.arange(10), vectors=VECTORS),
    "packed.npz": lambda path: np.savez_compressed(path, keys=np.arange(10), vectors=VECTORS),
    "ads.safetensors": lambda path: safetensors.numpy.save_file({"ads": VECTORS}, path),
    "ads.pt": lambda path: torch.save({"ads": torch.ones(10, 4)}, path),
    "old.pt": lambda path: torch.save({"ads": torch.ones(10, 4)}, path, _use_new_zipfile_serialization=False),
}


def damaged(content, times):
    """Copies of ``content`` with one or two bytes changed, or cut short."""
    rng = np.random.default_rng(0)
    for _ in range(times):
        copy = bytearray(content)
        for _ in range(rng.integers(1, 3)):
            copy[rng.integers(min(len(copy), 2000))] ^= int(rng.integers(1, 256))
        yield copy
    for size in rng.choice(len(content), times // 5, replace=False):
        yield content[:size]


def refusals(path, content, times, use):
    """Return how many damaged files are refused. Every error names the file."""
    count = 0
    for copy in damaged(content, times):
        path.unlink(missing_ok=True)  # a file that is mapped must not be cut
        path.write_bytes(copy)
        try:
            use()
        except ServingError as err:
            assert path.name in str(err)  # noqa: PT017
            count += 1
    return count


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Reading `.npy`", "ignore:invalid value")
@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_table_is_read_or_refused(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)

    def use():
        rows = open_table("ads", path)
        rows.check_keys()
        for _ in rows.batches(4):
            pass

    use()
    assert refusals(path, path.read_bytes(), 150, use) > 20


def test_open_tables_hold_no_descriptors(tmp_path):
    np.arange(10).tofile(tmp_path / "keys")
    VECTORS.tofile(tmp_path / "vectors")
    WRITERS["ads.safetensors"](tmp_path / "ads.safetensors")
    before = os.listdir("/proc/self/fd")

    pair = open_table("ads", f"{tmp_path}/keys,{tmp_path}/vectors")
    tensor = open_table("ads", tmp_path / "ads.safetensors")

    assert len(os.listdir("/proc/self/fd")) == len(before)
    for rows in (pair.as_dtype("fp32"), tensor):
        np.testing.assert_array_equal(rows.read(3, 7), VECTORS[3:7])


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_table_that_is_not_a_regular_file_is_refused_at_once(tmp_path, name, make):
    make(tmp_path / name)

    with pytest.raises(ModelFileError, match=f"{name}: cannot be read: not a regular file"):
        open_table("ads", tmp_path / name)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_a_network_that_is_not_a_regular_file_is_refused_at_once(tables, tmp_path, make):
    make(tmp_path / "network.onnx")

    with pytest.raises(ModelFileError, match=r"network.onnx: cannot be read: not a regular file"):
        plan_import(tmp_path / "network.onnx", "sum", tables)


def test_a_damaged_network_is_read_or_refused(network, tables, tmp_path):
    path = tmp_path / "damaged.onnx"
    shutil.copy(network, path)

    assert refusals(path, path.read_bytes(), 100, lambda: plan_import(path, "sum", tables)) > 20
