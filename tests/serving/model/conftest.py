import copy
import json
from pathlib import Path

import pytest

from serving.model.graph import parse_graph


@pytest.fixture(scope="session")
def base_document():
    """A small training graph with every layer type of DCN. Tests must not change it."""
    return json.loads(Path(__file__).with_name("dcn_small.json").read_text())


@pytest.fixture
def document(base_document):
    """A copy of the DCN graph that a test may change."""
    return copy.deepcopy(base_document)


@pytest.fixture
def graph(document):
    return parse_graph(document, "graph.json")
