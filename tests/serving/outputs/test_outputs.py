"""Answers by name: several outputs of a model, in Python and on every wire."""

import shutil
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.http
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2

import hotrow
from hotrow.replay.document import replay_document
from hotrow.replay.tables import RequestRows
from serving.cli.main import main
from serving.errors import RequestError, TraceError
from serving.reading import read_batch
from serving.request_log import RequestLog
from tests.tools.tiny_model import Heads, TinyModel, flatten
from tests.tools.two_towers import AGE, COLUMNS, KINDS, PRICE, WIDTH, expected, write_towers
from training.model.metrics import area_under_curve

USERS, ITEMS, DENSE = [3, 4, 5, 6], [7, 8, 9, 7], np.array([[0.5, 1], [1, 2], [0, 3], [2, 0.25]], np.float32)
FEATURES = {"user": USERS, "item": ITEMS, AGE: DENSE[:, 0].tolist(), PRICE: DENSE[:, 1].tolist()}
SAMPLES = [dict(zip(FEATURES, values, strict=True)) for values in zip(*FEATURES.values(), strict=True)]
RIGHT = expected(USERS, ITEMS, DENSE)
#: A request whose user has a vector of zeros, so that its cosine is NaN.
NOBODY = {"user": [[]], "item": [7], AGE: [0], PRICE: [1]}
WIDTHS = {name: WIDTH if kind == "vector" else 1 for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def log(session, tmp_path_factory):
    """The log of a request for one output, and of a request for all."""
    folder = tmp_path_factory.mktemp("log")
    with closing(RequestLog(folder, 1.0, 1 << 30)) as log:
        for number, outputs in enumerate((["item_vector"], None)):
            batch = session.read(NOBODY if outputs else FEATURES, outputs or ())
            log.log(session, batch, session.predict_batch(batch), f"r{number}")
    return folder / "towers"


def inputs(features=FEATURES):
    """The features as KServe's tensors in JSON."""
    types = {"user": "INT64", "item": "INT64", AGE: "FP32", PRICE: "FP32"}
    return [
        {"name": name, "shape": [len(values)], "datatype": types[name], "data": values}
        for name, values in features.items()
    ]


def close(answers, names=tuple(KINDS)):
    """Check answers by name."""
    assert list(answers) == list(names)
    for name, answer in answers.items():
        np.testing.assert_allclose(np.reshape(answer, RIGHT[name].shape), RIGHT[name], rtol=1e-5, atol=1e-6)


def test_python_answers_every_output_by_its_name(session):
    close(session.predict(FEATURES))
    close(session.predict(DENSE, np.stack([USERS, ITEMS], axis=1)))
    close(session.predict(FEATURES, outputs=["item_vector", "click"]), ["item_vector", "click"])


def test_a_device_answers_by_name(folder):
    with hotrow.load_model(folder / "towers", device="runner") as session:
        close(session.predict(FEATURES))
        close(session.predict(FEATURES, outputs=["item_vector", "click"]), ["item_vector", "click"])
        document = {"context": {"user": 3, AGE: 0.5}, "candidates": [{"item": i, PRICE: 1.0} for i in ITEMS]}
        scores = expected([3] * 4, ITEMS, [[0.5, 1.0]] * 4)["score"][:, 0]
        assert session.rank(document, 4, "score").index.tolist() == [np.argsort(-scores, kind="stable").tolist()]
    heads = TestHeads()
    with hotrow.load_model(folder / "heads", device="runner") as session:
        assert session.engine == "runner"
        answers = session.predict(heads.dense, *flatten(heads.bags), outputs=["buy", "click"])
        for name, right in zip(("click", "buy"), heads.right(), strict=True):
            np.testing.assert_allclose(answers[name], right, atol=2e-6)


def test_outputs_are_c_contiguous_float32_of_their_widths(session):
    for name, answer in session.predict(FEATURES).items():
        assert answer.flags.c_contiguous
        assert (answer.dtype, answer.shape) == (np.float32, (4, WIDTHS[name]))


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (["clik"], "outputs[0]: the model has no output 'clik'; it has 'click', 'score'"),
        (["clik"], "did you mean 'click'?"),
        (["click", "OUTPUT0"], "outputs[1]: the model has no output 'OUTPUT0'"),
        (["click", "click"], "outputs[1]: output 'click' is requested twice"),
        ([3], "outputs[0]: expected the name of an output, got int"),
        ("click", "outputs: expected a list of names"),
        (3, "outputs: expected a list of names"),
    ],
)
def test_wrong_names_of_outputs_are_refused(session, outputs, reason):
    with pytest.raises(RequestError) as caught:
        session.predict(FEATURES, outputs=outputs)

    assert reason in str(caught.value)


