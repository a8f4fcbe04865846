"""A cross network of version 2 whose graph does not have ``projection_dim``."""

import copy
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ModelFileError
from serving.model.dense_file import read_dense, weight_key, write_dense
from serving.model.graph import parse_graph, with_projection

CROSS = 5


def said(document, **projection):
    document = copy.deepcopy(document)
    document["layers"][CROSS]["mc_param"] |= projection
    return parse_graph(document, "graph.json")


def write(path, graph):
    rng = np.random.default_rng(3)
    weights = {weight_key(s): rng.standard_normal(s.shape).astype(np.float32) for s in graph.weights}
    write_dense(path, graph, weights)
    return weights


@settings(deadline=None, max_examples=30)
@given(rank=st.integers(1, 200), depth=st.integers(1, 6))
def test_the_width_follows_from_the_files_size(base_document, tmp_path_factory, rank, depth):
    full = said(base_document, projection_dim=rank, num_layers=depth)
    path = tmp_path_factory.mktemp("model") / "dense.model"
    weights = write(path, full)

    graph = with_projection(said(base_document, num_layers=depth), path)

    assert graph == full
    assert all(np.array_equal(w, weights[key]) for key, w in read_dense(path, graph).items())


def test_a_file_of_version_1_stays_version_1(base_document, tmp_path):
    graph = said(base_document)
    write(tmp_path / "dense.model", graph)

    assert with_projection(graph, tmp_path / "dense.model") is graph


@pytest.mark.parametrize("change", [-4, 4, 8, 1])
def test_a_file_that_fits_no_width_is_left_to_the_reader_to_refuse(base_document, tmp_path, change):
    path = tmp_path / "dense.model"
    write(path, said(base_document, projection_dim=3))
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))

    graph = with_projection(said(base_document), path)

    assert graph == said(base_document)
    with pytest.raises(ModelFileError, match=r"expected .* bytes"):
        read_dense(path, graph)


def test_an_explicit_projection_of_zero_is_kept(base_document, tmp_path):
    path = tmp_path / "dense.model"
    write(path, said(base_document, projection_dim=3))
    graph = said(base_document, projection_dim=0)

    assert with_projection(graph, path) is graph


def test_the_width_of_several_cross_networks_is_ambiguous(base_document, tmp_path):
    document = copy.deepcopy(base_document)
    document["layers"].insert(
        CROSS + 1,
        {"name": "second", "type": "MultiCross", "bottom": "slice12", "top": "x", "mc_param": {"num_layers": 2}},
    )
    path = tmp_path / "dense.model"
    write(path, said(document, projection_dim=2))

    with pytest.raises(
        ModelFileError,
        match=re.escape(
            "504 bytes too many for a graph without projection_dim; "
            "add it to mc_param of layers[5] (multicross1), layers[6] (second)"
        ),
    ):
        with_projection(parse_graph(document, "graph.json"), path)
    assert with_projection(said(document, projection_dim=2), path) == said(document, projection_dim=2)


def test_a_missing_file_is_left_to_the_reader_to_refuse(base_document, tmp_path):
    graph = said(base_document)

    assert with_projection(graph, tmp_path / "dense.model") is graph
