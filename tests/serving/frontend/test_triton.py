"""The Python backend's class against a stand-in for Triton's own module."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest

from serving import LookupSession, load_model
from serving.config import read_repository, with_shared_ram
from serving.errors import ConfigError, ModelFileError, RequestError, StoreError
from serving.frontend.triton import TritonPythonModel
from serving.frontend.triton.metrics import TritonMetrics
from serving.metrics import Histogram, MetricSample
from serving.model.sparse_file import write_sparse_directory
from serving.repository.served_model import served_model
from serving.session import InferenceSession
from tests.serving.ps_files import write_ps
from tests.serving.table_names import with_digests
from tests.tools.tiny_model import TinyModel, flatten


class Tensor:
    keeps_values = True

    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array

    @classmethod
    def from_dlpack(cls, name, array):
        return cls(name, array if cls.keeps_values else np.full_like(array, array[0]))


class TritonError:
    INVALID_ARG, UNAVAILABLE = "invalid argument", "unavailable"

    def __init__(self, message, code):
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.output_tensors, self.error = output_tensors, error


class Metric:
    """A metric of Triton's process; the instances of a model share it."""

    values: ClassVar[dict] = {}

    def __init__(self, name, labels):
        self._place = (name, *sorted(labels.items()))
        self.values.setdefault(self._place, 0.0)

    def increment(self, value):
        assert value >= 0
        self.values[self._place] += value

    def set(self, value):
        self.values[self._place] = value