def test_a_number_that_is_not_finite_is_refused_only_in_an_output_that_was_asked_for(session):
    answers = session.predict(NOBODY, outputs=["item_vector", "score"])

    right = expected([None], [7], [[0, 1]])
    np.testing.assert_allclose(answers["item_vector"], right["item_vector"], rtol=1e-5)
    assert answers["score"].tolist() == [[0]]
    named = r"sample 0: 'cosine' is \[nan\], not a finite number: the sample has no key in 'user', and the network may"
    with pytest.raises(RequestError, match=named):
        session.predict(NOBODY, outputs=["item_vector", "cosine"])
    with pytest.raises(RequestError, match=named):
        session.predict({**NOBODY, "item": [7, 8]})


def test_each_of_several_merged_requests_is_checked_for_its_own_outputs(session):
    nobody, known = session.read(NOBODY, ["item_vector"]), session.read(FEATURES)

    answers = session.predict_batches([nobody, known])

    assert [output.name for output in nobody.wanted] == ["item_vector"]
    close({name: answers[1].values[:, output.columns] for name, output in zip(KINDS, session.outputs, strict=True)})
    with pytest.raises(RequestError, match="'cosine' is"):
        session.predict_batches([session.read(NOBODY), known])


def test_large_scores_are_answered_although_their_sum_is_infinite(tmp_path):
    write_towers(tmp_path / "models", kinds={"score": "score"})
    with hotrow.load_model(tmp_path / "models" / "towers") as session:
        scores = session.predict(DENSE * np.float32(1e19), np.stack([USERS, ITEMS], axis=1))
        assert scores.shape == (4, 1)
        assert np.isfinite(scores).all()
        assert np.abs(scores).max() > 1e36
        with pytest.raises(RequestError, match="not a finite number"):
            session.predict(DENSE * np.float32(1e30), np.stack([USERS, ITEMS], axis=1))


def test_metadata_names_the_kind_and_the_width_of_each_output(client):
    document = client.get("/v2/models/towers").json()
    config = client.get("/v2/models/towers/config").json()

    assert document["outputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1, WIDTHS[name]], "parameters": {"kind": kind}}
        for name, kind in KINDS.items()
    ]
    kinds = "click=probability score=score cosine=score user_vector=vector item_vector=vector"
    assert config["parameters"]["kinds"] == {"string_value": kinds}
    assert config["output"][3] == {"name": "user_vector", "data_type": "TYPE_FP32", "dims": [-1, WIDTH]}
    versions = client.get("/status").json()["models"]
    outputs = {model["name"]: model["versions"][0]["outputs"] for model in versions}
    assert outputs["towers"][-1] == {"name": "item_vector", "kind": "vector", "width": WIDTH}
    assert outputs["tiny"] == [{"name": "OUTPUT0", "kind": "probability", "width": 1}]


def test_kserve_answers_the_outputs_that_the_client_names_in_its_order(client):
    everything = client.post("/v2/models/towers/infer", {"inputs": inputs()}).json()["outputs"]
    some = {"inputs": inputs(), "outputs": [{"name": "item_vector"}, {"name": "score"}]}
    chosen = client.post("/v2/models/towers/infer", some).json()["outputs"]

    close({output["name"]: output["data"] for output in everything})
    close({output["name"]: output["data"] for output in chosen}, ["item_vector", "score"])
    assert [output["shape"] for output in chosen] == [[4, WIDTH], [4, 1]]


def test_kserve_answers_binary_outputs_by_name(client):
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(
        _triton_inputs(),
        outputs=[
            tritonclient.http.InferRequestedOutput("item_vector"),
            tritonclient.http.InferRequestedOutput("click"),
        ],
    )
    headers = {"Inference-Header-Content-Length": str(length)}
    answer = client.ask("POST", "/v2/models/towers/infer", content=body, headers=headers)

    json_bytes = int(answer.headers["inference-header-content-length"])
    numbers = np.frombuffer(answer.content[json_bytes:], np.float32)
    close({"item_vector": numbers[: 4 * WIDTH], "click": numbers[4 * WIDTH :]}, ["item_vector", "click"])


def _triton_inputs():
    tensors = []
    for entry in inputs():
        tensor = tritonclient.http.InferInput(entry["name"], entry["shape"], entry["datatype"])
        tensor.set_data_from_numpy(np.array(entry["data"], np.float32 if entry["datatype"] == "FP32" else np.int64))
        tensors.append(tensor)
    return tensors


