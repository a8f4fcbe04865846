"""Versions answer logged requests before they serve."""

import logging
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.errors import ConfigError
from serving.opening import Runtime
from serving.repository import ModelRepository, check_warm_up
from serving.request_log import RequestLog
from tests.serving.ps_files import write_ps
from tests.tools.raw_model import write_raw_model
from tests.tools.tiny_model import TinyModel, flatten

TIERS = {
    "volatile_db": {"type": "hash_map", "capacity_rows": 500, "initial_cache_rate": 0, "cache_missed_embeddings": True},
    "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1},
}
SENT = [{"user": [f"u{number}"], "country": ["de"], "price": [1.0]} for number in range(20)]


def write_log(folder, version, requests, name="r"):
    """Log requests to a version, one after another."""
    with hotrow.load_model(version) as session, closing(RequestLog(folder, 1.0, 1 << 30)) as log:
        for number, values in enumerate(requests):
            batch = session.read(values)
            log.log(session, batch, session.predict_batch(batch), f"{name}{number}")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A repository whose rows are in RocksDB, and a log of requests to its model."""
    folder = tmp_path_factory.mktemp("warm_up")
    write_log(folder / "log", write_raw_model(folder / "models", max_batchsize=4), SENT)
    return folder


def opened(models, log):
    """A repository that has loaded its versions after the requests of a log."""
    write_ps(models / "models", **TIERS)
    repository = ModelRepository(models / "models", Runtime("numpy", warm_up_from=log))
    repository.load()
    return repository


def hits(repository):
    """The keys that were found in RAM and in RocksDB."""
    readings = [sample for sample in repository.readings() if sample.name == "hotrow_tier_hits"]
    return {
        tier: sum(reading.value for reading in readings if ("tier", tier) in reading.labels)
        for tier in ("memory", "rocksdb")
    }


def test_the_first_request_after_a_load_finds_its_rows_in_ram(models):
    with opened(models, models / "log") as repository:
        session = repository.loaded("raw").session
        before = hits(repository)
        session.predict(SENT[7])
        after = hits(repository)

    assert after["rocksdb"] == before["rocksdb"]
    assert after["memory"] > before["memory"]


def test_without_the_log_the_first_request_finds_them_in_the_next_tier(models, tmp_path):
    with opened(models, tmp_path) as repository:
        before = hits(repository)
        repository.loaded("raw").session.predict(SENT[7])
        assert hits(repository)["rocksdb"] > before["rocksdb"]


def test_values_of_logged_requests_are_not_counted(models):
    with opened(models, models / "log") as repository:
        values = [reading.value for reading in repository.readings() if reading.name == "hotrow_vocabulary_values"]
    assert values == [0, 0]


def test_a_request_with_more_samples_than_a_batch_warms_up_too(models, tmp_path, caplog):
    sent = {"country": ["de"], "user": [f"u{number}" for number in range(9)], "CANDIDATES": [9]}
    write_log(tmp_path, models / "models" / "raw" / "1", [sent])
    with caplog.at_level(logging.INFO), opened(models, tmp_path):
        pass
    assert "model raw: version 1 is warm after 1 requests" in caplog.text


def test_requests_with_keys_warm_up_a_model_of_keys(tmp_path, caplog):
    model = TinyModel()
    version = model.write(tmp_path / "models")
    dense, bags = model.sample_requests(3)
    with hotrow.load_model(version) as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        batch = hotrow.read_batch(session.config, dense, *flatten(bags))
        log.log(session, batch, session.predict_batch(batch), "r")
    with caplog.at_level(logging.INFO), opened(tmp_path, tmp_path / "log") as repository:
        assert repository.loaded("tiny").session.predict(dense, *flatten(bags)).shape == (3, 1)
    assert "model tiny: version 1 is warm after 1 requests" in caplog.text


def test_what_cannot_be_used_is_left_out_and_logged_once_with_its_count(models, tmp_path, caplog):
    [file] = (models / "log" / "raw").glob("*.parquet")
    table = pq.read_table(file)
    seen = table.column_names.index("seen")
    (tmp_path / "raw").mkdir()
    wrong = pa.array([[5000] if number % 2 else None for number in range(len(table))], pa.list_(pa.int64()))
    pq.write_table(table.set_column(seen, "seen", wrong), tmp_path / "raw" / "requests-1.parquet")
    (tmp_path / "raw" / "requests-2.parquet").write_bytes(b"PAR1damaged")
    (tmp_path / "raw" / "requests-3.arrow").write_bytes(b"damaged")
    pq.write_table(pa.table({"word": ["x"]}), tmp_path / "raw" / "requests-4.parquet")

    with caplog.at_level(logging.INFO), opened(models, tmp_path) as repository:
        assert np.isfinite(repository.loaded("raw").session.predict(SENT[0])).all()

    assert "model raw: version 1 is warm after 10 requests" in caplog.text
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "model raw: version 1 could not use 12 requests or files of" in line
    assert "requests-4.parquet: " in line


@pytest.mark.parametrize(("limit", "most"), [("_MOST_REQUESTS", 3), ("_MOST_S", -1)])
def test_requests_and_time_are_bounded(models, monkeypatch, caplog, limit, most):
    monkeypatch.setattr(f"serving.repository.warm_up.{limit}", most)
    with caplog.at_level(logging.INFO), opened(models, models / "log"):
        pass
    assert f"is warm after {max(most, 0)} requests" in caplog.text


def test_a_folder_that_is_absent_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--warm-up-from: .*none: no such folder"):
        check_warm_up(tmp_path / "none")
