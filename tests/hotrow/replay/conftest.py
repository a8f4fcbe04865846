"""A repository with versions of a model with raw features, and a log of requests to the first version."""

from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.request_log import RequestLog
from tests.tools.raw_model import write_raw_model

REQUESTS, SAMPLES = 40, 3


def requests():
    """The raw features of each request."""
    rng = np.random.default_rng(0)
    for _ in range(REQUESTS):
        yield {
            "user": rng.integers(0, 50, SAMPLES).tolist(),
            "country": rng.choice(["de", "fr", "日本", "xx"], SAMPLES).tolist(),
            "tags": [rng.choice(["a", "b", "c"], size).tolist() for size in rng.integers(0, 4, SAMPLES)],
            "price": rng.gamma(2, 10, SAMPLES).tolist(),
        }


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        write_raw_model(folder, version=version, seed=version, max_batchsize=200)
    return folder / "raw"


@pytest.fixture(scope="session")
def log(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    with hotrow.load_model(models / "1") as session, closing(RequestLog(folder, 1.0, 1 << 30)) as request_log:
        for number, values in enumerate(requests()):
            batch = session.read(values)
            request_log.log(session, batch, session.predict_batch(batch), f"r{number}")
    return folder / "raw"


@pytest.fixture(scope="session")
def rows(log):
    """The log as one table."""
    return pa.concat_tables(pq.read_table(file) for file in sorted(log.glob("*.parquet")))
