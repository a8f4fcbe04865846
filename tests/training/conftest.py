"""A small graph with two tables. The second table has no default setting."""

import copy

import pytest

from serving.model.graph import parse_graph
from tests.training.publishing.memory_log import Log
from training.model.ctr_model import CtrModel
from training.model.export import export_model
from training.model.trainer import train
from training.optimizers.learning_rate import LearningRateSchedule
from training.synthetic.criteo_like import generate

TWO_TABLES = {
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": 13},
            "sparse": [
                {"top": "wide", "type": "DistributedSlot", "max_feature_num_per_sample": 40, "slot_num": 6},
                {"top": "deep", "type": "DistributedSlot", "max_feature_num_per_sample": 60, "slot_num": 20},
            ],
        },
        {
            "name": "wide_table",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "wide",
            "top": "wide_table",
            "sparse_embedding_hparam": {"embedding_vec_size": 3, "combiner": 1, "default_emb_vec_value": 0.25},
        },
        {
            "name": "deep_table",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "deep",
            "top": "deep_table",
            "sparse_embedding_hparam": {"embedding_vec_size": 4, "combiner": 0},
        },
        {"name": "flat1", "type": "Reshape", "bottom": "wide_table", "top": "flat1", "leading_dim": 18},
        {"name": "flat2", "type": "Reshape", "bottom": "deep_table", "top": "flat2", "leading_dim": 80},
        {"name": "concat", "type": "Concat", "bottom": ["flat1", "flat2", "dense"], "top": "concat"},
        {
            "name": "cross",
            "type": "MultiCross",
            "bottom": "concat",
            "top": "cross",
            "mc_param": {"num_layers": 2, "projection_dim": 4},
        },
        {"name": "fc1", "type": "InnerProduct", "bottom": "cross", "top": "fc1", "fc_param": {"num_output": 16}},
        {"name": "relu1", "type": "ReLU", "bottom": "fc1", "top": "relu1"},
        {"name": "dropout1", "type": "Dropout", "rate": 0.25, "bottom": "relu1", "top": "dropout1"},
        {"name": "fc2", "type": "InnerProduct", "bottom": "dropout1", "top": "fc2", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
    ]
}


@pytest.fixture
def document():
    return copy.deepcopy(TWO_TABLES)


@pytest.fixture
def model(document):
    return CtrModel(parse_graph(document, "graph.json"), seed=0)


def train_a_little(model):
    samples = generate(600, seed=0).samples
    list(train(model, samples, samples, epochs=1, batch_size=64, schedule=LearningRateSchedule(0.01), seed=0))
    return model


@pytest.fixture
def trained(model):
    return train_a_little(model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model ``trained`` as a version: exported once, because tracing the network takes long."""
    document = copy.deepcopy(TWO_TABLES)
    model = train_a_little(CtrModel(parse_graph(document, "graph.json"), seed=0))
    return export_model(model, document, tmp_path_factory.mktemp("exported"), "two")


@pytest.fixture
def memory_log(monkeypatch):
    """The log of every publisher."""
    log = Log()
    monkeypatch.setattr("training.publishing.sender.open_sink", log.open)
    return log
