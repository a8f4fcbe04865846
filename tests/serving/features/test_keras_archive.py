"""Features of Keras archives, with Keras's own answers; ``tests/tools/keras_archives.py`` wrote both."""

import importlib.util
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError, MissingExtraError, ModelFileError
from serving.features import FeatureReader, SlotOfTable, read_features, write_definition

FOLDER = Path(__file__).with_name("keras")
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
needs_h5py = pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="h5py (the extra keras) is absent")


def reader_of(definition):
    slots = [SlotOfTable(feature.name, feature.name) for feature in definition.slots]
    return FeatureReader(definition, slots, len(definition.dense), "features")


def only(definition, name):
    """The definition with one feature alone."""
    [feature] = [feature for feature in definition.features if feature.name == name]
    return definition.model_copy(update={"features": (feature.model_copy(update={"shares": None}),)})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=needs_h5py if model == "adapted" else ())
        for model in ("given", "adapted")
        for name in EXPECTED[model]
    ],
)
def test_every_layer_is_as_in_keras(tmp_path, model, name):
    values, answers = EXPECTED[model][name]
    definition = only(read_features(FOLDER / f"{model}.keras"), name)
    write_definition(definition, tmp_path / "features.json")  # as a version has it
    for found in (definition, read_features(tmp_path / "features.json")):
        transformed = reader_of(found)({name: values}, len(values))
        if found.dense:
            np.testing.assert_allclose(transformed.dense[:, 0], answers, rtol=3e-7)
        else:
            bags = [bag.tolist() for bag in np.split(transformed.keys, transformed.row_ptrs[1:-1])]
            assert bags == [answer if isinstance(answer, list) else [answer] for answer in answers]


def test_the_features_are_the_inputs_of_the_model_in_order():
    definition = read_features(FOLDER / "given.keras")

    assert [feature.name for feature in definition.features] == list(EXPECTED["given"])
    assert {feature.name: feature.shares for feature in definition.features if feature.shares} == {"visited": "country"}
    assert definition.features[1].is_list


def test_an_empty_text_is_a_value_that_a_lookup_does_not_know_or_masks():
    definition = read_features(FOLDER / "given.keras")
    bags = [reader_of(only(definition, name))({name: ["", None]}, 2).keys.tolist() for name in ("country", "masked")]

    assert bags == [[0, 0], []]


def test_the_statistics_of_an_adapted_normalization_need_h5py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"hotrow\[keras\]"):
        read_features(FOLDER / "adapted.keras")


@pytest.fixture
def archive(tmp_path):
    """Copy an archive with changes in the options of its layers, by name, or in its entries."""

    def changed(options, left_out="nothing"):
        path = tmp_path / "model.keras"
        with zipfile.ZipFile(FOLDER / "given.keras") as given, zipfile.ZipFile(path, "w") as written:
            for name in given.namelist():
                content = given.read(name)
                if name == "config.json":
                    model = json.loads(content)
                    for layer in model["config"]["layers"]:
                        for member, value in options.get(layer["name"], {}).items():
                            (layer["config"] if member in layer["config"] else layer)[member] = value
                    content = json.dumps(model).encode()
                if name != left_out:
                    written.writestr(name, content)
        return path

    return changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"countries": {"output_mode": "one_hot"}},
            "layer 'countries' (StringLookup): output_mode='one_hot': expected",
        ),
        ({"countries": {"invert": True}}, "layer 'countries' (StringLookup): invert=True: expected False"),
        ({"countries": {"mask_token": "x"}}, "mask_token='x': expected none or an empty text"),
        ({"countries": {"encoding": "latin1"}}, "encoding='latin1': expected 'utf-8'"),
        ({"countries": {"vocabulary": None}}, "its vocabulary is not in the archive; call adapt, and save it again"),
        (
            {"countries": {"vocabulary": ["[UNK]", "", "de"]}},
            "an empty text is in its vocabulary; expected mask_token=''",
        ),
        ({"countries": {"module": None}}, "layer 'countries' (StringLookup): expected Keras's own layer, got another"),
        ({"integer_lookup": {"num_oov_indices": 2}}, "num_oov_indices=2: expected 0 or 1"),
        ({"integer_lookup": {"mask_token": 0}}, "mask_token=0: expected none"),
        ({"hashing": {"mask_value": ""}}, "layer 'hashing' (Hashing): mask_value='': expected None"),
        ({"discretization": {"bin_boundaries": None}}, "it has no boundaries; call adapt, and save it again"),
        (
            {"normalization": {"mean": [1, 2], "variance": [1, 2]}},
            "layer 'normalization' (Normalization): expected one mean or 1, got 2",
        ),
        ({"plain": {"dtype": "string"}}, "layer 'plain' (InputLayer): no StringLookup or Hashing reads its strings"),
        ({"plain": {"dtype": "complex64"}}, "expected strings, integers, floats or booleans, got 'complex64'"),
        ({"plain": {"batch_shape": [None, None]}}, "expected a fixed number of numbers, got the shape [None, None]"),
        ({"key": {"batch_shape": [None, 3, 2]}}, "expected the shape [B], [B, 1] or [B, n], got [None, 3, 2]"),
        ({"discretization": {"bin_boundaries": [3, 1]}}, "boundaries: expected ascending numbers"),
    ],
)
def test_a_layer_without_an_equivalent_feature_is_refused_by_name(archive, options, message):
    with pytest.raises(ConfigError) as caught:
        read_features(archive(options))
    assert message in str(caught.value)


def test_a_layer_behind_another_layer_is_refused(archive):
    def node(maker):
        return [
            {"args": [{"class_name": "__keras_tensor__", "config": {"keras_history": [maker, 0, 0]}}], "kwargs": {}}
        ]

    with pytest.raises(ConfigError, match="expected it to read a model input, but it reads the layer"):
        read_features(archive({"hashing": {"inbound_nodes": node("countries")}}))
    with pytest.raises(ConfigError, match="another layer also reads 'item'; give each layer its own input"):
        read_features(archive({"hashing": {"inbound_nodes": node("item")}}))


def test_the_options_of_another_layer_need_not_have_its_name(archive):
    names = [feature.name for feature in read_features(archive({})).features]

    assert [feature.name for feature in read_features(archive({"dense_1": {"config": {}}})).features] == names


def test_what_is_not_an_archive_is_refused(archive, tmp_path):
    with pytest.raises(ModelFileError, match=r"not a \.keras archive: .*config.json"):
        read_features(archive({}, left_out="config.json"))
    with pytest.raises(ModelFileError, match=r"no\.keras: cannot be read: No such file"):
        read_features(tmp_path / "no.keras")
    damaged = tmp_path / "damaged.keras"
    shutil.copyfile(FOLDER / "given.keras", damaged)
    content = bytearray(damaged.read_bytes())
    for at in range(100, len(content), 997):
        content[at] ^= 255
    damaged.write_bytes(content)
    with pytest.raises((ModelFileError, ConfigError), match="damaged"):
        read_features(damaged)
    damaged.write_bytes(b"no zip")
    with pytest.raises(ModelFileError, match=r"not a \.keras archive: File is not a zip file"):
        read_features(damaged)
