"""``dump_incremental_model_2kafka``: HPS's messages have the rows that training changed."""

import gc
from pathlib import Path

import pytest

from serving.errors import ConfigError
from serving.model.sparse_file import open_sparse
from serving.stream import decode_hps
from tests.training.hugectr.conftest import write_data
from tests.training.hugectr.test_session import solver, train_file
from training.errors import SessionError
from training.hugectr import Session

pytestmark = pytest.mark.usefixtures("data")
TABLES = {"wide_table": (0, 1, "distributed"), "deep_table": (1, 4, "localized")}


def followed(log, key_bytes):
    """The rows that the messages leave in each table of the model "ctr"."""
    tables = {f"hps_et.ctr.{name}": {} for name in TABLES}
    for payload, _, topic in log.messages:
        message = decode_hps(payload, topic, key_bytes)
        tables[topic] |= dict(zip(message.keys.tolist(), message.rows.tolist(), strict=True))
    return tables


def trained(session, key_type):
    session.download_params_to_files("out", 1)
    tables = {}
    for name, (table, dim, layout) in TABLES.items():
        [(keys, vectors)] = open_sparse(f"out{table}_sparse_1.model", dim, key_type, layout).batches(10_000)
        tables[f"hps_et.ctr.{name}"] = dict(zip(keys.tolist(), vectors.tolist(), strict=True))
    return tables


@pytest.mark.parametrize("oversubscribes", [False, True])
@pytest.mark.parametrize(("key_type", "key_bytes"), [("uint32", 4), ("int64", 8)])
def test_servers_have_the_rows_of_the_session(graph, write_graph, memory_log, key_type, key_bytes, oversubscribes):
    write_data(key_type, shifts=(0, 1000, 2000, 0, 1000, 0))  # other keys in the last slot of each file
    settings = solver(i64_input_key=key_bytes == 8, kafka_brockers="a:1;b:2", model_name="ctr")
    session = Session(settings, write_graph(graph), oversubscribes)
    sizes = []
    for part in range(3):
        if oversubscribes:
            session.get_model_oversubscriber().update(f"file_list.{part}.keyset")
        train_file(session, f"file_list.{part}.txt")
        session.dump_incremental_model_2kafka()
        session.dump_incremental_model_2kafka()  # nothing has changed
        sizes.append(session.get_params_num())
    expected = trained(session, "I64" if key_bytes == 8 else "I32")

    del session
    gc.collect()  # the end of a session sends what waits

    assert followed(memory_log, key_bytes) == expected
    assert memory_log.url == "kafka://a:1,b:2"
    assert [path.name for path in Path("ctr.outbox").iterdir()] == ["outbox.json"]


def test_the_model_has_the_name_of_the_document(graph, write_graph, memory_log):
    session = Session(solver(kafka_brockers="a:1"), write_graph(graph, "dcn.json"))
    train_file(session, "file_list.0.txt")
    session.dump_incremental_model_2kafka()
    del session
    gc.collect()

    assert {topic for _, _, topic in memory_log.messages} == {f"hps_et.dcn.{name}" for name in TABLES}


def test_without_brokers_nothing_can_be_dumped(graph, write_graph):
    with pytest.raises(SessionError, match="dump_incremental_model_2kafka needs kafka_brockers"):
        Session(solver(), write_graph(graph)).dump_incremental_model_2kafka()


def test_a_name_that_is_no_model_name_is_refused(graph, write_graph, memory_log):
    with pytest.raises(ConfigError, match="Publisher: model: expected 1 to 120 letters"):
        Session(solver(kafka_brockers="a:1", model_name="a/b"), write_graph(graph))