class Request(dict):
    """Arrays by the names of inputs."""

    outputs: ClassVar[list] = ["OUTPUT0"]
    options: ClassVar[dict] = {}

    def __or__(self, other):
        return Request({**self, **other})

    def requested_output_names(self):
        return self.outputs

    def parameters(self):
        return json.dumps(self.options)


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, name, description, kind):
        assert description
        assert (kind == self.COUNTER) == name.endswith("_total")
        self._name = name

    def Metric(self, labels):  # noqa: N802  Triton's name
        return Metric(self._name, labels)


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    """The part of Triton's module that the class uses; a request is a ``Request`` of arrays."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, InferenceResponse
    module.MetricFamily = MetricFamily
    monkeypatch.setattr(Metric, "values", {})
    module.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name]) if name in request else None
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)


@pytest.fixture
def opened(tmp_path):
    """Initialize models as Triton does; all are finalized when the test ends."""
    models = []

    def initialize(directory, instances=1, kind="CPU", **parameters):
        group = {"count": instances, "gpus": []}
        strings = {name: {"string_value": value} for name, value in parameters.items()}
        args = {
            "model_config": json.dumps({"instance_group": [group], "parameters": strings}),
            "model_instance_device_id": "0",
            "model_instance_kind": kind,
            "model_instance_name": f"{directory.parent.name}_0_{len(models)}",
            "model_repository": str(directory.parent),
            "model_version": directory.name,
        }
        model = TritonPythonModel()
        model.initialize(args)
        models.append(model)
        return model

    yield initialize
    for model in models:
        model.finalize()


def request(model, samples=3, seed=0):
    dense, bags = model.sample_requests(samples, seed)
    keys, row_ptrs = flatten(bags)
    tensors = {"DES": dense.reshape(1, -1), "CATCOLUMN": keys[None], "ROWINDEX": row_ptrs[None]}
    return Request(tensors), model.probabilities(dense, bags)


def test_every_request_of_a_call_gets_its_own_answer(tmp_path, opened):
    tiny = TinyModel()
    requests = [request(tiny, samples, seed=samples) for samples in (1, 5, 64)]

    responses = opened(tiny.write(tmp_path)).execute([tensors for tensors, _ in requests])

    for response, (_, expected) in zip(responses, requests, strict=True):
        (output,) = response.output_tensors
        assert output.name() == "OUTPUT0"
        np.testing.assert_allclose(output.as_numpy(), expected, atol=2e-6)


def test_a_bad_request_is_an_invalid_argument_and_spoils_no_other(tmp_path, opened):
    tiny = TinyModel()
    good, expected = request(tiny)
    bad = good | {"ROWINDEX": good["ROWINDEX"][:, :-1]}
    incomplete = Request({name: tensor for name, tensor in good.items() if name != "CATCOLUMN"})

    responses = opened(tiny.write(tmp_path)).execute([bad, good, incomplete])

    assert [response.error.code for response in responses[::2]] == [TritonError.INVALID_ARG] * 2
    assert "ROWINDEX" in responses[0].error.message
    assert "'CATCOLUMN'" in responses[2].error.message
    assert responses[1].error is None
    np.testing.assert_allclose(responses[1].output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_a_request_gets_the_outputs_that_it_names_and_its_best_candidates(tmp_path, opened):
    tiny = TinyModel()
    tensors, expected = request(tiny, 5)
    asked = [Request(tensors) for _ in range(4)]
    for one, outputs, options in zip(
        asked,
        (["TOP_SCORE", "TOP_INDEX"], ["OUTPUT0", "TOP_INDEX", "TOP_SCORE"], ["TOP_INDEX"], ["label"]),
        ({"top_k": 2}, {}, {"top_k": 6}, {}),
        strict=True,
    ):
        one.outputs, one.options = outputs, options

    best, every, too_many, unknown = opened(tiny.write(tmp_path)).execute(asked)

    places = np.argsort(-expected[:, 0], kind="stable")[:2]
    assert [tensor.name() for tensor in best.output_tensors] == ["TOP_SCORE", "TOP_INDEX"]
    assert best.output_tensors[1].as_numpy().tolist() == [places.tolist()]
    np.testing.assert_allclose(best.output_tensors[0].as_numpy(), expected[places].T, atol=2e-6)
    assert [tensor.name() for tensor in every.output_tensors] == ["OUTPUT0"]  # Triton names all that it knows
    assert too_many.error.message == "top_k: expected at most 5, the number of candidates, got 6"
    assert "the model has no output 'label'; it has 'OUTPUT0'" in unknown.error.message


def test_a_tier_that_is_down_is_unavailable(tmp_path, opened, monkeypatch):
    tiny = TinyModel()
    model = opened(tiny.write(tmp_path))

    def no_answer(_session, _batch):
        raise StoreError("rocksdb", "tiny.user", "no answer")

    monkeypatch.setattr(InferenceSession, "predict_batch", no_answer)
    (response,) = model.execute([request(tiny)[0]])

    assert response.error.code == TritonError.UNAVAILABLE
    assert response.error.message == "rocksdb: table 'tiny.user': no answer"


def test_dense_features_may_be_missing_if_the_model_has_none(tmp_path, opened):
    tiny = TinyModel(dense_dim=0)
    tensors, expected = request(tiny)
    del tensors["DES"]

    (response,) = opened(tiny.write(tmp_path)).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_the_version_that_triton_names_is_opened(tmp_path, opened):
    old, new = TinyModel(seed=1), TinyModel(seed=2)
    directory = old.write(tmp_path, version=1)
    new.write(tmp_path, version=2)
    tensors, expected = request(old)

    (response,) = opened(directory).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_a_missing_version_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)

    with pytest.raises(ConfigError, match="tiny/3: no such version directory"):
        opened(directory.with_name("3"))


def test_a_version_that_shares_tables_is_refused(tmp_path, opened):
    TinyModel().write(tmp_path)

    with pytest.raises(ConfigError, match="version 2 shares the tables of version 1, and Triton loads each"):
        opened(TinyModel().write_dense(tmp_path))


def test_a_broken_version_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)
    (directory / "dense.model").write_bytes(b"")

    with pytest.raises(ModelFileError, match=r"dense\.model"):
        opened(directory)


def test_triton_needs_no_web_framework():
    """NumPy and pydantic in Triton's own Python are enough to import model.py."""
    absent = ["fastapi", "starlette", "uvicorn", "orjson", "prometheus_client", "rocksdict", "hiredis", "torch"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import serving.frontend.triton"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_rows_are_in_the_tiers_of_the_ps_json_next_to_the_models(tmp_path, opened):
    tiny = TinyModel()
    directory = tiny.write(tmp_path)
    write_ps(tmp_path, volatile_db={"type": "snapshot", "path": "made"})
    tensors, expected = request(tiny)

    (response,) = opened(directory).execute([tensors])

    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)
    assert list((tmp_path / "made").rglob("*.snapshot"))


