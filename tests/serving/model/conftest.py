import copy
import json
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
