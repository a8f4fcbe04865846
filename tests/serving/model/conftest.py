import copy
import json
import os
from pathlib import Path

import pytest

from serving.model.graph import parse_graph


@pytest.fixture(scope="session")
def base_document():
    """A training graph with every layer type DCN needs, small enough to count by hand; not to be changed."""
    return json.loads(Path(__file__).with_name("dcn_small.json").read_text())


@pytest.fixture
def document(base_document):
    """A copy of that graph, to be changed at will."""
    return copy.deepcopy(base_document)


@pytest.fixture
def graph(document):
    return parse_graph(document, "graph.json")


@pytest.fixture(scope="session")
def genuine_config():
    """Give the path of a HugeCTR configuration by its name, or skip."""
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("HOTROW_TEST_DATA", default)) / "hugectr_configs"

    def find(name):
        if not (folder / name).exists():
            pytest.skip(f"{folder / name} is absent; set HOTROW_TEST_DATA")
        return folder / name

    return find
