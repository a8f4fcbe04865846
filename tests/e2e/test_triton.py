"""One client suite against `hotrow serve` and a real Triton Inference Server with the same model repository."""

import asyncio
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from benchmarks import perf_analyzer, triton_server
from serving import load_model
from serving.config import read_repository, with_shared_ram
from serving.dense.files import read_onnx
from serving.model.sparse_file import write_sparse_directory
from tests.e2e.conftest import serving
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.table_names import with_digests
from tests.tools.tiny_model import NamedModel, TinyModel

pytestmark = pytest.mark.triton

TOLERANCE = 1e-6
DEADLINE_S = 60
BROKEN = {
    "engine": ("nonsense", "expected auto, numpy, onnx or int8, got 'nonsense'"),
    "device": ("gpu0", "expected cpu, auto, cuda, cuda:<index>, runner or runner:<number>, got 'gpu0'"),
    "threads": ("many", "expected a whole number from 1 to 1024, got 'many'"),
    "engin": ("onnx", "unknown; did you mean 'engine'?"),
}
WIDE, DEEP = np.arange(20, dtype=np.float32).reshape(10, 2), -np.arange(40, dtype=np.float32).reshape(10, 4)
DOCS = (Path(__file__).parents[2] / "docs" / "triton.md").read_text()
#: The files in the documentation, by their first line.
DOCUMENTED = dict(re.findall(r"^```(?:protobuf|python)\n# ([^\n]*)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL))
RAW_FEATURES = [
    {"name": "user", "kind": "hash", "buckets": 1000},
    {"name": "item", "kind": "identity", "size": 500, "slot": "item[0]"},
    {"name": "seen", "kind": "hash", "buckets": 500, "offset": 500, "slot": "item[1]", "list": {}},
    {"name": "price", "kind": "dense", "log1p": True},
    {"name": "age", "kind": "dense", "type": "integer", "missing": 30},
    {"name": "is_new", "kind": "dense", "type": "boolean"},
]
DENSE_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "VECTORS" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "PROBABILITY" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
DENSE_MODEL = """
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        vectors = [triton.get_input_tensor_by_name(request, "VECTORS").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("PROBABILITY", one.sum(keepdims=True))]) for one in vectors]
"""


class Scored(NamedModel):
    """A model with a score and a vector, each linear in the features."""

    def graph(self):
        graph = super().graph()
        data, *_, product, _ = graph["layers"]
        data["label"]["label_dim"] = product["fc_param"]["num_output"] = 4
        for sparse in data["sparse"]:
            sparse["max_feature_num_per_sample"] = 1  # so [1, n] is a key of each of n samples
        data["outputs"] = [{"name": "score", "kind": "score"}, {"name": "vector", "kind": "vector", "width": 3}]
        return {**graph, "layers": graph["layers"][:-1]}

    def weights(self):
        rng = np.random.default_rng(self.seed)
        inputs = self.dense_dim + self.slots * self.dim
        return rng.normal(size=(inputs, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32)


SCORED = Scored(
    tables={"user": 1, "item": 1}, dense_dim=2, seed=5, names=("user", "item"), dense_names=("age", "price")
)


@pytest.fixture(scope="session")
def python():
    """The interpreter of the environment that `make test-triton` creates."""
    return str(Path(os.environ["HOTROW_TRITON_PYTHON"]).absolute())


@pytest.fixture(scope="session")
def shared_repository(tmp_path_factory, model):
    """Two versions of one model, a model without dense features, and a model that is only looked up."""
    path = tmp_path_factory.mktemp("shared")
    for version in (TinyModel(seed=7).write(path, "tiny", 1), model.write(path, "tiny", 2)):
        # ONNX Runtime gives the same bits in both servers; NumPy, whose versions differ, does not.
        (version / "dense.onnx").write_bytes(read_onnx(version / "graph.json", version / "dense.model"))
    TinyModel(dense_dim=0, rows=50).write(path, "bare")
    triton_server.prepare(path, "tiny", (1, 2), "version_policy: { all { } }\n")
    triton_server.prepare(path, "bare", extra='parameters { key: "engine" value: { string_value: "numpy" } }\n')
    write_rows_model(path)
    raw = TinyModel(seed=3).write(path, "raw")
    (raw / "dense.onnx").write_bytes(read_onnx(raw / "graph.json", raw / "dense.model"))
    (raw / "features.json").write_text(json.dumps({"format": 1, "features": RAW_FEATURES}))
    triton_server.prepare(path, "raw")
    named = NamedModel(seed=4, names=("user", "item", "last"), dense_names=("age", "price", "score")).write(
        path, "named"
    )
    (named / "dense.onnx").write_bytes(read_onnx(named / "graph.json", named / "dense.model"))
    triton_server.prepare(path, "named")
    scored = SCORED.write(path, "scored")
    (scored / "dense.onnx").write_bytes(read_onnx(scored / "graph.json", scored / "dense.model"))
    triton_server.prepare(path, "scored")
    return path


def write_rows_model(path, config="rows/config.pbtxt"):
    """Write the documentation's model that is only looked up, with two instances, and its ``ps.json``."""
    version = path / "rows" / "1"
    version.mkdir(parents=True)
    for name, rows in (("wide", WIDE), ("deep", DEEP)):
        write_sparse_directory(version / name, np.arange(10), rows)
    (version / "model.py").write_text(DOCUMENTED["rows/1/model.py"])
    (path / "rows" / "config.pbtxt").write_text(DOCUMENTED[config].replace("count: 1", "count: 2"))
    (path / "ps.json").write_text(re.search(r"^```json\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)[1])


@pytest.fixture(scope="session")
def broken_repository(tmp_path_factory, model):
    """Models that Triton cannot open."""
    path = tmp_path_factory.mktemp("broken")
    for name, (value, _) in BROKEN.items():
        model.write(path, f"wrong_{name}")
        parameter = f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'
        triton_server.prepare(path, f"wrong_{name}", extra=parameter)
    model.write(path, "damaged")
    triton_server.prepare(path, "damaged")
    damaged = path / "damaged" / "1"  # its fault is found after its tables are loaded: a network is read last
    (damaged / "manifest.json").unlink()
    (damaged / "dense.model").unlink()
    (damaged / "dense.onnx").write_bytes(b"no network")
    graph = json.loads((damaged / "graph.json").read_text())
    graph["layers"] = graph["layers"][: 1 + len(model.tables)]  # the inputs and the tables
    graph["inference"]["dense_model_file"] = "dense.onnx"
    (damaged / "graph.json").write_text(json.dumps(graph))
    return path


@pytest.fixture(scope="session")
def triton_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="session")
def triton(python, shared_repository, broken_repository, triton_folder):
    """The ports of one Triton for all tests. Clients load and unload its models."""
    names = ("tiny", "bare", "rows", "raw", "named", "scored")
    options = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    with triton_server.running(python, [shared_repository, broken_repository], triton_folder, *options) as ports:
        yield ports


@pytest.fixture(scope="session")
def hotrow(shared_repository, tmp_path_factory):
    """The ports of `hotrow serve`."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(shared_repository, log, "--grpc-port", "0", "--device", "cpu") as served:
        grpc_port = re.search(r"listening for gRPC on \S+:(\d+)", served.printed)[1]
        yield triton_server.Ports(served.port, int(grpc_port), served.port)


@pytest.fixture(scope="session")
def control(triton):
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{triton.http}") as client:
        yield client


def flat_request(model, samples, seed=3):
    """A request in the form of HugeCTR's clients, [1, N], and the expected answer."""
    arrays, expected = request_of(model, samples, seed)
    return {name: array.reshape(1, -1) for name, array in arrays.items()}, expected


def infer(protocol, ports, name, arrays, version=""):
    """Ask with one of NVIDIA's four clients; return OUTPUT0."""
    kind, _, is_async = protocol.partition(" ")
    port = ports.http if kind == "http" else ports.grpc
    module = tritonclient.http if kind == "http" else tritonclient.grpc
    tensors = inputs_of(arrays, module)
    if is_async:
        aio = import_module(f"tritonclient.{kind}.aio")
        return asyncio.run(_infer(aio, port, name, tensors, version)).as_numpy("OUTPUT0")
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(name, tensors, version).as_numpy("OUTPUT0")


async def _infer(module, port, name, tensors, version):
    async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return await client.infer(name, tensors, version)


def metrics_of(triton):
    """The values on Triton's metrics page by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{triton.metrics}/metrics", timeout=DEADLINE_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {place: float(value) for place, _, value in (line.rpartition(" ") for line in lines)}


def shared_tables(version):
    """The tables in the shared memory of a version's instances."""
    (tier,) = with_shared_ram(read_repository(version), str(version.resolve())).volatile_tiers
    return sorted(path.name for path in Path("/dev/shm", tier.name).glob("*.table"))


def until(condition):
    """Ask again until the condition is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("server", ["triton", "hotrow"])
def test_raw_features_get_the_answer_of_a_session(request, shared_repository, server, protocol):
    values = {
        "user": ["u1", "Zürich", None],
        "item": [5, 499, 0],
        "seen": [["a", "b"], [], ["日本"]],
        "price": [0.5, 9.25, 3.0],
        "is_new": [True, False, True],
    }
    seen = [text.encode() for texts in values["seen"] for text in texts]
    arrays = {
        "user": np.array([[b"u1", "Zürich".encode(), b""]], object),
        "item": np.array([values["item"]]),
        "seen": np.array([seen], object),
        "seen.offsets": np.array([[0, 2, 2, 3]], np.int32),
        "price": np.array([values["price"]], np.float32),
        "is_new": np.array([values["is_new"]]),
    }
    answer = infer(protocol, request.getfixturevalue(server), "raw", arrays)
    with load_model(shared_repository / "raw") as session:
        assert np.allclose(answer.reshape(-1, 1), session.predict(values), atol=TOLERANCE)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("server", ["triton", "hotrow"])
def test_keys_by_name_get_the_answer_of_a_session(request, shared_repository, server, protocol):
    arrays = {
        "user": np.array([[7, 8]]),
        "user.offsets": np.array([[0, 1, 2]], np.int32),
        "item": np.array([[1, 2, 3]]),
        "item.offsets": np.array([[0, 2, 3]], np.int32),
        **{name: np.array([[0.5, 2]], np.float32) for name in ("age", "price", "score")},
    }
    answer = infer(protocol, request.getfixturevalue(server), "named", arrays)
    with load_model(shared_repository / "named") as session:
        dense = {name: [0.5, 2] for name in ("age", "price", "score")}
        expected = session.predict({"user": [7, 8], "item": [[1, 2], [3]], **dense})
    assert np.allclose(answer.reshape(-1, 1), expected, atol=TOLERANCE)


#: Two users with two and three candidates, and the same with every value of each sample.
SHARED = {"user": [3, 4], "age": [0.5, 1.0], "item": [7, 8, 9, 7, 12], "price": [1.0, 2.0, 3.0, 1.0, 0.25]}
COUNTS = [2, 3]
OF_SAMPLES = {**SHARED, "user": [3, 3, 4, 4, 4], "age": [0.5, 0.5, 1.0, 1.0, 1.0]}


@pytest.fixture(params=["triton", "hotrow"])
def ports(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
class TestOutputs:
    """Outputs by name, candidates and the best candidates, in both servers."""

    @pytest.fixture
    def right(self, shared_repository):
        with load_model(shared_repository / "scored") as session:
            return session.predict(OF_SAMPLES)

    def ask(self, ports, protocol, values, outputs=(), counts=(), **parameters):
        """Return the arrays by output name. Every tensor is [1, n]."""
        module = tritonclient.http if protocol == "http" else tritonclient.grpc
        types = {"user": np.int64, "item": np.int64, "age": np.float32, "price": np.float32}
        arrays = {name: np.array([of_name], types[name]) for name, of_name in values.items()}
        if counts:
            arrays["CANDIDATES"] = np.array([counts], np.int32)
        wanted = [module.InferRequestedOutput(name) for name in outputs] or None
        with module.InferenceServerClient(f"127.0.0.1:{getattr(ports, protocol)}") as client:
            answer = client.infer("scored", inputs_of(arrays, module), outputs=wanted, parameters=parameters or None)
        document = answer.get_response()
        names = (
            [one["name"] for one in document["outputs"]] if protocol == "http" else [o.name for o in document.outputs]
        )
        return {name: answer.as_numpy(name) for name in names}

    def test_a_request_that_names_no_outputs_gets_all(self, ports, protocol, right):
        close(self.ask(ports, protocol, OF_SAMPLES), right)

    def test_outputs_are_answered_by_name(self, ports, protocol, right):
        answers = self.ask(ports, protocol, OF_SAMPLES, ["vector"])
        close(answers, {"vector": right["vector"]})

    def test_candidates_of_two_users_get_the_answer_of_each_sample(self, ports, protocol, right):
        close(self.ask(ports, protocol, SHARED, counts=COUNTS), right)

    def test_one_value_is_that_of_every_sample(self, ports, protocol):
        values = {**OF_SAMPLES, "user": [3], "age": [0.5]}
        answers = self.ask(ports, protocol, values, ["score"])
        close(answers, self.ask(ports, protocol, {**values, "user": [3] * 5, "age": [0.5] * 5}, ["score"]))

    def test_the_best_candidates_of_each_user(self, ports, protocol, right):
        answers = self.ask(ports, protocol, SHARED, ["TOP_INDEX", "TOP_SCORE"], COUNTS, top_k=2, top_output="score")

        scores = np.split(right["score"][:, 0], [2])
        best = [np.argsort(-of_user, kind="stable")[:2] for of_user in scores]
        close(answers, {"TOP_INDEX": best, "TOP_SCORE": [one[of] for one, of in zip(scores, best, strict=True)]})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"counts": [2, 2]}, "expected 2 or 4 samples, got 5"),
            ({"top_k": 3, "outputs": ["TOP_INDEX"], "counts": COUNTS}, "expected at most 2"),
            ({"top_k": 1, "outputs": ["TOP_INDEX"], "top_output": "vector"}, "'vector' is a vector of 3"),
            ({"outputs": ["scores"]}, "scores"),
        ],
        ids=["counts", "too many", "a vector", "no output"],
    )
    def test_wrong_requests_are_refused(self, ports, protocol, options, message):
        values = SHARED if "counts" in options else OF_SAMPLES
        with pytest.raises(InferenceServerException, match=message):
            self.ask(ports, protocol, values, **options)


def close(answers, right):
    """Compare answers by name."""
    assert sorted(answers) == sorted(right)
    for name, answer in answers.items():
        assert answer.shape == np.shape(right[name])
        np.testing.assert_allclose(answer, right[name], rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("protocol", perf_analyzer.PROTOCOLS)
def test_perf_analyzer_drives_our_server(hotrow, model, python, tmp_path, protocol):
    arrays, _ = request_of(model, 7)
    arrays = {name: array if name == "DES" else array.reshape(1, -1) for name, array in arrays.items()}
    perf_analyzer.write_inputs(tmp_path / "inputs.json", arrays)
    address = f"127.0.0.1:{hotrow.http if protocol == 'http' else hotrow.grpc}"
    client = perf_analyzer.PerfAnalyzer(python, tmp_path)

    measured = client.measure("tiny", address, protocol, tmp_path / "inputs.json", concurrency=2, seconds=1.5)

    assert measured["requests_per_s"] > 0
    assert 0 < measured["p50"] <= measured["p99"]


@pytest.mark.parametrize("protocol", ["http", "unary"])
@pytest.mark.parametrize(("server", "batch"), [("hotrow", "1,"), ("triton", "")])
def test_one_input_file_of_perf_analyzer_drives_both_servers(
    hotrow, triton, model, python, tmp_path, server, batch, protocol
):
    arrays, _ = flat_request(model, 7)
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"data": [{name: array[0].tolist() for name, array in arrays.items()}]}))
    shapes = [option for name, array in arrays.items() for option in ("--shape", f"{name}:{batch}{array.size}")]
    ports = hotrow if server == "hotrow" else triton
    address = f"127.0.0.1:{ports.http if protocol == 'http' else ports.grpc}"
    client = perf_analyzer.PerfAnalyzer(python, tmp_path)

    # For Triton, perf_analyzer reserves shared memory for one sample.
    for options in (shapes, [*shapes, "--shared-memory", "system"])[: 1 if server == "triton" else 2]:
        measured = client.measure("tiny", address, protocol, inputs, concurrency=1, seconds=1.5, options=options)
        assert measured["requests_per_s"] > 0


@pytest.mark.parametrize(("server", "protocol"), [("hotrow", "http"), ("hotrow", "grpc"), ("triton", "http")])
def test_keys_with_one_key_per_slot_need_no_offsets(hotrow, triton, model, server, protocol):
    arrays, expected = request_of(model, 5)
    keys = np.arange(5 * 3).reshape(5, 3)
    offsets = np.arange(keys.size + 1)[None].astype(np.int32)
    with_offsets = {"DES": arrays["DES"].reshape(1, -1), "CATCOLUMN": keys.reshape(1, -1), "ROWINDEX": offsets}
    ports = hotrow if server == "hotrow" else triton

    without = infer(protocol, ports, "tiny", {"DES": arrays["DES"], "CATCOLUMN": keys})

    assert without.shape == expected.shape
    np.testing.assert_allclose(without, infer(protocol, ports, "tiny", with_offsets), atol=TOLERANCE)


PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "http aio", "grpc", "grpc aio"])


@PROTOCOLS
@pytest.mark.parametrize("samples", [1, 7, 64])
def test_both_servers_give_the_same_answer(hotrow, triton, model, protocol, samples):
    arrays, expected = flat_request(model, samples)

    ours = infer(protocol, hotrow, "tiny", arrays)
    theirs = infer(protocol, triton, "tiny", arrays)

    np.testing.assert_array_equal(theirs, ours)
    assert theirs.shape == (samples, 1)
    np.testing.assert_allclose(theirs, expected, atol=TOLERANCE)


@PROTOCOLS
def test_dense_features_may_be_left_out_if_the_model_has_none(hotrow, triton, protocol):
    arrays, expected = flat_request(TinyModel(dense_dim=0, rows=50), 5)
    del arrays["DES"]

    theirs = infer(protocol, triton, "bare", arrays)

    np.testing.assert_allclose(theirs, infer(protocol, hotrow, "bare", arrays), atol=TOLERANCE)
    np.testing.assert_allclose(theirs, expected, atol=TOLERANCE)


def test_dense_features_of_a_model_without_any_may_be_an_empty_tensor(hotrow, triton):
    arrays, expected = flat_request(TinyModel(dense_dim=0, rows=50), 5)

    assert arrays["DES"].shape == (1, 0)
    for ports in (hotrow, triton):
        np.testing.assert_allclose(infer("grpc", ports, "bare", arrays), expected, atol=TOLERANCE)


@PROTOCOLS
def test_each_version_answers_with_its_own_tables(hotrow, triton, model, protocol):
    for version, of_version in (("1", TinyModel(seed=7)), ("2", model)):
        arrays, expected = flat_request(of_version, 5)
        theirs = infer(protocol, triton, "tiny", arrays, version)
        np.testing.assert_array_equal(theirs, infer(protocol, hotrow, "tiny", arrays, version))
        np.testing.assert_allclose(theirs, expected, atol=TOLERANCE)


@PROTOCOLS
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"ROWINDEX": np.zeros((1, 2), np.int32)}, id="too few offsets"),
        pytest.param({"ROWINDEX": np.full((1, 13), 9, np.int32)}, id="offsets that do not start at 0"),
        pytest.param({"CATCOLUMN": np.full((1, 3), 2**63 - 1, np.int64)}, id="reserved keys"),
        pytest.param({"DES": np.full((1, 12), np.nan, np.float32)}, id="dense features that are not numbers"),
        pytest.param({"DES": np.ones((1, 5), np.float32)}, id="too few dense features"),
        pytest.param({"DES": np.ones((1, 12), np.int64)}, id="a wrong datatype"),
        pytest.param({"CATCOLUMN": None}, id="a missing tensor"),
        pytest.param({"DENSE": np.ones((1, 12), np.float32)}, id="an unknown tensor"),
        pytest.param({"CATCOLUMN": np.zeros((1, 1, 3), np.int64)}, id="a tensor of three dimensions"),
    ],
)
def test_both_servers_refuse_a_wrong_request_with_the_same_status(hotrow, triton, model, protocol, change):
    arrays = flat_request(model, 4)[0] | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    statuses = []

    for ports in (hotrow, triton):
        with pytest.raises(InferenceServerException) as caught:
            infer(protocol, ports, "tiny", arrays)
        statuses.append(caught.value.status())

    assert statuses == ["StatusCode.INVALID_ARGUMENT" if "grpc" in protocol else "400"] * 2


@PROTOCOLS
@pytest.mark.parametrize(("name", "version"), [("none", ""), ("tiny", "9")])
def test_both_servers_do_not_find_an_unknown_model_or_version(hotrow, triton, model, protocol, name, version):
    for ports in (hotrow, triton):
        with pytest.raises(InferenceServerException) as caught:
            infer(protocol, ports, name, flat_request(model, 1)[0], version)
        assert caught.value.status() == ("StatusCode.NOT_FOUND" if "grpc" in protocol else "404")


def test_a_request_that_is_too_large_is_refused_by_both_servers_in_the_same_words(hotrow, triton, model):
    arrays, _ = flat_request(model, 65)

    for ports in (hotrow, triton):
        with pytest.raises(InferenceServerException, match="65 samples, but the model takes at most 64"):
            infer("grpc", ports, "tiny", arrays)


def test_waiting_requests_of_different_sizes_are_answered_together_with_the_bits_of_single_requests(
    triton, control, model
):
    requests = [flat_request(model, 1 + number % 8, seed=number)[0] for number in range(200)]

    def statistics():
        return control.get_inference_statistics("tiny", "2")["model_stats"][0]

    earlier = statistics()["inference_count"]
    alone = [infer("grpc", triton, "tiny", arrays) for arrays in requests]
    until(lambda: statistics()["inference_count"] >= earlier + 200)  # Triton counts a request after its answer
    before = statistics()

    with (
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{triton.grpc}") as client,
        ThreadPoolExecutor(32) as threads,
    ):
        tensors = [inputs_of(arrays, tritonclient.grpc) for arrays in requests]
        together = list(threads.map(lambda one: client.infer("tiny", one).as_numpy("OUTPUT0"), tensors))

    until(lambda: statistics()["inference_count"] >= before["inference_count"] + 200)
    after = statistics()
    assert after["inference_count"] - before["inference_count"] == 200
    assert after["execution_count"] - before["execution_count"] < 200
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_two_instances_of_each_version_hold_its_tables_once(triton, shared_repository):
    for version in (1, 2):
        tables = shared_tables(shared_repository / "tiny" / str(version))
        names = [f"tiny@{version}.{table}.table" for table in ("item", "user")]
        assert tables == [with_digests(name, shared_repository) for name in names]


@PROTOCOLS
def test_rows_are_looked_up_in_the_form_of_the_hps_backend(hotrow, triton, protocol):
    arrays = {
        "KEYS": np.array([[3, 3, 99, 0, 7, 99]], dtype=np.int64),
        "NUMKEYS": np.array([[3, 3]], dtype=np.int32),
    }

    expected = [WIDE[3], WIDE[3], np.zeros(2), DEEP[0], DEEP[7], np.full(4, 0.5)]
    for ports in (hotrow, triton):
        answer = infer(protocol, ports, "rows", arrays)
        np.testing.assert_array_equal(answer, np.concatenate(expected).astype(np.float32))


@PROTOCOLS
@pytest.mark.parametrize(
    ("keys", "counts", "message"),
    [
        ([1, 2, 3], [1, 1], "the tables have 2 keys, but KEYS has 3"),
        ([1], [1], "expected 2 numbers, one per table; got 1"),
        ([1, 2**63 - 1], [1, 1], "9223372036854775807 at position 1: is reserved"),
    ],
)
def test_a_wrong_lookup_is_an_invalid_argument_that_names_the_tensor(hotrow, triton, protocol, keys, counts, message):
    arrays = {"KEYS": np.array([keys], dtype=np.int64), "NUMKEYS": np.array([counts], dtype=np.int32)}

    for ports in (hotrow, triton):
        with pytest.raises(InferenceServerException, match="KEYS.*" + re.escape(message)) as caught:
            infer(protocol, ports, "rows", arrays)
        assert caught.value.status() == ("StatusCode.INVALID_ARGUMENT" if "grpc" in protocol else "400")


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_parameter_makes_the_model_unavailable_with_a_clear_message(control, name):
    with pytest.raises(InferenceServerException) as caught:
        control.load_model(f"wrong_{name}")

    assert f"config.pbtxt: parameters: {name}: {BROKEN[name][1]}" in str(caught.value)
    assert not control.is_model_ready(f"wrong_{name}")


def test_a_damaged_model_is_unavailable_and_leaves_no_memory_behind(control, broken_repository):
    with pytest.raises(InferenceServerException, match="ONNX"):  # damaged, or no package reads it
        control.load_model("damaged")

    assert shared_tables(broken_repository / "damaged" / "1") == []


def test_the_metrics_page_has_the_keys_the_misses_and_the_defaults_of_all_instances(triton, control):
    arrays = {"KEYS": np.array([[1, 2, 55, 56, 57]], np.int64), "NUMKEYS": np.array([[5, 0]], np.int32)}
    nothing = {"KEYS": np.empty((1, 0), np.int64), "NUMKEYS": np.zeros((1, 2), np.int32)}

    def counted(name):
        values = metrics_of(triton)
        mine = (place for place in values if place.startswith(f"{name}{{") and 'model="rows",' in place)
        return sum(values[place] for place in mine if 'table="wide"' in place)

    def settled():
        """Ask every instance, so that each sends its counts, and return their sum."""
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: infer("http", triton, "rows", nothing), range(32)))
        return counted("hotrow_lookup_keys_total")

    control.unload_model("rows")
    until(lambda: not any('model="rows"' in place for place in metrics_of(triton) if place.startswith("hotrow_")))
    control.load_model("rows")

    for _ in range(8):
        infer("http", triton, "rows", arrays)

    until(lambda: settled() == 40)
    assert counted("hotrow_defaulted_keys_total") == 24
    assert counted("hotrow_tier_hits_total") == 16
    assert counted("hotrow_tier_misses_total") == 24


def test_an_unloaded_model_releases_its_memory_and_its_metrics_and_can_be_loaded_again(
    triton, control, shared_repository
):
    arrays, expected = flat_request(TinyModel(dense_dim=0, rows=50), 5)

    def has_metrics():
        return any(place.startswith("hotrow_") and 'model="bare"' in place for place in metrics_of(triton))

    infer("http", triton, "bare", arrays)
    assert has_metrics()
    assert shared_tables(shared_repository / "bare" / "1") != []

    control.unload_model("bare")

    until(lambda: not has_metrics())
    until(lambda: shared_tables(shared_repository / "bare" / "1") == [])
    with pytest.raises(InferenceServerException):
        infer("http", triton, "bare", arrays)
    control.load_model("bare")
    np.testing.assert_allclose(infer("http", triton, "bare", arrays), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["tiny", "rows"])
def test_a_model_that_is_loaded_again_answers_and_counts_on(triton, control, model, name):
    """Old and new instances run at the same time for a moment."""
    arrays = (
        flat_request(model, 3)[0]
        if name == "tiny"
        else {
            "KEYS": np.array([[1, 2]], np.int64),
            "NUMKEYS": np.array([[1, 1]], np.int32),
        }
    )
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            before = [threads.submit(infer, "http", triton, name, arrays) for _ in range(50)]
            control.load_model(name)
            answers = {one.result().tobytes() for one in before}
            assert len(answers | {infer("http", triton, name, arrays).tobytes()}) == 1


def test_a_lookup_is_the_first_step_of_an_ensemble(python, tmp_path):
    models = tmp_path / "models"
    for name in ("dense", "both"):
        (models / name / "1").mkdir(parents=True)
    write_rows_model(models, "rows/config.pbtxt in an ensemble")
    (models / "dense" / "config.pbtxt").write_text(DENSE_CONFIG)
    (models / "dense" / "1" / "model.py").write_text(DENSE_MODEL)
    (models / "both" / "config.pbtxt").write_text(DOCUMENTED["both/config.pbtxt"])
    arrays = {"KEYS": np.array([[3, 3, 0, 7]], np.int64), "NUMKEYS": np.array([[2, 2]], np.int32)}

    with (
        triton_server.running(python, [models], tmp_path) as ports,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client,
    ):
        answer = client.infer("both", inputs_of(arrays, tritonclient.grpc)).as_numpy("PROBABILITY")

    assert answer.tolist() == [2 * WIDE[3].sum() + DEEP[0].sum() + DEEP[7].sum()]


def test_a_triton_that_corrupts_arrays_of_numpy_2_is_refused(python, tmp_path, model):
    """The tests' own environment has NumPy 2, which this Triton's Python backend reads wrongly."""
    assert np.__version__.startswith("2.")
    model.write(tmp_path / "models", "tiny")
    triton_server.prepare(tmp_path / "models", "tiny")

    with (
        pytest.raises(SystemExit, match=r"this Triton corrupts tensors with NumPy 2\.\S+; install 'numpy<2'"),
        triton_server.running(python, [tmp_path / "models"], tmp_path, models_python=sys.executable),
    ):
        pass


def test_the_gpu_configuration_asks_for_a_gpu(python, tmp_path, model):
    """Triton reads configs/gpu.pbtxt with --model-config-name=gpu; on this machine it then misses the GPU."""
    shutil.copytree(model.write(tmp_path / "written", "tiny").parent, tmp_path / "models" / "tiny")
    triton_server.prepare(tmp_path / "models", "tiny")
    config = (tmp_path / "models" / "tiny" / "config.pbtxt").read_text()
    (tmp_path / "models" / "tiny" / "configs").mkdir()
    (tmp_path / "models" / "tiny" / "configs" / "gpu.pbtxt").write_text(config.replace("KIND_CPU", "KIND_GPU"))

    with (
        pytest.raises(SystemExit, match=r"(?i)gpu"),
        triton_server.running(python, [tmp_path / "models"], tmp_path, "--model-config-name=gpu"),
    ):
        pass
