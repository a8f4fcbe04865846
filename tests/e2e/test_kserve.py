"""Every call of NVIDIA's HTTP client beyond inference, against a real server."""

import gzip
import hashlib
import json
import re
import zlib

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as system_memory
from tritonclient.utils import InferenceServerException

from tests.e2e.kserve_requests import inputs_of, request_of

TOLERANCE = 1e-6


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(f"{served.host}:{served.port}") as client:
        yield client


def test_the_index_lists_the_models_with_the_digests_of_their_manifests(client, repository):
    index = client.get_model_repository_index()

    assert index == [
        {
            "name": name,
            "version": version,
            "state": "READY",
            "reason": "",
            "digest": hashlib.sha256((repository / name / version / "manifest.json").read_bytes()).hexdigest(),
        }
        for name, version in (("small", "1"), ("tiny", "2"))
    ]


def test_statistics_count_every_request_and_its_samples(start, repository, model):
    served = start(repository)
    with triton.InferenceServerClient(f"{served.host}:{served.port}") as client:
        for samples in (2, 2, 5):
            client.infer("tiny", inputs_of(request_of(model, samples)[0], triton))
        with pytest.raises(InferenceServerException):
            client.infer("tiny", inputs_of(request_of(model, 1)[0], triton)[:2])

        [stats] = client.get_inference_statistics("tiny")["model_stats"]
        everything = client.get_inference_statistics()["model_stats"]

    assert (stats["name"], stats["version"]) == ("tiny", "2")
    assert (stats["inference_count"], stats["execution_count"]) == (9, 3)
    assert stats["last_inference"] > 1_700_000_000_000
    durations = stats["inference_stats"]
    assert (durations["success"]["count"], durations["fail"]["count"]) == (3, 1)
    stages = [durations[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert [stage["count"] for stage in stages] == [3] * 4
    assert sum(stage["ns"] for stage in stages) == durations["success"]["ns"] > 0
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in stats["batch_stats"]] == [
        (2, 2),
        (5, 1),
    ]
    assert [one["name"] for one in everything] == ["small", "tiny"]


def test_log_settings_change_what_the_server_logs(start, repository):
    served = start(repository)
    with triton.InferenceServerClient(f"{served.host}:{served.port}") as client:
        assert client.get_log_settings() == {
            "log_file": "",
            "log_format": "default",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
        }

        changed = client.update_log_settings({"log_info": False})
        assert (changed["log_info"], changed["log_warning"]) == (False, True)
        assert client.update_log_settings({"log_info": True, "log_verbose_level": 1})["log_verbose_level"] == 1
        with pytest.raises(InferenceServerException, match="log_file: only '' is supported"):
            client.update_log_settings({"log_file": "/tmp/log"})
        with pytest.raises(InferenceServerException, match="log_colour: unknown"):
            client.update_log_settings({"log_colour": True})


@pytest.mark.parametrize("model_name", ["", "tiny"])
def test_trace_settings_are_off_and_no_trace_can_be_asked_for(client, model_name):
    assert client.get_trace_settings(model_name)["trace_level"] == ["OFF"]
    assert client.update_trace_settings(model_name, {"trace_level": ["OFF"]})["trace_level"] == ["OFF"]
    with pytest.raises(InferenceServerException, match="trace_level: expected OFF: `hotrow serve --traces` sends"):
        client.update_trace_settings(model_name, {"trace_level": ["TIMESTAMPS"]})


def test_tensors_in_shared_memory_are_read_and_written(client, model):
    arrays, expected = request_of(model, 4)
    sizes = {name: array.nbytes for name, array in arrays.items()}
    handle = system_memory.create_shared_memory_region("data", "/hotrow-kserve-test", sum(sizes.values()) + 64)
    try:
        client.register_system_shared_memory("data", "/hotrow-kserve-test", sum(sizes.values()) + 64)
        [region] = client.get_system_shared_memory_status()
        assert region["name"] == "data"
        inputs, offset = inputs_of(arrays, triton), 0
        for tensor, (name, array) in zip(inputs, arrays.items(), strict=True):
            system_memory.set_shared_memory_region(handle, [array], offset=offset)
            tensor.set_shared_memory("data", sizes[name], offset)
            offset += sizes[name]
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("data", 64, offset)

        result = client.infer("tiny", inputs, outputs=[output])

        said = result.get_output("OUTPUT0")
        assert set(said) == {"name", "datatype", "shape"}  # perf_analyzer reads no other members
        written = system_memory.get_contents_as_numpy(handle, np.float32, said["shape"], offset=offset)
        np.testing.assert_allclose(written, expected, atol=TOLERANCE)
        client.unregister_system_shared_memory("data")
        with pytest.raises(InferenceServerException, match=r"DES \(inputs\[0\]\): shared memory region 'data': not"):
            client.infer("tiny", inputs, outputs=[output])
    finally:
        client.unregister_system_shared_memory()
        system_memory.destroy_shared_memory_region(handle)


def test_cuda_shared_memory_is_refused_in_words(client):
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported; use system shared memory"):
        client.register_cuda_shared_memory("gpu", b"handle", 0, 64)
    client.unregister_cuda_shared_memory()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_memory_byte_size": 8}, r"shape \[4, 3\] needs 48 bytes, but 8 are announced"),
        ({"shared_memory_byte_size": "8"}, r"shared_memory_byte_size\): expected a whole number"),
        ({"shared_memory_offset": -1}, r"shared_memory_offset\): expected 0 or more"),
        ({"shared_memory_region": 5}, r"shared_memory_region\): expected a string"),
        ({"binary_data_size": 48}, "a tensor in shared memory has neither data nor binary_data_size"),
    ],
)
def test_a_wrong_part_of_shared_memory_is_refused_with_its_place(served, change, message):
    parameters = {"shared_memory_region": "none", "shared_memory_byte_size": 48} | change
    body = {"inputs": [{"name": "DES", "shape": [4, 3], "datatype": "FP32", "parameters": parameters}]}

    code, _, answer = served.ask("/v2/models/tiny/infer", body)

    assert code == 400
    assert re.search(message, json.loads(answer)["error"])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_requests_and_answers_are_compressed_as_the_client_asks(client, served, model, algorithm):
    arrays, expected = request_of(model, 7)

    result = client.infer(
        "tiny",
        inputs_of(arrays, triton),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )

    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("accepted", "encoding", "unpack"),
    [
        ("gzip", "gzip", gzip.decompress),
        ("deflate", "deflate", zlib.decompress),
        ("br, gzip;q=0.5", "gzip", gzip.decompress),
        ("gzip;q=0", None, bytes),
        ("br", None, bytes),
    ],
)
def test_a_large_answer_has_the_first_encoding_that_the_client_accepts(served, accepted, encoding, unpack):
    samples = [{"dense": [0.5, 1, 2], "keys": [[1], [2], []]}] * 60

    code, headers, body = served.ask("/predict/tiny", {"samples": samples}, {"Accept-Encoding": accepted})

    assert (code, headers["Content-Encoding"]) == (200, encoding)
    assert unpack(body).count(b"[") == 61


