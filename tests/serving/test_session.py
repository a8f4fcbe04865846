"""Sessions: their answers and their refusals."""

import json
import struct
import threading

import numpy as np
import pytest

from serving import InferenceSession, ParameterServer
from serving.config import read_inference_config
from serving.errors import ConfigError, ModelFileError, RequestError, UnknownModelError
from serving.lookup import LookupSession
from serving.model.dense_file import weight_key, write_dense
from serving.model.graph import read_graph
from serving.reading import read_batch
from serving.storage import MemoryStore, RocksDbStore

# For float32 against float64, in two layers of at most 40 inputs.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def open_session():
    """Open a session of a written v3.0 model with tables in RAM; all servers are closed at the end."""
    servers = []

    def open_(model, engine="numpy"):
        config = read_inference_config(model.config_file, "dcn")
        servers.append(ParameterServer([MemoryStore()]))
        servers[-1].load_model(config)
        return InferenceSession(config, 0, LookupSession(servers[-1], config), engine=engine)

    yield open_
    for server in servers:
        server.close()


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
@pytest.mark.parametrize("combiner", [0, 1])
@pytest.mark.parametrize("features", [0, 3])
def test_probabilities_agree_with_pytorch_in_float64(write_model, open_session, engine, combiner, features):
    model = write_model(write_model.table(combiner=combiner), features=features)
    session = open_session(model, engine)
    dense, bags = model.draw_request(np.random.default_rng(3), samples=9, unknown_ratio=0.2)
    keys, row_ptrs, _ = model.flatten(bags)

    probabilities = session.predict(dense, keys, row_ptrs)

    assert session.engine == engine
    assert (probabilities.dtype, probabilities.shape) == (np.float32, (9, 1))
    np.testing.assert_allclose(probabilities, model.expected(dense, bags), **TOLERANCE)


def test_a_lookup_accepts_weights_per_table(write_model, open_session):
    model = write_model(write_model.table(), write_model.table(combiner=1))
    cache = open_session(model).embedding_cache
    rng = np.random.default_rng(4)
    dense, bags = model.draw_request(rng, samples=5)
    keys, row_ptrs, _ = model.flatten(bags)
    batch = read_batch(cache.config, dense, keys, row_ptrs)
    weights = rng.random(batch.tables[1].keys.size, dtype=np.float32)

    plain, weighted = cache.lookup_pooled(batch), cache.lookup_pooled(batch, [None, weights])

    np.testing.assert_array_equal(weighted.embeddings[0], plain.embeddings[0])
    of_keys = batch.tables[1]
    bag_rows = [model.tables[1][key].astype(np.float64) for key in of_keys.keys.tolist()]
    for bag, answer in enumerate(weighted.embeddings[1].reshape(-1, weighted.embeddings[1].shape[-1])):
        inside = range(of_keys.row_ptrs[bag], of_keys.row_ptrs[bag + 1])
        if inside:
            expected = np.average([bag_rows[at] for at in inside], axis=0, weights=[weights[at] for at in inside])
            np.testing.assert_allclose(answer, expected, **TOLERANCE)


def test_a_lookup_refuses_weights_of_another_number_of_tables(write_model, open_session):
    model = write_model()
    cache = open_session(model).embedding_cache
    dense, bags = model.draw_request(np.random.default_rng(4), samples=5)
    batch = read_batch(cache.config, dense, *model.flatten(bags)[:2])

    with pytest.raises(RequestError, match="expected weights of 1 tables, got 2"):
        cache.lookup_pooled(batch, [None, None])


def edit_layers(model, edit):
    """Change the layers in a written model's JSON."""
    document = json.loads(model.config_file.read_text())
    edit({layer["name"]: layer for layer in document["layers"]}, document["layers"])
    model.config_file.write_text(json.dumps(document))


def test_a_batch_smaller_than_the_graph_can_work_on_is_refused(write_model, open_session):
    model = write_model(features=3)
    third = {"name": "third", "type": "Gather", "bottom": "dense", "top": "third", "indices": [2]}
    edit_layers(model, lambda by_name, layers: layers.insert(-2, third))
    session = open_session(model)
    dense, bags = model.draw_request(np.random.default_rng(3), samples=3)
    keys, row_ptrs, _ = model.flatten(bags)

    assert session.predict(dense, keys, row_ptrs).shape == (3, 1)
    dense, bags = model.draw_request(np.random.default_rng(3), samples=2)
    keys, row_ptrs, _ = model.flatten(bags)
    with pytest.raises(RequestError, match="expected at least 3 samples, because the graph picks rows, got 2"):
        session.predict(dense, keys, row_ptrs)