def message_of(*outputs):
    message = service_pb2.ModelInferRequest()
    for entry in inputs():
        tensor = message.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
        field = tensor.contents.fp32_contents if entry["datatype"] == "FP32" else tensor.contents.int64_contents
        field.extend(entry["data"])
    for name in outputs:
        message.outputs.add(name=name)
    return message


@pytest.mark.parametrize("names", [(), ("user_vector", "cosine")], ids=["all", "some"])
def test_grpc_answers_the_outputs_that_the_client_names(over_grpc, names):
    answer = over_grpc(message_of(*names))

    arrays = [np.frombuffer(content, np.float32) for content in answer.raw_output_contents]
    close({output.name: array for output, array in zip(answer.outputs, arrays, strict=True)}, names or tuple(KINDS))


def test_an_unknown_output_is_refused_on_every_wire(client, over_grpc):
    wrong = {"inputs": inputs(), "outputs": [{"name": "click"}, {"name": "scor"}]}
    reason = "outputs[1].name: the model has no output 'scor'; it has 'click', 'score'"

    over_http = client.post("/v2/models/towers/infer", wrong)
    by_people = client.post("/predict/towers", {"samples": SAMPLES, "outputs": ["click", "scor"]})

    assert over_http.status_code == by_people.status_code == 400
    assert reason in over_http.json()["error"]
    assert over_http.json()["error"].endswith("did you mean 'score'?")
    assert by_people.json()["error"].endswith("did you mean 'score'?")
    with pytest.raises(RequestError, match="did you mean 'score'"):
        over_grpc(message_of("click", "scor"))


def test_predict_answers_by_name_if_the_model_has_several_outputs(client):
    document = client.post("/predict/towers", {"samples": SAMPLES}).json()
    named = client.post("/predict/towers", {"samples": SAMPLES, "outputs": ["click"]}).json()

    close(document["outputs"])
    assert list(document) == ["outputs", "defaulted_keys", "model_version"]
    assert np.shape(document["outputs"]["click"]) == (4,)
    assert np.shape(document["outputs"]["item_vector"]) == (4, WIDTH)
    close(named["outputs"], ["click"])


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ("click", "outputs: expected a list, but a string came"),
        ([None], "outputs[0]: expected the name of an output, got NoneType"),
        (["click", "click"], "outputs[1]: output 'click' is requested twice"),
    ],
)
def test_predict_refuses_wrong_names(client, outputs, reason):
    answer = client.post("/predict/towers", {"samples": SAMPLES, "outputs": outputs})

    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_the_size_of_an_answer_counts_only_the_outputs_that_are_answered(models):
    model = models.loaded("towers")
    batch = read_batch(model.config, DENSE, np.stack([USERS, ITEMS], axis=1), None)

    assert model.answer_floats(batch) == 4 * COLUMNS
    assert model.answer_floats(batch, "item_vector") == 4 * WIDTH


class TestHeads:
    """The heads of a HugeCTR graph are outputs by the names of their labels, next to OUTPUT0."""

    model = Heads()
    dense, bags = model.sample_requests(3)

    def samples(self):
        return [{"dense": row.tolist(), "keys": bags} for row, bags in zip(self.dense, self.bags, strict=True)]

    def right(self):
        single = TinyModel()
        click = single.probabilities(self.dense, self.bags)
        bias = single.weights()[1]
        logits = np.log(click) - np.log1p(-click)
        return click, 1 / (1 + np.exp(-(-(logits - bias) / 2 + bias + 1)))

    def test_a_request_that_names_none_gets_all_columns_as_before(self, client):
        document = client.post("/predict/heads", {"samples": self.samples()}).json()

        assert list(document) == ["predictions", "defaulted_keys", "model_version"]
        np.testing.assert_allclose(document["predictions"], np.concatenate(self.right(), axis=1), atol=2e-6)

    def test_heads_are_answered_by_name(self, client):
        body = {"samples": self.samples(), "outputs": ["buy", "click"]}
        document = client.post("/predict/heads", body).json()

        assert list(document["outputs"]) == ["buy", "click"]
        click, buy = self.right()
        np.testing.assert_allclose(document["outputs"]["click"], click[:, 0], atol=2e-6)
        np.testing.assert_allclose(document["outputs"]["buy"], buy[:, 0], atol=2e-6)

    def test_metadata_lists_output0_first_as_before_and_then_the_heads(self, client):
        outputs = client.get("/v2/models/heads").json()["outputs"]

        assert outputs == [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "click", "datatype": "FP32", "shape": [-1, 1], "parameters": {"kind": "probability"}},
            {"name": "buy", "datatype": "FP32", "shape": [-1, 1], "parameters": {"kind": "probability"}},
        ]


