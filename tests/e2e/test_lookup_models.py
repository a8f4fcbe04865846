"""Models without a dense network behind a real server: keys in, rows out, as from the hps backend of Triton."""

import json

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serving.config import read_ps_config
from serving.planner import read_trace
from tests.e2e.conftest import serving
from tests.serving.ps_files import DEEP, KEYS, WIDE, write_lookup_model


@pytest.fixture(scope="module")
def served_tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lookup")
    with serving(write_lookup_model(folder), folder / "stderr", "--grpc-port", "0", "--device", "cpu") as served:
        yield served


@pytest.fixture(params=["http", "grpc"])
def client(served_tables, request):
    port = served_tables.port
    if request.param == "grpc":
        port = int(served_tables.printed.split("listening for gRPC on ")[1].split()[0].rsplit(":", 1)[1])
    with getattr(tritonclient, request.param).InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client


def module_of(client):
    return tritonclient.grpc if "grpc" in type(client).__module__ else tritonclient.http


def rows_of(client, keys, counts, dtype=np.int32):
    module = module_of(client)
    inputs = []
    for name, array, datatype in (
        ("KEYS", np.array([keys], np.int64), "INT64"),
        ("NUMKEYS", np.array([counts], dtype), "INT32" if dtype is np.int32 else "INT64"),
    ):
        inputs.append(module.InferInput(name, array.shape, datatype))
        inputs[-1].set_data_from_numpy(array)
    return client.infer("hps_wdl", inputs)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_each_key_gets_its_row_table_after_table(client, dtype):
    answer = rows_of(client, [KEYS[2], KEYS[0], KEYS[1], 8, KEYS[1]], [2, 3], dtype)

    expected = [WIDE[2], WIDE[0], DEEP[1], np.full(4, 0.5), DEEP[1]]  # 0.5 is the default of the second table
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), np.concatenate(expected))


def test_a_table_may_have_no_keys(client):
    np.testing.assert_array_equal(rows_of(client, [KEYS[0]], [0, 1]).as_numpy("OUTPUT0"), DEEP[0])


def test_the_answer_counts_defaulted_keys(served_tables):
    body = {
        "inputs": [
            {"name": "KEYS", "shape": [1, 3], "datatype": "INT64", "data": [3, 4, 5]},
            {"name": "NUMKEYS", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]},
        ]
    }

    status, _, answer = served_tables.ask("/v2/models/hps_wdl/infer", body)

    document = json.loads(answer)
    assert (status, document["parameters"]["defaulted_keys"]) == (200, 2)
    assert document["outputs"][0]["data"] == [*WIDE[0], *[0.5] * 8]


@pytest.mark.parametrize(
    ("keys", "counts", "reason"),
    [
        ([3], [1, 1], "NUMKEYS.*: the tables have 2 keys, but KEYS has 1"),
        ([3], [1], "NUMKEYS.*: expected 2 numbers, one per table; got 1"),
        ([3], [2, -1], "NUMKEYS.*: expected 0 or more at position 1, got -1"),
        ([2**63 - 1], [1, 0], "KEYS.*reserved"),
    ],
)
def test_a_request_that_does_not_fit_the_tables_is_refused(client, keys, counts, reason):
    with pytest.raises(InferenceServerException, match=reason):
        rows_of(client, keys, counts)


def test_the_model_is_described_with_its_tensors(client):
    metadata, config = client.get_model_metadata("hps_wdl"), client.get_model_config("hps_wdl")

    if isinstance(metadata, dict):
        assert [(one["name"], one["datatype"]) for one in metadata["inputs"]] == [
            ("KEYS", "INT64"),
            ("NUMKEYS", "INT32"),
        ]
        assert config["parameters"]["dims"]["string_value"] == "2 4"
    else:
        assert [one.name for one in metadata.inputs] == ["KEYS", "NUMKEYS"]
        assert config.config.parameters["dims"].string_value == "2 4"
    assert client.is_model_ready("hps_wdl")


def test_predict_says_that_there_is_no_dense_network(served_tables):
    status, _, answer = served_tables.ask("/predict/hps_wdl", {"samples": [{"keys": [[1]]}]})

    assert status == 400
    assert "has no dense network; ask /v2/models/hps_wdl/infer for rows" in json.loads(answer)["error"]


def test_the_metrics_count_its_lookups(served_tables):
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served_tables.port}") as client:
        rows_of(client, [3, 8, 9], [1, 2])

    page = served_tables.ask("/metrics")[2].decode()

    assert 'hotrow_lookup_keys_total{model="hps_wdl",table="embedding_table1",version="1"}' in page
    assert 'hotrow_requests_total{code="200",model="hps_wdl"}' in page


def test_the_keys_of_lookups_are_recorded_for_the_planner(tmp_path):
    ps, trace = write_lookup_model(tmp_path), tmp_path / "trace.jsonl"
    with serving(ps, tmp_path / "stderr", "--device", "cpu", "--record", str(trace), "--sample", "1") as served:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            rows_of(client, [3, 8, 9], [1, 2])
        assert served.stop() == 0

    recorded = read_trace([trace], read_ps_config(ps).models)

    assert [keys.tolist() for keys in recorded.values()] == [[3], [8, 9]]
