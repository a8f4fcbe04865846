import json
from pathlib import Path

import pytest

from serving.features import FeatureReader, SlotOfTable, read_definition


@pytest.fixture
def reader_of(tmp_path):
    """Make a reader of features, each of which has a table of its own unless ``tables`` says otherwise."""

    def make(*features, tables=None, slots=None, **members):
        path = tmp_path / "features.json"
        path.write_text(json.dumps({"format": 1, "features": list(features), **members}), encoding="utf-8")
        definition = read_definition(path)
        names = slots or [feature.slot_name for feature in definition.slots]
        of_slots = [SlotOfTable(name, (tables or {}).get(name, name)) for name in names]
        return FeatureReader(definition, of_slots, len(definition.dense_names), str(path))

    return make


@pytest.fixture(scope="session")
def tensorflow():
    """What TensorFlow and Keras make of the same values; ``tests/tools/tensorflow_values.py`` wrote the file."""
    return json.loads(Path(__file__).with_name("tensorflow.json").read_text(encoding="utf-8"))