class TestLog:
    """The request log has the answers that a request asked for, and a replay asks for the same outputs."""

    def test_columns_of_other_outputs_are_null(self, log, session):
        rows = RequestRows(log).read(["request_id", *(f"prediction_{column}" for column in range(COLUMNS))])
        rows = rows.sort_by("request_id")
        columns = [rows[f"prediction_{column}"].to_pylist() for column in range(COLUMNS)]

        asked = [session.outputs[-1].begin <= column for column in range(COLUMNS)]
        assert [column[0] is not None for column in columns] == asked
        everything = np.array([column[1:] for column in columns], np.float32).T
        answers = session.predict(FEATURES).values()
        assert everything.tobytes() == np.concatenate(list(answers), axis=1).tobytes()

    def test_a_replay_answers_each_request_again(self, log, folder):
        (replayed,) = replay_document(log, [folder / "towers"])["models"]

        assert replayed["refused"] == {"requests": 0, "first": ""}
        assert replayed["differences"]["samples"] == 5
        assert replayed["differences"]["largest_absolute"] == 0

    def test_a_replay_compares_labels_with_probabilities_alone(self, log, folder, tmp_path):
        labels = [
            (f"r{number}", sample, sample % 2) for number, samples in ((0, 1), (1, 4)) for sample in range(samples)
        ]
        ids, samples, clicks = zip(*labels, strict=True)
        pq.write_table(
            pa.table({"request_id": ids, "request_sample": samples, "clicked": clicks, "bought": clicks}),
            tmp_path / "l.parquet",
        )
        on = ["request_id", "request_sample"]

        found = replay_document(log, [folder / "towers"], ["clicked"], labels_file=tmp_path / "l.parquet", on=on)

        quality = found["models"][0]["quality"]["clicked"]
        assert quality["samples"] == 4  # the first request did not ask for the click
        assert quality["auc"] == area_under_curve(np.arange(4) % 2, RIGHT["click"][:, 0])
        with pytest.raises(TraceError, match="expected 1 columns for towers version 1, got clicked, bought"):
            replay_document(log, [folder / "towers"], ["clicked", "bought"], labels_file=tmp_path / "l.parquet", on=on)


def test_a_change_of_outputs_is_a_change_for_clients(folder, tmp_path, capsys):
    old = folder / "towers" / "1"
    new = write_towers(tmp_path / "models", kinds={"score": "score", "click": "probability"})

    assert main(["check", str(new), "--against", str(old)]) == 0

    line = "read the outputs score (score), click (probability); the old version has click (probability), score (score)"
    assert line in capsys.readouterr().out


class TestTriton:
    """The configuration that Triton reads."""

    def test_the_export_declares_every_output_with_its_columns(self, folder):
        config = text_format.Parse((folder / "towers" / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())

        declared = {output.name: list(output.dims) for output in config.output}
        assert declared == {name: [width] for name, width in WIDTHS.items()} | {"TOP_INDEX": [-1], "TOP_SCORE": [-1]}
        assert [entry.optional for entry in config.input if entry.name == "CANDIDATES"] == [True]
        assert '# a vector\n  { name: "user_vector"' in (folder / "towers" / "config.pbtxt").read_text()

    def test_an_output_of_an_earlier_version_is_a_fault_and_is_corrected(self, folder, tmp_path, capsys):
        shutil.copytree(folder / "towers", tmp_path / "towers")
        (tmp_path / "ps.json").write_bytes((folder / "ps.json").read_bytes())
        config = tmp_path / "towers" / "config.pbtxt"
        right = config.read_text()
        config.write_text(right.replace('"click"', '"OUTPUT0"').replace("dims: [ 3 ]", "dims: [ 4 ]", 1))

        assert main(["check", str(tmp_path)]) == 0
        warned = capsys.readouterr()
        assert main(["check", str(tmp_path), "--write-config"]) == 0

        faults = "no output click; output OUTPUT0, which the version does not have; user_vector has 4 columns, not 3"
        assert faults in warned.out + warned.err
        parsed = [text_format.Parse(text, model_config_pb2.ModelConfig()) for text in (config.read_text(), right)]
        assert parsed[0] == parsed[1]
