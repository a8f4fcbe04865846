"""`hotrow stats` against servers that answer by hand."""

import json
import re
import sys
import time

import pytest

from serving.cli.main import main
from serving.frontend.version import server_version
from tests.serving.cli.status_server import reader, status, status_server, status_with, tier, times

NOT_SERVED = {"tables": [], "updates": []}


def stopped_after(monkeypatch, readings):
    """Press Ctrl-C while `hotrow stats --watch` waits after so many readings."""
    left = iter(range(readings - 1))

    def sleep(_seconds):
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)


def cells(line):
    return re.split(r" {2,}", line.strip())


def test_one_reading_is_two_tables(capsys):
    with status_server(status()) as server:
        code = main(["stats", server.url])

    head, _, *models, _, columns, memory, rocksdb, default = capsys.readouterr().out.splitlines()
    assert code == 0
    assert head == f"hotrow 1.2.3 at {server.url}: ready, up 10 s, 3.0 GiB of memory, 5 in flight"
    assert [cells(line) for line in models] == [
        ["MODEL", "VERSION", "STATE", "REQUESTS", "FAILED", "SAMPLES", "P50 MS", "P99 MS"],
        ["ctr", "7", "ready", "100", "2", "6,400", "1.00", "9.68"],
    ]
    names = ["TABLE", "TIER", "STATE", "ROWS", "SIZE", "KEYS ASKED", "HITS", "HIT RATE", "ERRORS", "P99 MS"]
    assert cells(columns) == names
    assert cells(memory) == [
        "ctr/7/user",
        "memory",
        "serving",
        "1,000",
        "1.0 MiB",
        "1,000",
        "600",
        "60.0 %",
        "0",
        "0.99",
    ]
    assert cells(rocksdb) == ["rocksdb", "serving", "~12,345", "-", "400", "300", "75.0 %", "0", "0.99"]
    assert cells(default) == ["default value", "1,000", "100", "10.0 %"]
    assert len({line.index("HITS") + 4 for line in [columns]} | {memory.index("600") + 3}) == 1


def test_the_readers_of_updates_are_a_third_table(capsys):
    idle = reader(worker=1, fault="log: cannot be read", lag_messages=1234, lag_s=5.25, rejected={}, tables=[])
    with status_server(status_with(reader(), idle)) as server:
        main(["stats", server.url])

    *_, empty, columns, user, item, second = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert cells(columns) == ["UPDATES", "STATE", "LAG", "VISIBLE P99 MS", "REJECTED", "TABLE", "STEP", "TIME"]
    rejected = "3 (1 checksum, 2 row)"
    newest = ["user", "4,000", "2023-11-14 22:13:20"]
    assert cells(user) == ["ctr/7", "up", "0 messages, 0.0 s", "9.92", rejected, *newest]
    assert cells(item) == ["item", "-", "2020-09-13 12:26:40"]
    lag = "1,234 messages, 5.2 s"
    assert cells(second) == ["ctr/7 (worker 1)", "fault", lag, "9.92", "0", "-", "-", "-"]


def test_a_time_that_no_calendar_has_is_shown_as_it_is(capsys):
    newest = {"name": "user", "step": 1, "time_ms": 2**62}
    with status_server(status_with(reader(tables=[newest]))) as server:
        assert main(["stats", server.url]) == 0

    assert capsys.readouterr().out.splitlines()[-1].endswith(f"user      1  {2**62} ms")


def test_watching_takes_the_time_until_updates_are_visible_of_the_last_second_only(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=3)
    counts = [times(0, 0, 100, 0), times(1, 0, 100, 0), times(1, 0, 0, 0)]  # the last after another load
    readings = [status_with(reader(visible_times=count), uptime_s=10.0 + n) for n, count in enumerate(counts)]
    with status_server(*readings) as server:
        main(["stats", server.url, "--watch"])

    rows = re.findall(r"ctr/7 +up +0 messages, 0.0 s +(\S+)", capsys.readouterr().out)
    assert rows == ["9.92", "0.99", "0.99"]


