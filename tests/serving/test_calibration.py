"""Sessions with the engine int8: the source of the calibration, the report, and refusals."""

import contextlib
import json
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import CreateEmbeddingCache, CreateParameterServer, InferenceSession, load_model
from serving.calibration import look_up_calibration
from serving.cli.main import main
from serving.config import read_model_directory
from serving.errors import ConfigError, MissingExtraError, ModelFileError
from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.tools.tiny_model import TinyModel, flatten

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ndonnx")

TOLERANCE = 0.05  # random weights make the small network steeper than a trained network


@pytest.fixture
def write_version(write_model):
    """Write a model of two tables as a version directory; return the WrittenModel and the directory."""

    def write(folder="dcn/1", **options):
        model = write_model(
            write_model.table(), write_model.table(slots=1, dim=5, combiner=1), folder=folder, **options
        )
        model.config_file.rename(model.config_file.with_name("graph.json"))
        return model, model.config_file.parent

    return write


def arrays_of(model, samples=300, seed=1, **change):
    """Return a request's arrays by their names on the wire; ``change`` replaces arrays, and None drops an array."""
    dense, bags = model.draw_request(np.random.default_rng(seed), samples)
    keys, row_ptrs, _ = model.flatten(bags)
    arrays = {"DES": dense, "CATCOLUMN": np.array(keys), "ROWINDEX": np.array(row_ptrs)} | change
    return {name: array for name, array in arrays.items() if array is not None}


def write_calibration(path, model, **change):
    np.savez(path, **arrays_of(model, **change))
    return path