def test_the_size_of_the_dense_file_determines_the_projection_width_of_a_cross_network(write_model, open_session):
    model = write_model(features=3)
    silent = model.config_file.read_text()
    edit_layers(model, lambda by_name, layers: by_name["cross"]["mc_param"].update(projection_dim=2))
    graph = read_graph(model.config_file)
    rng = np.random.default_rng(6)
    weights = {weight_key(s): rng.normal(0, 0.3, s.shape).astype(np.float32) for s in graph.weights}
    write_dense(model.config_file.parent / "_dense_10.model", graph, weights)
    dense, bags = model.draw_request(rng, samples=5)
    keys, row_ptrs, _ = model.flatten(bags)
    expected = open_session(model).predict(dense, keys, row_ptrs)

    model.config_file.write_text(silent)

    assert np.array_equal(open_session(model).predict(dense, keys, row_ptrs), expected)


def test_several_tables_answer_the_same_in_both_forms_of_row_ptrs(write_model, open_session):
    table = write_model.table
    model = write_model(
        table(slots=2, dim=4), table(slots=1, dim=3, combiner=1), table(slots=3, dim=5, layout="localized")
    )
    session = open_session(model)
    dense, bags = model.draw_request(np.random.default_rng(4), samples=7)
    keys, by_table, one_csr = model.flatten(bags)

    probabilities = session.predict(dense, keys, by_table)

    np.testing.assert_allclose(probabilities, model.expected(dense, bags), **TOLERANCE)
    assert session.predict(dense, keys, one_csr).tobytes() == probabilities.tobytes()


def test_unknown_keys_get_the_default_value_of_the_table(write_model, open_session):
    model = write_model(write_model.table(slots=1, dim=2))
    model.document["layers"][1]["sparse_embedding_hparam"]["default_emb_vec_value"] = 0.75
    model.write_config()
    session = open_session(model)
    model.tables[0][987654] = np.full(2, 0.75, np.float32)

    probabilities = session.predict([1.0, 2.0], [987654], [0, 1])

    np.testing.assert_allclose(probabilities, model.expected([[1.0, 2.0]], [[[[987654]]]]), **TOLERANCE)


def test_a_prediction_reports_how_many_keys_were_defaulted(write_model, open_session):
    model = write_model(write_model.table(slots=2), write_model.table(slots=1))
    session = open_session(model)
    known = [next(iter(rows)) for rows in model.tables]
    keys = [known[0], 424242, known[1], 424242, 424243, 424242]
    batch = read_batch(session.config, np.zeros((2, 2), np.float32), keys, [0, 1, 2, 3, 4, 0, 1, 2])

    prediction = session.predict_batch(batch)

    assert prediction.defaulted_keys == 4
    assert prediction.values.shape == (2, 1)