def test_a_broken_ps_json_is_refused(tmp_path, opened):
    directory = TinyModel().write(tmp_path)
    write_ps(tmp_path, volatile_db={"type": "none"})

    with pytest.raises(ConfigError, match=r"ps\.json: volatile_db and persistent_db are both disabled"):
        opened(directory)


def predictions_of(monkeypatch):
    """Count the samples of each call of ``predict_batch``."""
    counts = []
    predict = InferenceSession.predict_batch

    def counting(session, batch):
        counts.append(batch.samples)
        return predict(session, batch)

    monkeypatch.setattr(InferenceSession, "predict_batch", counting)
    return counts


def test_requests_of_one_call_are_predicted_together_up_to_the_models_largest_batch(tmp_path, opened, monkeypatch):
    tiny = TinyModel(max_batchsize=8)
    model = opened(tiny.write(tmp_path))
    requests = [request(tiny, samples, seed=samples) for samples in (3, 4, 2, 6, 8, 1)]
    counts = predictions_of(monkeypatch)

    responses = model.execute([tensors for tensors, _ in requests])

    assert counts == [7, 8, 8, 1]
    for response, (_, expected) in zip(responses, requests, strict=True):
        np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_a_request_that_spoils_a_common_prediction_fails_alone(tmp_path, opened, monkeypatch):
    tiny = TinyModel()
    good, expected = request(tiny)
    too_large = good | {"DES": np.full_like(good["DES"], 3e38)}
    predict = InferenceSession.predict_batch

    def refusing(session, batch):
        if batch.dense.max() > 1e38:
            raise RequestError("not a finite number")
        return predict(session, batch)

    monkeypatch.setattr(InferenceSession, "predict_batch", refusing)
    responses = opened(tiny.write(tmp_path)).execute([good, too_large, good])

    assert responses[1].error.code == TritonError.INVALID_ARG
    assert responses[1].error.message == "not a finite number"
    for response in responses[::2]:
        np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)


def test_requests_whose_samples_would_affect_each_other_are_predicted_alone(tmp_path, opened, monkeypatch):
    tiny = TinyModel()
    model = opened(tiny.write(tmp_path))
    monkeypatch.setattr(model._model, "can_merge", False)  # as for a graph that mixes samples
    counts = predictions_of(monkeypatch)

    model.execute([request(tiny, samples)[0] for samples in (3, 2)])

    assert counts == [3, 2]


def test_a_graph_that_mixes_samples_cannot_merge_requests(tmp_path):
    with load_model(TinyModel().write(tmp_path)) as session:
        assert served_model(session).can_merge
        session.graph = dataclasses.replace(session.graph, mixes_samples=True)
        assert not served_model(session).can_merge


@pytest.mark.parametrize(
    ("kind", "parameters", "device"),
    [
        ("CPU", {}, "cpu"),
        ("GPU", {}, "cuda:0"),
        ("MODEL", {}, "auto"),
        ("CPU", {"device": "runner"}, "runner"),
        ("GPU", {"device": "cpu"}, "cpu"),
    ],
)
def test_the_kind_of_the_instance_chooses_the_device_unless_a_parameter_does(
    tmp_path, opened, monkeypatch, kind, parameters, device
):
    asked = []
    monkeypatch.setattr("serving.frontend.triton.model.open_devices", lambda name, listed: asked.append(name) or ())

    opened(TinyModel().write(tmp_path), kind=kind, **parameters)

    assert asked == [device]


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_a_parameter_chooses_the_engine(tmp_path, opened, engine):
    model = opened(TinyModel().write(tmp_path), engine=engine, threads="2", EXECUTION_ENV_PATH="/env")

    assert model._model.session.engine == engine


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"engine": "nonsense"}, "engine: expected auto, numpy, onnx or int8, got 'nonsense'"),
        ({"device": "gpu"}, "device: expected cpu, auto, cuda"),
        ({"threads": "0"}, "threads: expected a whole number from 1 to 1024, got 0"),
        ({"threads": "two"}, "threads: expected a whole number from 1 to 1024, got 'two'"),
        ({"thread": "2"}, "thread: unknown; did you mean 'threads'?"),
        ({"slots": "26"}, "slots: unknown"),
    ],
)
def test_a_wrong_parameter_is_refused(tmp_path, opened, parameters, message):
    with pytest.raises(ConfigError) as caught:
        opened(TinyModel().write(tmp_path), **parameters)

    assert f"config.pbtxt: parameters: {message}" in str(caught.value)