def write_header(path, shape):
    """Write an archive of one array that has only a header."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("DES.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def assert_near(session, model):
    """On samples outside the calibration the answers are near float64 and differ from float32."""
    dense, bags = model.draw_request(np.random.default_rng(2), 60)
    keys, row_ptrs, _ = model.flatten(bags)
    errors = np.abs(session.predict(dense, keys, row_ptrs) - model.expected(dense, bags))
    assert 1e-5 < errors.max() < 2 * TOLERANCE


@pytest.mark.parametrize("is_given", [True, False])
def test_a_session_is_calibrated_with_a_given_file_or_the_file_next_to_the_graph(write_version, tmp_path, is_given):
    model, directory = write_version()
    file = write_calibration(tmp_path / "mine.npz" if is_given else directory / "calibration.npz", model)

    with load_model(directory, engine="int8", calibration=file if is_given else None, tolerance=TOLERANCE) as session:
        assert_near(session, model)

    record = session.quantization
    assert (session.engine, record.samples, record.products) == ("int8", 300, 3)
    assert 1 <= record.quantized <= 3
    assert 0 < record.mean_error < record.max_error <= TOLERANCE


def test_other_engines_have_no_quantization_and_need_no_calibration(write_version):
    _, directory = write_version()

    for engine in ("numpy", "onnx"):
        with load_model(directory, engine=engine) as session:
            assert session.quantization is None


def test_the_calls_of_hugectr_accept_the_engine_too(write_model, tmp_path):
    model = write_model()
    file = write_calibration(tmp_path / "mine.npz", model)
    with CreateParameterServer([model.config_file], ["dcn"], True) as server:
        cache = CreateEmbeddingCache(server, 0, False, 0.2, model.config_file, "dcn", True)

        options = {"engine": "int8", "calibration": file, "tolerance": TOLERANCE}
        assert_near(InferenceSession(model.config_file, 0, cache, **options), model)


@pytest.mark.parametrize(("engine", "chosen"), [("auto", "the engine is auto"), (None, "no engine was chosen")])
def test_a_calibration_without_the_engine_int8_is_refused(write_version, tmp_path, capsys, engine, chosen):
    model, directory = write_version()
    file = write_calibration(tmp_path / "mine.npz", model)

    if engine:
        with pytest.raises(ConfigError, match=f"mine.npz: is a calibration for the engine int8, but {chosen}"):
            load_model(directory, engine=engine, calibration=file)
    arguments = ["--engine", engine] if engine else []
    assert main(["check", str(directory), *arguments, "--calibration", str(file)]) == 1
    assert f"is a calibration for the engine int8, but {chosen}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_tolerance_without_the_engine_int8_is_refused(write_version, capfd, command):
    _, directory = write_version()

    assert main([command, str(directory), "--engine", "onnx", "--tolerance", "0.5"]) == (1 if command == "check" else 2)

    assert "--tolerance: needs the engine int8, but the engine is onnx" in capfd.readouterr().err


def test_a_calibration_may_have_more_samples_than_a_request(write_version):
    model, directory = write_version()
    write_calibration(directory / "calibration.npz", model, samples=300)
    assert read_model_directory(directory).max_batchsize == 64

    with load_model(directory, engine="int8", tolerance=TOLERANCE) as session:
        assert session.quantization.samples == 300


def test_the_calibration_of_a_model_without_dense_features_needs_none(write_version):
    model, directory = write_version(features=0)

    for dense in (None, np.empty((300, 0), np.float32)):
        write_calibration(directory / "calibration.npz", model, DES=dense)
        with load_model(directory, engine="int8", tolerance=TOLERANCE) as session:
            assert_near(session, model)


def test_a_missing_calibration_error_names_the_arrays_to_provide(write_version):
    _, directory = write_version()

    with pytest.raises(
        ConfigError, match=r"calibration\.npz: .* give a calibration file .*DES, CATCOLUMN and ROWINDEX"
    ):
        load_model(directory, engine="int8")


WRONG_FILES = {
    "nothing": (lambda path, model: path.unlink(), "mine.npz: no such file"),
    "a folder": (
        lambda path, model: [path.unlink(), path.mkdir()],
        "cannot be read: not a regular file; expected a .npz",
    ),
    "not an archive": (lambda path, model: path.write_bytes(b"DES"), "expected a .npz with the arrays DES"),
    "half an archive": (
        lambda path, model: path.write_bytes(path.read_bytes()[:400]),
        "expected a .npz with the arrays",
    ),
    "a shape without integers": (
        lambda path, model: write_header(path, "(True, 4)"),
        "expected a .npz with the arrays",
    ),
    "a shape of petabytes": (lambda path, model: write_header(path, (1 << 50,)), "does not fit into memory"),
    "a million million rows": (
        lambda path, model: write_header(path, (10**12,)),
        "does not fit into memory",
    ),
    "an empty file": (lambda path, model: path.write_bytes(b""), "expected a .npz with the arrays DES"),
    "one array": (
        lambda path, model: [np.save(path.with_suffix(".npy"), np.zeros(3)), path.with_suffix(".npy").rename(path)],
        "this is one array",
    ),
    "Python objects": (
        lambda path, model: write_calibration(path, model, DES=np.array([{}], object)),
        "expected a .npz with the arrays DES",
    ),
    "no keys": (
        lambda path, model: write_calibration(path, model, CATCOLUMN=None),
        "expected the arrays CATCOLUMN, DES, ROWINDEX, got DES, ROWINDEX",
    ),
    "no dense features": (
        lambda path, model: write_calibration(path, model, DES=None),
        "expected the arrays CATCOLUMN, DES, ROWINDEX, got CATCOLUMN, ROWINDEX",
    ),
    "an unknown array": (
        lambda path, model: write_calibration(path, model, LABELS=np.zeros(3)),
        "got DES, CATCOLUMN, ROWINDEX, LABELS",
    ),
    "offsets that fall": (
        lambda path, model: write_calibration(path, model, ROWINDEX=np.array([0, 5, 3, 9, 0])),
        "ROWINDEX: falls from 5 to 3",
    ),
    "features that are NaN": (
        lambda path, model: write_calibration(path, model, DES=np.full((300, 2), np.nan, np.float32)),
        "DES: sample 0, feature 0 is nan",
    ),
    "keys of another model": (
        lambda path, model: write_calibration(
            path,
            model,
            CATCOLUMN=np.full(1, 7),
            ROWINDEX=np.array([0, 1, 1, 1, 0, 0]),
            DES=np.zeros((1, 2), np.float32),
        ),
        "none of its 1 keys is in the model's tables",
    ),
}


@pytest.mark.parametrize(("write", "message"), WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_a_wrong_calibration_is_refused(write_version, tmp_path, write, message):
    model, directory = write_version()
    path = write_calibration(tmp_path / "mine.npz", model)
    write(path, model)

    with pytest.raises(ModelFileError) as caught:
        load_model(directory, engine="int8", calibration=path)

    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(("unknown_ratio", "is_told"), [(0.8, True), (0.2, False)])
def test_a_calibration_of_mostly_unknown_keys_is_logged(write_version, tmp_path, caplog, unknown_ratio, is_told):
    model, directory = write_version()
    dense, bags = model.draw_request(np.random.default_rng(1), 300, unknown_ratio)
    keys, row_ptrs, _ = model.flatten(bags)
    np.savez(tmp_path / "mine.npz", DES=dense, CATCOLUMN=np.array(keys), ROWINDEX=np.array(row_ptrs))

    load_model(directory, engine="int8", calibration=tmp_path / "mine.npz", tolerance=0.2).close()

    unknown = keys.count(123_456_789)
    said = f"mine.npz: {unknown} of its {len(keys)} keys are in no table; is it for this model?"
    assert (said in caplog.text) is is_told


@settings(deadline=None, max_examples=50)
@given(position=st.integers(0, 10**6), change=st.integers(1, 255), is_compressed=st.booleans())
def test_damage_anywhere_in_a_calibration_is_refused_or_harmless(damaged, position, change, is_compressed):
    lookup, contents, path = damaged
    content = bytearray(contents[is_compressed])
    content[position % len(content)] ^= change
    path.write_bytes(content)

    with contextlib.suppress(ModelFileError):
        assert look_up_calibration(lookup, lookup.config, path, TOLERANCE).dense.shape[0] >= 1


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Return a model's lookup, a plain and a compressed calibration, and a path for damaged copies."""
    folder = tmp_path_factory.mktemp("damaged")
    model = TinyModel(rows=20)
    dense, bags = model.sample_requests(5)
    keys, offsets = flatten(bags)
    arrays = {"DES": dense, "CATCOLUMN": keys, "ROWINDEX": offsets}
    np.savez(folder / "plain.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    with load_model(model.write(folder / "models"), engine="numpy") as session:
        contents = [(folder / name).read_bytes() for name in ("plain.npz", "packed.npz")]
        yield session.embedding_cache, contents, folder / "damaged.npz"


@pytest.mark.parametrize("tolerance", [0, -0.1, 1.1, float("nan"), float("inf")])
def test_a_tolerance_outside_zero_to_one_is_refused(write_version, tmp_path, tolerance):
    model, directory = write_version()

    with pytest.raises(ConfigError, match="tolerance: expected more than 0 and at most 1, got"):
        load_model(
            directory, engine="int8", calibration=write_calibration(tmp_path / "c.npz", model), tolerance=tolerance
        )


def test_an_error_beyond_the_tolerance_is_refused_with_its_value_and_the_model_is_unloaded(write_version, tmp_path):
    model, directory = write_version()
    file = write_calibration(tmp_path / "mine.npz", model)

    with pytest.raises(ConfigError, match=r"off by 0\.0\d+ at most.* with a single product\); the tolerance is 1e-07"):
        load_model(directory, engine="int8", calibration=file, tolerance=1e-7)


def test_without_onnx_runtime_the_extra_is_named(write_version, tmp_path, monkeypatch):
    model, directory = write_version()
    file = write_calibration(tmp_path / "mine.npz", model)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'hotrow\[onnx\]'"):
        load_model(directory, engine="int8", calibration=file)


@pytest.fixture
def own_network(write_version, tmp_path):
    """Write a model whose exported network replaced its layers, with a calibration next to its graph."""
    model, directory = write_version()
    assert main(["export-onnx", str(directory), str(tmp_path / "net.onnx")]) == 0
    (tmp_path / "net.onnx").rename(directory / "net.onnx")
    document = json.loads((directory / "graph.json").read_text())
    document["inference"]["dense_model_file"] = "net.onnx"
    document["layers"] = document["layers"][:3]
    (directory / "graph.json").write_text(json.dumps(document))
    write_calibration(directory / "calibration.npz", model)
    return model, directory


def test_a_users_own_network_runs_on_integers_too(own_network):
    model, directory = own_network

    with load_model(directory, engine="int8", tolerance=TOLERANCE) as session:
        assert_near(session, model)
        assert session.quantization.quantized >= 1


class TestCheck:
    def test_it_reports_the_error_of_int8(self, own_network, capsys):
        _, directory = own_network

        assert main(["check", str(directory), "--engine", "int8", "--tolerance", str(TOLERANCE)]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "model dcn version 1"
        assert "of 3 products; on 300 samples a probability is off by 0.0" in lines[1]

    def test_a_given_calibration_file_is_used(self, write_version, tmp_path, capsys):
        model, directory = write_version()
        file = write_calibration(tmp_path / "mine.npz", model, samples=100)

        arguments = ["--engine", "int8", "--calibration", str(file), "--tolerance", str(TOLERANCE)]
        assert main(["check", str(directory), *arguments]) == 0

        assert "on 100 samples" in capsys.readouterr().out

    def test_an_error_beyond_the_tolerance_is_refused(self, own_network, capsys):
        _, directory = own_network

        assert main(["check", str(directory), "--engine", "int8", "--tolerance", "1e-7"]) == 1

        error = capsys.readouterr().err
        assert "the tolerance is 1e-07" in error
        assert error.count("\n") == 1

    @pytest.mark.parametrize("engine", ["auto", "numpy", "onnx"])
    def test_another_engine_is_opened_without_a_report(self, write_version, capsys, engine):
        _, directory = write_version()

        assert main(["check", str(directory), "--engine", engine]) == 0

        assert "int8" not in capsys.readouterr().out


def test_a_repository_calibrates_each_model_with_its_own_file(write_version, tmp_path):
    for name in ("one", "two"):
        model, directory = write_version(f"models/{name}/1", seed=len(name))
        write_calibration(directory / "calibration.npz", model)

    with ModelRepository(tmp_path / "models", Runtime("int8", tolerance=TOLERANCE)) as repository:
        repository.load()

        assert [session.engine for session in repository.models().values()] == ["int8", "int8"]
        assert sum("products; on 300 samples" in line for line in repository.describe()) == 2


def test_one_calibration_for_several_models_is_refused(write_version, tmp_path):
    for name in ("one", "two"):
        model, _ = write_version(f"models/{name}/1")
    file = write_calibration(tmp_path / "mine.npz", model)

    repository = ModelRepository(tmp_path / "models", Runtime("int8", calibration=file))
    with pytest.raises(ConfigError, match=r"mine\.npz: is one file for 2 models: put a calibration\.npz next to"):
        repository.load()
    assert main(["check", str(tmp_path / "models"), "--engine", "int8", "--calibration", str(file)]) == 1