def test_keys_may_be_one_per_slot_and_offsets_64_bits_wide(client, model):
    slots = request_of(model, 1)[0]["ROWINDEX"].size - 1
    keys = np.arange(4 * slots, dtype=np.int64).reshape(4, slots)
    dense = np.ones((4, 3), np.float32)
    offsets = np.arange(4 * slots + 1, dtype=np.int64)

    flat_keys = {"DES": dense, "CATCOLUMN": keys.reshape(1, -1), "ROWINDEX": offsets.astype(np.int32)}

    by_row = client.infer("tiny", inputs_of({"DES": dense, "CATCOLUMN": keys, "ROWINDEX": offsets}, triton))
    flat = client.infer("tiny", inputs_of(flat_keys, triton))

    assert by_row.as_numpy("OUTPUT0").tolist() == flat.as_numpy("OUTPUT0").tolist()
    with pytest.raises(
        InferenceServerException, match=r"CATCOLUMN \(inputs\[1\]\): expected the shape \[n\], \[1, n\] or"
    ):
        client.infer("tiny", inputs_of({"DES": dense, "CATCOLUMN": keys.T, "ROWINDEX": offsets}, triton))


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"])
def test_health_answers_a_request_for_its_head(served, path):
    code, _, body = served.ask(path, method="HEAD")

    assert (code, body) == (200, b"")