def test_a_server_without_requests_has_no_rates(capsys):
    with status_server(status(requests=0, is_ready=False, state="not ready", uptime_s=90061.5)) as server:
        main(["stats", server.url])

    head, *_, memory, rocksdb, _ = capsys.readouterr().out.splitlines()
    assert ": not ready, up 1 d 1 h," in head
    assert cells(memory)[-3:] == cells(rocksdb)[-3:] == ["-", "0", "-"]


def test_watching_shows_what_the_last_second_added(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=2)
    with status_server(status(10.0, requests=100), status(12.0, requests=300)) as server:
        code = main(["stats", server.url, "--watch"])

    first, second = re.split(r"\n\n(?=hotrow)", capsys.readouterr().out.strip())
    assert code == 0
    assert "REQUESTS/S" not in first
    _, _, columns, model, _, tier_columns, memory, _, _ = second.splitlines()
    assert (
        dict(zip(cells(columns), cells(model), strict=True)).items()
        >= {
            "REQUESTS": "300",
            "REQUESTS/S": "100",
            "SAMPLES/S": "6,400",
        }.items()
    )
    assert (
        dict(zip(cells(tier_columns), cells(memory), strict=True)).items()
        >= {
            "HITS": "1,800",
            "HIT RATE": "60.0 %",
            "KEYS/S": "1,000",
        }.items()
    )


def test_watching_takes_hit_rates_and_percentiles_of_the_last_second_only(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=2)
    before, now = status(10.0, requests=100), status(11.0, requests=100)
    [old], [new] = ([one["models"][0]["versions"][0]["tables"][0]] for one in (before, now))
    new["tiers"][0] = tier("memory", old["tiers"][0]["hits"] + 9, old["tiers"][0]["misses"] + 1)
    now["models"][0]["latency"]["counts"][2] += 4  # four requests between 2 and 10 ms
    with status_server(before, now) as server:
        main(["stats", server.url, "--watch"])

    second = capsys.readouterr().out.strip().rpartition("\n\nhotrow")[2]
    assert re.search(r"memory .* 90\.0 %", second)
    assert re.search(r"ctr .* 6\.00 +9\.92 ", second)


def test_watching_begins_again_after_a_restart_of_the_server(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=2)
    with status_server(status(500.0, requests=1000), status(1.0, requests=8)) as server:
        assert main(["stats", server.url, "--watch"]) == 0

    out = capsys.readouterr().out
    assert "REQUESTS/S" not in out
    assert "-8" not in out


def test_a_version_that_is_loaded_again_counts_from_zero(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=2)
    before, now = status(10.0, requests=100), status(11.0, requests=100)
    now["models"][0]["versions"][0]["tables"][0]["tiers"][0] = tier("memory", 9, 1)
    with status_server(before, now) as server:
        main(["stats", server.url, "--watch"])

    second = capsys.readouterr().out.strip().rpartition("\n\nhotrow")[2]
    assert re.search(r"memory .* 10 +9 +90\.0 % +0 +\S+ +10\n", second)


def test_a_terminal_is_cleared_before_each_reading_and_a_file_is_not(monkeypatch, capsys):
    for is_terminal in (True, False):
        stopped_after(monkeypatch, readings=2)
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with status_server(status()) as server:
            main(["stats", server.url, "--watch"])

        assert capsys.readouterr().out.count("\x1b[H\x1b[J") == (2 if is_terminal else 0)


def test_json_is_the_servers_document_on_one_line(capsys):
    with status_server(status()) as server:
        assert main(["stats", server.url, "--json"]) == 0

    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == status()


def test_watching_json_is_a_line_for_each_reading(monkeypatch, capsys):
    stopped_after(monkeypatch, readings=3)
    with status_server(status(1.0), status(2.0), status(3.0)) as server:
        assert main(["stats", server.url, "--watch", "--json"]) == 0

    assert [json.loads(line)["uptime_s"] for line in capsys.readouterr().out.splitlines()] == [1.0, 2.0, 3.0]


