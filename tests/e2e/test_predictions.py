"""Right answers over HTTP, in every form that a client may request."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families

from tests.tools import warm
from tests.tools.tiny_model import TinyModel, flatten

# A float32 logistic regression against float64 by hand.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def client(served):
    with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}", concurrency=8) as client:
        yield client


def tensors(dense, bags, binary=True, leading_one=True, key_datatype="INT64"):
    keys, row_ptrs = flatten(bags)
    arrays = {
        "DES": (np.asarray(dense, np.float32), "FP32"),
        "CATCOLUMN": (keys.astype(np.uint32 if key_datatype == "UINT32" else np.int64), key_datatype),
        "ROWINDEX": (row_ptrs, "INT32"),
    }
    inputs = []
    for name, (array, datatype) in arrays.items():
        array = array.reshape(1, -1) if leading_one else array
        inputs.append(tritonclient.http.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return inputs


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritonclient_gets_the_models_probabilities(client, model, binary_input, binary_output, compression):
    dense, bags = model.sample_requests(7, seed=3)
    output = tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=binary_output)

    result = client.infer(
        "tiny",
        tensors(dense, bags, binary_input),
        outputs=[output],
        request_id="r1",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )

    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), model.probabilities(dense, bags), atol=TOLERANCE)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("r1", "tiny", "2")
    assert response["parameters"] == {"defaulted_keys": 0}


def test_a_client_that_names_no_outputs_gets_all(client, model):
    dense, bags = model.sample_requests(2)

    result = client.infer("tiny", tensors(dense, bags, leading_one=False), model_version="2")

    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), model.probabilities(dense, bags), atol=TOLERANCE)


def test_a_whole_batch_and_its_single_samples_get_the_same_answers(client, model):
    dense, bags = model.sample_requests(model.max_batchsize, seed=5)

    whole = client.infer("tiny", tensors(dense, bags)).as_numpy("OUTPUT0")
    single = [client.infer("tiny", tensors(dense[i : i + 1], bags[i : i + 1])).as_numpy("OUTPUT0") for i in range(64)]

    np.testing.assert_allclose(np.concatenate(single), whole, atol=TOLERANCE)


def test_keys_that_no_tier_holds_count_as_zeros_and_are_reported(client, model):
    dense, _ = model.sample_requests(1)
    unknown = [[[model.rows + 5], [3, model.rows + 5], []]]

    result = client.infer("tiny", tensors(dense, unknown))

    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), model.probabilities(dense, unknown), atol=TOLERANCE)
    assert result.get_response()["parameters"] == {"defaulted_keys": 2}


@pytest.mark.parametrize("datatype", ["UINT32", "INT64"])
def test_a_uint32_model_without_dense_features(client, datatype):
    small = TinyModel(tables={"only": 2}, dense_dim=0, key_type="I32", rows=50)
    bags = [[[1, 2], [49]], [[], [7]]]
    without_dense = tensors(np.empty((2, 0)), bags, key_datatype=datatype)[1:]

    result = client.infer("small", without_dense)

    expected = small.probabilities(np.empty((2, 0)), bags)
    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, atol=TOLERANCE)


def test_tritonclient_reads_health_metadata_and_configuration(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "2")
    assert client.get_server_metadata()["name"] == "hotrow"
    metadata = client.get_model_metadata("tiny")
    assert metadata["versions"] == ["2"]
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["DES", "CATCOLUMN", "ROWINDEX"]
    assert client.get_model_config("tiny")["name"] == "tiny"


def test_a_server_answers_samples_as_json_objects(served, model):
    dense, bags = model.sample_requests(5, seed=8)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]

    code, headers, body = served.ask("/predict/tiny", {"samples": samples})

    assert (code, headers["Content-Type"]) == (200, "application/json")
    np.testing.assert_allclose(json.loads(body)["predictions"], model.probabilities(dense, bags), atol=TOLERANCE)


def test_the_predict_command_prints_one_line_per_sample(served, model, tmp_path):
    dense, bags = model.sample_requests(3, seed=9)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]
    document = json.dumps({"samples": samples})
    (tmp_path / "samples.json").write_text(document)
    command = ["-m", "serving.cli.main", "predict", "tiny", "--url", served.url]

    from_file = warm.run(*command, tmp_path / "samples.json")
    from_stdin = warm.run(*command, "-", text=document)

    assert (from_file.returncode, from_file.stderr) == (0, "")
    assert from_file.stdout == from_stdin.stdout
    printed = [[float(number) for number in line.split()] for line in from_file.stdout.splitlines()]
    np.testing.assert_allclose(printed, model.probabilities(dense, bags), atol=TOLERANCE)


def test_the_documentation_shows_an_example_of_predict(served):
    code, _, body = served.ask("/openapi.json")

    operation = json.loads(body)["paths"]["/predict/{model}"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert code == 200
    assert schema["example"]["samples"]
    assert served.ask("/docs")[0] == 200


def counter_values(served):
    page = served.ask("/metrics")[2].decode()
    families = text_string_to_metric_families(page)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metrics_count_requests_keys_and_tiers_and_ignore_unknown_names_of_clients(served, model):
    before = counter_values(served)
    dense, bags = model.sample_requests(4, seed=11)
    bags[0][0] = [model.rows + 1]
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]

    served.ask("/predict/tiny", {"samples": samples})
    served.ask("/predict/tiny", {"samples": []})
    served.ask("/predict/made-up", {"samples": []})
    after = counter_values(served)

    def grown(*key):
        return after[key] - before.get(key, 0)

    user_keys, item_keys = len([k for s in bags for k in s[0]]), len([k for s in bags for b in s[1:] for k in b])
    tiny = ("model", "tiny")
    assert grown("hotrow_requests_total", ("code", "200"), tiny) == 1
    assert grown("hotrow_requests_total", ("code", "400"), tiny) == 1
    assert grown("hotrow_requests_total", ("code", "404"), ("model", "")) == 1
    assert grown("hotrow_samples_total", tiny) == 4
    for table, keys, missing in [("user", user_keys, 1), ("item", item_keys, 0)]:
        labels = (tiny, ("table", table), ("version", "2"))
        assert grown("hotrow_lookup_keys_total", *labels) == keys
        assert grown("hotrow_defaulted_keys_total", *labels) == missing
        of_memory = (tiny, ("table", table), ("tier", "memory"), ("version", "2"))
        assert grown("hotrow_tier_hits_total", *of_memory) == keys - missing
        assert grown("hotrow_tier_fetch_seconds_count", *of_memory) == 1
        assert grown("hotrow_tier_misses_total", *of_memory) == missing
    assert not any("made-up" in str(key) for key in after)
    assert after["hotrow_requests_in_flight",] == 0


def test_good_and_bad_requests_at_once_do_not_disturb_each_other(served, model):
    def ask_many(thread):
        # One client per thread: tritonclient's cannot be shared between threads.
        with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}") as client:
            return [ask(client, 30 * thread + number) for number in range(30)]

    def ask(client, number):
        dense, bags = model.sample_requests(1 + number % 9, seed=number)
        if number % 3 == 2:
            return served.ask("/v2/models/tiny/infer", b'{"inputs": [')[0] == 400
        answer = client.infer("tiny", tensors(dense, bags)).as_numpy("OUTPUT0")
        return np.allclose(answer, model.probabilities(dense, bags), atol=TOLERANCE)

    with ThreadPoolExecutor(8) as threads:
        right = list(threads.map(ask_many, range(8)))

    assert np.array(right).all()


def test_an_answers_head_and_body_arrive_together(served, model):
    """An answer takes one system call and wakes the client once."""
    dense, bags = model.sample_requests(1)
    body = json.dumps({"samples": [{"dense": dense[0].tolist(), "keys": bags[0]}]}).encode()
    request = b"POST /predict/tiny HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with served.connect() as connection:
        for _ in range(20):
            connection.sendall(request)
            head, _, answer = connection.recv(65536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(answer)["defaulted_keys"] == 0


def test_metadata_names_the_slots_whose_keys_a_sample_may_give_by_table_name(served, model):
    dense, bags = model.sample_requests(2, seed=11)
    samples = [
        {"dense": features.tolist(), "keys": {"item": slots[1:], "user": slots[0]}}
        for features, slots in zip(dense, bags, strict=True)
    ]

    assert json.loads(served.ask("/v2/models/tiny")[2])["slots"] == ["user", "item[0]", "item[1]"]
    code, _, answer = served.ask("/predict/tiny", {"samples": samples})
    assert code == 200
    np.testing.assert_allclose(json.loads(answer)["predictions"], model.probabilities(dense, bags), atol=TOLERANCE)
