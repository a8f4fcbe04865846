"""`hotrow updates` against servers that answer by hand."""

import json

import pytest

from serving.cli.main import main
from tests.serving.cli.status_server import reader, status, status_server, status_with


def test_every_reader_has_its_state_counts_and_positions(capsys):
    parts = [
        {"name": "hotrow.ctr/0", "position": "12", "lag_messages": 1500},
        {"name": "hotrow.ctr/1", "position": "", "lag_messages": None},
    ]
    behind = reader(worker=1, fault="log: away", partitions=parts, lag_messages=1500, lag_s=61.04, skipped={"run": 5})
    with status_server(status_with(reader(), behind)) as server:
        code = main(["updates", server.url])

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "ctr version 7, worker 0: up; 0 messages, 0.0 s behind",
        "messages: applied 1,234 (34 delete, 1,200 upsert), skipped 0, rejected 3 (1 checksum, 2 row)",
        "PARTITION     POSITION  LAG",
        "hotrow.ctr/0  1237        0",
        "",
        "ctr version 7, worker 1: no updates: log: away; 1,500 messages, 61.0 s behind",
        "messages: applied 1,234 (34 delete, 1,200 upsert), skipped 5 (5 run), rejected 3 (1 checksum, 2 row)",
        "PARTITION     POSITION    LAG",
        "hotrow.ctr/0  12        1,500",
        "hotrow.ctr/1  -             -",
    ]


def test_json_is_a_list_of_the_readers(capsys):
    with status_server(status_with(reader())) as server:
        assert main(["updates", server.url, "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == [{"model": "ctr", "version": "7", **reader()}]


@pytest.mark.parametrize(
    ("options", "shown"), [([], "hotrow 1.2.3: no served model reads updates"), (["--json"], "[]")]
)
def test_a_server_without_updates_says_so(capsys, options, shown):
    with status_server(status()) as server:
        assert main(["updates", server.url, *options]) == 0

    assert capsys.readouterr().out.strip() == shown


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_status_of_another_form_is_an_error(capsys, options):
    document = status()
    del document["models"][0]["versions"][0]["updates"]
    with status_server(document) as server:
        assert main(["updates", server.url, *options]) == 1

    assert "the status has another form: the server is Hotrow 1.2.3" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_an_error(capsys):
    assert main(["updates", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err
