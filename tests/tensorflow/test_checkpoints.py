"""Checkpoints of this TensorFlow are read without it; ``tests/serving/sources`` has those of an earlier version."""

import pytest

from serving.sources import open_checkpoint
from tests.tensorflow.checkpoints import write_all


@pytest.mark.filterwarnings("ignore")  # of TensorFlow, about its first version
def test_the_tables_of_a_checkpoint_are_those_that_tensorflow_reads(tmp_path):
    for source, tables in write_all(tmp_path).items():
        checkpoint = open_checkpoint(tmp_path / source)
        for name, expected in tables.items():
            [found] = [table for table in checkpoint.tables() if table.rpartition("/")[2] == name]
            [(keys, rows)] = checkpoint.rows(found).batches(1000)
            assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == expected
