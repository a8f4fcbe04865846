"""What a notebook shows for Hotrow's objects."""

import numpy as np

import hotrow
from kernels.snapshot import write_snapshot
from tests.tools.tiny_model import TinyModel


def test_a_session_shows_its_model_and_its_engine(tmp_path):
    TinyModel().write(tmp_path)

    with hotrow.load_model(tmp_path / "tiny", engine="numpy") as session:
        assert repr(session) == "InferenceSession('tiny' version 1, slots user, item x 2; numpy)"
        assert repr(session.embedding_cache) == "LookupSession('tiny' version 1, slots user, item x 2)"
        server = session.embedding_cache.server
        assert repr(server) == "ParameterServer(memory; 'tiny' version 1, slots user, item x 2)"

    assert repr(server) == "ParameterServer(memory; no models)"


def test_embedding_tables_show_their_shapes_and_features():
    tables = hotrow.EmbeddingBagCollection(
        {
            "user": hotrow.EmbeddingBagConfig(dim=16, rows=1200),
            "item": hotrow.EmbeddingBagConfig(dim=8, combiner="mean", features=("viewed", "bought")),
        }
    )

    assert repr(tables).splitlines() == [
        "EmbeddingBagCollection(",
        "  (user): 1,200 rows of 16, 76,800 bytes, sum of user",
        "  (item): 0 rows of 8, 0 bytes, mean of viewed, bought",
        ")",
    ]


def test_a_snapshot_shows_its_shape(tmp_path):
    with (tmp_path / "user.snapshot").open("w+b") as file:
        rows = (np.arange(3, dtype=np.int64), np.zeros((3, 4), dtype=np.float32))
        write_snapshot(file.fileno(), 4, 3, "fp16", [rows], bytes(32))

    with hotrow.open_snapshot(tmp_path / "user.snapshot") as snapshot:
        assert repr(snapshot) == "SnapshotReader(3 rows of 4, fp16)"

    assert repr(snapshot) == "SnapshotReader(closed)"