@pytest.fixture
def shared_tiers():
    """Return a function that returns the tiers of several instances, for a ``ps.json``."""

    def tiers_of(directory, volatile_db, **others):
        write_ps(directory.parents[1], volatile_db=volatile_db, **others)
        ps = with_shared_ram(read_repository(directory), str(directory))
        return [tier.type for tier in ps.volatile_tiers]

    return tiers_of


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({"volatile_db": {"type": "hash_map"}}, "multi_process_hash_map"),
        ({"volatile_db": {"type": "hash_map", "row_dtype": "fp16"}}, "multi_process_hash_map"),
        ({"volatile_db": {"type": "hash_map", "capacity_rows": 10_000}}, "hash_map"),
        ({"volatile_db": {"type": "snapshot", "path": "made"}}, "snapshot"),
        (
            {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "rocks_db", "path": "rows"}},
            "multi_process_hash_map",
        ),
    ],
)
def test_ram_that_holds_every_row_becomes_shared_ram_for_several_instances(tmp_path, shared_tiers, tiers, expected):
    assert shared_tiers(TinyModel().write(tmp_path), **tiers) == [expected]


def test_a_model_without_ps_json_is_shared_too_and_each_version_has_its_own_memory(tmp_path):
    versions = [TinyModel(seed=version).write(tmp_path, version=version) for version in (1, 2)]
    tiers = [with_shared_ram(read_repository(version), str(version)).volatile_tiers[0] for version in versions]

    assert {tier.type for tier in tiers} == {"multi_process_hash_map"}
    assert tiers[0].name != tiers[1].name


def test_instances_of_a_model_share_one_copy_of_its_tables_until_the_last_is_finalized(tmp_path, opened):
    tiny = TinyModel()
    directory = tiny.write(tmp_path)
    tensors, expected = request(tiny)
    first, second = opened(directory, instances=2), opened(directory, instances=2)
    folder = Path("/dev/shm", with_shared_ram(read_repository(directory), str(directory)).volatile_tiers[0].name)

    names = [with_digests(f"tiny@1.{table}.table", tmp_path) for table in ("item", "user")]
    assert sorted(path.name for path in folder.glob("*.table")) == names
    first.finalize()
    (response,) = second.execute([tensors])
    np.testing.assert_allclose(response.output_tensors[0].as_numpy(), expected, atol=2e-6)
    second.finalize()
    assert not folder.exists()


def test_several_instances_that_would_write_to_rocksdb_are_refused_with_the_settings_to_change(tmp_path, opened):
    directory = TinyModel().write(tmp_path, "tiny")
    database = {"type": "rocks_db", "path": str(tmp_path / "rows")}
    write_ps(tmp_path, volatile_db={"type": "hash_map"}, persistent_db=database)

    with pytest.raises(ConfigError) as caught:
        opened(directory, instances=2)

    assert str(caught.value) == (
        "config.pbtxt: instance_group: 2 instances, but only one process can write to RocksDB. Use one instance, or "
        "fill the database with `hotrow load` and set read_only in persistent_db of ps.json"
    )
    assert not (tmp_path / "rows").exists()


class Samples:
    """Counters, a gauge and a histogram of a model."""

    keys, reads = 5, 0

    def __call__(self):
        self.reads += 1
        yield MetricSample("hotrow_lookup_keys", "Keys.", (("model", "m"),), self.keys)
        yield MetricSample("hotrow_gpu_cache_rows", "Rows.", (("model", "m"),), self.keys + 2, is_gauge=True)
        yield MetricSample("hotrow_tier_fetch_seconds", "Time.", (), Histogram((1.0,)))


