"""A client that knows the hash of the host tables cannot choose keys that are slow to insert or to look up."""

from base64 import b64decode
from zlib import decompress

import numpy as np
import pytest

from kernels.host import HostTable, KeyIndex, TrainingTable, keys_by_owner, look_up_bags
from kernels.shared import SharedTable
from kernels.snapshot import Snapshot
from tests.kernels.snapshot_files import header_of, home, write

WORD = 2**64 - 1
# The factors of the hash without a seed (kernels/host/table/key_hash.hpp).
INVERSE_FACTORS = [pow(factor, -1, 2**64) for factor in (0xD6E8FEB86659FD93, 0x9E3779B97F4A7C15)]

# A snapshot of format 1, without a seed, as Hotrow wrote it: compressed, base64.
UNSEEDED_SNAPSHOT = (
    "eNrt2LtOwlAcx/F/y6Vc5OKNi9x8BIkxJi5SXZwIgZGX6UIYWdxcfAgegJWBHRKMjA7uDg76P7FNmgYNmyH5ftLfOe1pzmnTTv/z0B903V4u"
    "Y4nIcHVzbcuPlGY5Xb20F4ORuXb88aCP+b1YdiyeSDqpdCZ7kMsXiodHxyenpXKlelarN5otAQAAAAAA/+7+rrBt2Iv2pt6Pa75CzI1P//yq"
    "vn61/5hvmuSW+U74qZZI+pf3MPsTZv1EaA3+HgAAAAAAuwnq92gdHt0XCOrySJ0PAAAAAAD2hnerTUcPjad51sw0G424IkXNueZC09H0XL4Z"
    "AAAAAAD7Y/wxe7x8n8yfhtO3b4r/U4A="
)


def keys_of_one_bucket(count):
    """Keys whose hash without a seed is 0, 1, 2, ..."""
    hashes = np.arange(1, count + 1, dtype=np.uint64)
    hashes *= np.uint64(INVERSE_FACTORS[0])
    hashes ^= hashes >> np.uint64(29) ^ hashes >> np.uint64(58)
    hashes *= np.uint64(INVERSE_FACTORS[1])
    hashes ^= hashes >> np.uint64(32)
    return hashes.view(np.int64)


CRAFTED = keys_of_one_bucket(20_000)


def filled(table):
    table.insert(CRAFTED, np.zeros((CRAFTED.size, 1), np.float32))
    return table


def test_the_crafted_keys_share_a_bucket_without_a_seed():
    for key in CRAFTED[[0, 7, -1]].tolist():
        hash_ = key & WORD
        hash_ ^= hash_ >> 32
        hash_ = hash_ * 0x9E3779B97F4A7C15 & WORD
        hash_ ^= hash_ >> 29
        assert (hash_ * 0xD6E8FEB86659FD93 & WORD) <= CRAFTED.size


def test_crafted_keys_do_not_lengthen_the_probes_of_a_table_in_ram():
    assert filled(HostTable(1, CRAFTED.size)).stats().longest_probe_buckets <= 16


def test_processes_that_share_a_table_use_its_seed(tmp_path):
    writer = filled(SharedTable.create(tmp_path / "t", 1, CRAFTED.size))
    reader = SharedTable.attach(tmp_path / "t", writes=False)

    assert writer.stats().longest_probe_buckets <= 16
    assert reader.fetch(CRAFTED, np.empty((CRAFTED.size, 1), np.float32)).all()


def test_a_snapshot_has_its_own_seed(tmp_path):
    for name in ("first", "second"):
        write(tmp_path / name, CRAFTED, np.zeros((CRAFTED.size, 1), np.float32))
    first, second = (header_of((tmp_path / name).read_bytes()) for name in ("first", "second"))

    assert first["seed"] != second["seed"]
    assert len({home(key, first) for key in CRAFTED[:1000].tolist()}) > 900
    Snapshot(tmp_path / "first").check_content()


def test_a_snapshot_without_a_seed_opens(tmp_path):
    (tmp_path / "t").write_bytes(decompress(b64decode(UNSEEDED_SNAPSHOT)))
    keys = np.array([-5, 7, 2**40, 1000003, 0, 9, 12345678901, 8])
    snapshot, out = Snapshot(tmp_path / "t"), np.empty((keys.size, 2), np.float32)

    assert snapshot.fetch(keys, out).tolist() == [True] * 7 + [False]
    assert out[:7].ravel().tolist() == list(range(14))
    snapshot.check_content()


def train_on(keys):
    look_up_bags([TrainingTable("t", 1)], [keys], [None], ["sum"], [None], [1], [True])


# Each takes a second; without a seed, minutes.
@pytest.mark.parametrize(
    "use",
    [lambda keys: KeyIndex().find_or_insert(keys), train_on, lambda keys: keys_by_owner(keys, 2)],
    ids=["key index", "training table", "keys by owner"],
)
def test_a_million_crafted_keys_are_numbered_quickly(use):
    use(keys_of_one_bucket(1_000_000))