def test_one_session_answers_many_threads(write_model, open_session):
    model = write_model()
    session = open_session(model)
    rng = np.random.default_rng(5)
    requests = [model.draw_request(rng, samples=int(rng.integers(1, 20))) for _ in range(8)]
    wrong = []

    def work(dense, bags):
        keys, row_ptrs, _ = model.flatten(bags)
        expected = model.expected(dense, bags)
        for _ in range(20):
            if not np.allclose(session.predict(dense, keys, row_ptrs), expected, **TOLERANCE):
                wrong.append(bags)

    threads = [threading.Thread(target=work, args=request) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.parametrize(("key_type", "flag"), [("I64", True), ("I32", False)])
def test_i64_input_key_is_optional_and_must_agree(write_model, open_session, key_type, flag):
    model = write_model(key_type=key_type)
    session = open_session(model)
    dense, bags = model.draw_request(np.random.default_rng(6), samples=2)
    keys, row_ptrs, _ = model.flatten(bags)

    assert session.predict(dense, keys, row_ptrs, flag).tobytes() == session.predict(dense, keys, row_ptrs).tobytes()
    with pytest.raises(RequestError, match=f"i64_input_key={not flag}, but the model's keys are {key_type}"):
        session.predict(dense, keys, row_ptrs, not flag)


def test_a_wrong_request_is_refused(write_model, open_session):
    session = open_session(write_model())

    with pytest.raises(RequestError, match="ROWINDEX"):
        session.predict([0.0, 0.0], [1, 2], [0, 1, 2, 3])


def test_only_a_checked_batch_is_predicted(write_model, open_session):
    session = open_session(write_model())

    for call in (session.predict_batch, lambda batch: session.predict_batches([batch])):
        with pytest.raises(RequestError, match="expected a Batch, which read_batch returns, got NoneType"):
            call(None)
    with pytest.raises(RequestError, match="expected a Batch, which read_batch returns, got list"):
        session.embedding_cache.lookup_pooled([])
    with pytest.raises(RequestError, match="expected keys of 1 tables, got NoneType"):
        session.embedding_cache.lookup(None)


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_an_answer_that_is_not_finite_is_refused(write_model, open_session, engine):
    model = write_model()
    dense_file = model.config_file.with_name("_dense_10.model")
    dense_file.write_bytes(dense_file.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    session = open_session(model, engine)

    with pytest.raises(RequestError, match=r"sample 0: the network's answer is \[nan\], not a finite number"):
        session.predict([0.0] * 4, [], [0] * 7)


def test_a_session_without_a_cache_is_refused(write_model):
    with pytest.raises(ConfigError, match="embedding_cache: expected what CreateEmbeddingCache returned, got NoneType"):
        InferenceSession(write_model().config_file, 0, None)


def test_a_session_accepts_the_json_or_the_configuration_of_its_cache(write_model, open_session):
    model = write_model()
    cache = open_session(model).embedding_cache

    for config in (model.config_file, str(model.config_file), cache.config):
        assert InferenceSession(config, 0, cache, engine="numpy").config == cache.config


def test_a_session_of_another_model_than_its_cache_is_refused(write_model, open_session):
    cache = open_session(write_model()).embedding_cache
    other = write_model(write_model.table(slots=2), folder="other")

    for config in (other.config_file, cache.config.model_copy(update={"dense_dim": 3})):
        with pytest.raises(ConfigError, match=r"the embedding cache is of another model, 'dcn' from .*model\.json"):
            InferenceSession(config, 0, cache)


def test_a_session_for_another_device_than_its_cache_is_refused(write_model, open_session):
    cache = open_session(write_model()).embedding_cache

    with pytest.raises(ConfigError, match="device_id 1, but the embedding cache was created for device 0"):
        InferenceSession(cache.config, 1, cache)


def test_damaged_dense_weights_are_refused(write_model, open_session):
    model = write_model()
    cache = open_session(model).embedding_cache
    cache.config.dense_file.write_bytes(b"1234")

    with pytest.raises(ModelFileError, match="_dense_10"):
        InferenceSession(cache.config, 0, cache)


def test_a_lookup_session_of_a_model_that_is_not_loaded_is_refused(write_model):
    config = read_inference_config(write_model().config_file, "dcn")

    with ParameterServer([MemoryStore()]) as server, pytest.raises(UnknownModelError, match="'dcn' of version 0"):
        LookupSession(server, config)


def test_predictions_do_not_depend_on_how_many_rows_fit_into_memory(write_model, tmp_path):
    table = write_model.table
    model = write_model(table(rows=200), table(slots=2, dim=6, combiner=1, rows=300))
    config = read_inference_config(model.config_file, "dcn")
    dense, bags = model.draw_request(np.random.default_rng(10), samples=40, unknown_ratio=0.1)
    keys, row_ptrs, _ = model.flatten(bags)
    answers = []
    for number, memory in enumerate(
        (None, MemoryStore(capacity_rows=1), MemoryStore(capacity_rows=250), MemoryStore())
    ):
        stores = [RocksDbStore(tmp_path / f"db{number}", num_threads=1)]
        with ParameterServer(stores if memory is None else [memory, *stores]) as server:
            server.load_model(config)
            session = InferenceSession(config, 0, LookupSession(server, config), engine="numpy")

            answers.append(session.predict(dense, keys, row_ptrs))

    np.testing.assert_allclose(answers[0], model.expected(dense, bags), **TOLERANCE)
    assert {answer.tobytes() for answer in answers} == {answers[0].tobytes()}