def test_every_version_of_a_model_and_a_model_without_versions_are_lines(capsys):
    document = status()
    [model] = document["models"]
    model["versions"].append({"version": "8", "state": "UNAVAILABLE", "reason": "a tier does not answer"} | NOT_SERVED)
    document["models"].append(model | {"name": "gone", "versions": []})
    whole = {"version": "", "state": "UNAVAILABLE", "reason": "config.pbtxt: name"} | NOT_SERVED
    document["models"].append(model | {"name": "odd", "versions": [whole]})
    document["unmatched_requests"] = {"404": 3}
    with status_server(document) as server:
        main(["stats", server.url])

    lines = [cells(line) for line in capsys.readouterr().out.splitlines()]
    assert ["8", "unavailable"] in lines
    assert ["gone", "-", "unloaded", "100", "2", "6,400", "1.00", "9.68"] in lines
    assert ["odd", "-", "unavailable", "100", "2", "6,400", "1.00", "9.68"] in lines
    assert ["odd: config.pbtxt: name"] in lines
    assert ["3 requests named no served model"] in lines


def test_a_name_of_a_folder_cannot_control_the_terminal(capsys):
    document = status()
    document["models"][0]["name"] = "ctr\x1b[2J\nother"
    with status_server(document) as server:
        main(["stats", server.url])

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "ctr\\x1b[2J\\nother" in out


def test_a_tier_that_does_not_answer_is_shown_with_its_errors_and_the_reason(capsys):
    document = status(state="degraded")
    [version] = document["models"][0]["versions"]
    version["reason"] = "tier rocksdb does not answer"
    version["tables"][0]["tiers"][1] |= {"is_up": False, "errors": 1234}
    with status_server(document) as server:
        main(["stats", server.url])

    head, *lines = capsys.readouterr().out.splitlines()
    assert ": degraded, up 10 s," in head
    shown = [cells(line) for line in lines]
    assert ["ctr", "7", "ready", "100", "2", "6,400", "1.00", "9.68"] in shown
    assert ["ctr version 7: tier rocksdb does not answer"] in shown
    assert ["rocksdb", "failing", "~12,345", "-", "400", "300", "75.0 %", "1,234", "0.99"] in shown


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(b"<html>", "GET /status did not return JSON", id="a page"),
        pytest.param(b"\xff\xfe\x00", "GET /status did not return JSON", id="bytes"),
        pytest.param([1], "GET /status returned other JSON", id="a list"),
        pytest.param({"status": "ok"}, "GET /status returned other JSON", id="another server's status"),
    ],
)
def test_another_server_is_reported(capsys, answer, reason):
    with status_server(answer) as server:
        assert main(["stats", server.url]) == 1

    text = f"hotrow stats: {server.url}: this is not a Hotrow server, or an older one: {reason}\n"
    assert capsys.readouterr().err == text


def test_a_server_without_a_status_is_reported(capsys):
    with status_server(status()) as server:
        assert main(["stats", f"{server.url}/elsewhere"]) == 1

    assert "not a Hotrow server, or an older one: GET /status returned 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"models": [{"name": "ctr"}]}, {"models": None}, {"memory_bytes": None}, {"uptime_s": "long"}]
)
def test_a_status_of_another_form_names_both_versions(capsys, wrong):
    with status_server(status(**wrong)) as server:
        assert main(["stats", server.url]) == 1

    versions = f"the server is Hotrow 1.2.3, this command is Hotrow {server_version()}"
    assert capsys.readouterr().err == f"hotrow stats: {server.url}: the status has another form: {versions}\n"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8000", "expected http://... or https://..., got '127.0.0.1:8000'"),
        ("file:///etc/passwd", "expected http://... or https://..., got 'file:///etc/passwd'"),
        ("http://127.0.0.1:99999", "'http://127.0.0.1:99999' is not a URL: "),
    ],
)
def test_what_is_no_url_is_refused(capsys, url, reason):
    assert main(["stats", url]) == 1

    assert reason in capsys.readouterr().err


def test_ctrl_c_before_the_only_reading_is_an_interruption(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("serving.cli.client.Client.ask", interrupted)

    assert main(["stats"]) == 130
    assert capsys.readouterr().err == "hotrow stats: interrupted\n"