def test_values_are_sent_at_most_once_a_second_and_name_the_process(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("serving.frontend.triton.metrics.monotonic", lambda: clock[0])
    samples = Samples()
    metrics = TritonMetrics(sys.modules["triton_python_backend_utils"], samples)
    assert Metric.values == {}  # Triton may crash if instances make metrics while they start

    metrics.send_if_due()
    samples.keys, clock[0] = 3, 100.9
    metrics.send_if_due()
    assert samples.reads == 1
    samples.keys, clock[0] = 8, 101.0
    metrics.send_if_due()

    process = ("process", str(os.getpid()))
    assert Metric.values == {
        ("hotrow_lookup_keys_total", ("model", "m"), process): 8.0,
        ("hotrow_gpu_cache_rows", ("model", "m"), process): 10,
    }


def test_the_metrics_have_the_names_of_hotrow_serve(tmp_path, opened):
    tiny = TinyModel()
    model = opened(tiny.write(tmp_path))
    model.execute([request(tiny)[0]])

    labels = (("model", "tiny"), ("process", str(os.getpid())), ("table", "user"))
    assert Metric.values[("hotrow_lookup_keys_total", *labels, ("version", "1"))] > 0
    assert Metric.values[("hotrow_tier_hits_total", *labels, ("tier", "memory"), ("version", "1"))] > 0


def test_a_triton_that_reads_arrays_of_numpy_2_wrongly_is_refused(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(Tensor, "keeps_values", False)
    monkeypatch.setattr(np, "__version__", "2.4.6")

    with pytest.raises(ConfigError, match=r"this Triton corrupts tensors with NumPy 2\.4\.6; install 'numpy<2'"):
        opened(TinyModel().write(tmp_path))


@pytest.fixture
def lookup_directory(tmp_path):
    """A model that is only looked up, in the version folder that Triton names."""
    version = tmp_path / "rows" / "1"
    version.mkdir(parents=True)
    write_sparse_directory(version / "wide", np.arange(10), np.arange(20, dtype=np.float32).reshape(10, 2))
    entry = {"model": "rows", "sparse_files": ["rows/1/wide"], "embedding_vecsize_per_table": [2], "max_batch_size": 4}
    write_ps(tmp_path, [entry | {"maxnum_catfeature_query_per_table_per_sample": [1]}])
    return version


def lookup_request(keys):
    return Request({"KEYS": np.array([keys], np.int64), "NUMKEYS": np.array([[len(keys)]], np.int32)})


def test_a_model_without_a_dense_network_answers_with_rows(lookup_directory, opened, monkeypatch):
    sizes = []
    lookup = LookupSession.lookup
    monkeypatch.setattr(LookupSession, "lookup", lambda self, keys: sizes.append(keys[0].size) or lookup(self, keys))

    responses = opened(lookup_directory).execute([lookup_request(keys) for keys in ([1, 2], [], [77], [3, 3])])

    assert sizes == [3, 2]  # at most 4 samples of 1 key together
    answers = [response.output_tensors[0].as_numpy().tolist() for response in responses]
    assert answers == [[2, 3, 4, 5], [], [0, 0], [6, 7, 6, 7]]


def test_a_wrong_lookup_request_does_not_affect_the_others(lookup_directory, opened):
    wrong = lookup_request([1]) | {"NUMKEYS": np.array([2], np.int32)}
    missing = Request({"KEYS": np.array([1], np.int64)})

    responses = opened(lookup_directory).execute([wrong, lookup_request([4]), missing])

    assert responses[1].output_tensors[0].as_numpy().tolist() == [8, 9]
    assert [response.error.code for response in responses[::2]] == [TritonError.INVALID_ARG] * 2
    assert "'NUMKEYS'" in responses[2].error.message


def test_an_engine_for_a_model_without_a_dense_network_is_refused(lookup_directory, opened):
    with pytest.raises(ConfigError, match="parameters: engine: numpy, but the model has no dense network"):
        opened(lookup_directory, engine="numpy")


def test_another_version_than_that_of_its_files_is_refused(lookup_directory, opened):
    (lookup_directory.parent / "2").mkdir()

    with pytest.raises(ConfigError, match=r"models: 'rows': names .*rows/1, but version 2 is opened"):
        opened(lookup_directory.parent / "2")
