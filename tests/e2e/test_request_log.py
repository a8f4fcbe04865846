"""`hotrow serve --log-requests`: what a real server logs of the requests of every protocol."""

import json
import re
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc as triton

from tests.tools.raw_model import LOGGED, VALUES, write_raw_model
from training.data.columns import files_of

INFER = "/v2/models/raw/infer"
SAMPLES = {"samples": [{name: values[row] for name, values in VALUES.items()} for row in range(3)]}
TENSOR = {"name": "user", "datatype": "BYTES", "shape": [2], "data": ["u1", "u2"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_raw_model(folder)
    return folder


def rows_of(folder):
    table = pa.concat_tables(pq.read_table(file) for file in files_of(folder, (".parquet",)))
    rows = {}
    for row in table.to_pylist():
        rows.setdefault(row["request_id"], []).append(row)
    return rows


@pytest.mark.slow
def test_requests_of_every_protocol_are_logged_by_all_workers_under_the_id_of_their_answers(start, models, tmp_path):
    options = ("--workers", "2", "--grpc-port", "0", "--log-requests", str(tmp_path / "log"), "--sample", "1")
    served = start(models, *options)
    answers = {}
    for _ in range(10):  # connections of their own, which reach both workers
        _, headers, body = served.ask("/predict/raw", SAMPLES)
        answers[headers["X-Request-Id"]] = np.array(json.loads(body)["predictions"], np.float32)[:, 0]
    _, headers, _ = served.ask("/predict/raw", SAMPLES, {"X-Request-Id": "by-header"})
    assert headers["X-Request-Id"] == "by-header"
    for request in ({"inputs": [TENSOR]}, {"id": "by-json", "inputs": [TENSOR]}):
        answer = json.loads(served.ask(INFER, request)[2])
        answers[answer["id"]] = np.array(answer["outputs"][0]["data"], np.float32)
    wanted = triton.InferInput("user", [2, 1], "BYTES")
    wanted.set_data_from_numpy(np.array([["u1"], ["u2"]], object))
    with triton.InferenceServerClient(re.search(r"gRPC on (\S+)", served.printed)[1]) as client:
        streamed = []
        client.start_stream(lambda result, error: streamed.append(result))
        client.async_stream_infer("raw", [wanted])
        client.async_stream_infer("raw", [wanted], request_id="by-stream")
        for result in (client.infer("raw", [wanted]), client.infer("raw", [wanted], request_id="by-grpc")):
            answers[result.get_response().id] = result.as_numpy("OUTPUT0")[:, 0]
        client.stop_stream()
        for result in streamed:
            answers[result.get_response().id] = result.as_numpy("OUTPUT0")[:, 0]
    refused = served.ask("/predict/raw", {"samples": [{"usr": "u"}]})
    assert refused[0] == 400
    served.stop()

    rows = rows_of(tmp_path / "log" / "raw")
    assert rows.keys() == {"by-header", *answers}
    assert {"by-json", "by-stream", "by-grpc"} < answers.keys()
    assert len(answers) == 16
    for request_id, predictions in answers.items():
        assert [row["prediction"] for row in rows[request_id]] == predictions.tolist()
    assert [{name: row[name] for name in VALUES} for row in rows["by-header"]] == [
        {name: LOGGED[name][row] for name in VALUES} for row in range(3)
    ]
    assert [row["user"] for row in rows["by-grpc"]] == ["u1", "u2"]


def test_after_a_kill_the_next_server_answers_what_was_written_and_makes_a_parquet_file_of_it(start, models, tmp_path):
    options = ("--log-requests", str(tmp_path / "log"), "--sample", "1")
    served = start(models, *options)
    served.ask("/predict/raw", SAMPLES, {"X-Request-Id": "killed"})
    while b'hotrow_logged_requests_total{state="written"} 1.0' not in served.ask("/metrics")[2]:
        time.sleep(0.05)
    served.stop(signal.SIGKILL)
    following = start(models, *options, "--warm-up-from", str(tmp_path / "log"))
    page = following.ask("/metrics")[2].decode()
    following.stop()

    assert "model raw: version 1 is warm after 1 requests of " in following.log.read_text()
    assert not re.search(r"^hotrow_(requests|samples)_total\{.*raw", page, re.MULTILINE)
    assert len(rows_of(tmp_path / "log" / "raw")["killed"]) == 3
    assert list((tmp_path / "log" / "raw").glob("*.arrow")) == []


def test_a_log_to_warm_up_from_that_is_absent_ends_the_start(hotrow_serve, models, tmp_path):
    done = hotrow_serve(models, "--http-port", "0", "--warm-up-from", tmp_path / "none")

    assert done.returncode == 2
    assert f"--warm-up-from: {tmp_path / 'none'}: no such folder" in done.stderr


def test_a_misspelt_feature_to_leave_out_ends_the_start(hotrow_serve, models, tmp_path):
    done = hotrow_serve(models, "--http-port", "0", "--log-requests", tmp_path / "log", "--log-without", "user,contry")

    assert done.returncode == 2
    expected = "--log-without: no served model has the feature 'contry'; did you mean 'country'?"
    assert done.stderr.endswith(f"hotrow serve: {expected}\n")
