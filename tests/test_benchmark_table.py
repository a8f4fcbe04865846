"""The tables that the README shows are those of the committed results, and hide no miss and no gap."""

import json
from pathlib import Path

import pytest

from benchmarks.table.__main__ import RESULTS, main, marks, tables
from benchmarks.table.markdown import line
from benchmarks.table.results import Results
from benchmarks.table.row import Row, Unit, at_least, at_most, of, ours_at_most, passes
from benchmarks.table.rows import PREDICT, ROWS

ROOT = Path(__file__).parents[1]
SHOWN = {"docs/benchmarks.md": True}
US = Unit("us", "us")


@pytest.fixture
def folder(tmp_path):
    """A folder of results with one file, x.json, of these records."""

    def write(*records):
        (tmp_path / "x.json").write_text(json.dumps({"hardware": {}, "records": records}))
        return Results(tmp_path)

    return write


def record(ours=4.0, ratio=2.0, least=1.0, most=3.0, unit="us", **params):
    figures = {"ours": ours, "peer": 1.0, "unit": unit, "ratio": ratio, "ratio_min": least, "ratio_max": most}
    return {"name": "x.time", "params": params, **figures}


def row(cases, target=None, unit=US, what="what"):
    return Row(what, "x.time", cases, unit, "a peer", target)


def shown(row, results):
    return line(row, results.records_of(row))


@pytest.mark.parametrize("file", SHOWN)
def test_a_document_shows_what_the_command_prints_from_the_committed_results(file, capsys):
    main(["--all"] if SHOWN[file] else [])

    begin, end = marks(SHOWN[file])
    [_, rest] = (ROOT / file).read_text().split(begin)
    assert rest.partition(end)[0].strip() == capsys.readouterr().out.strip()


def test_nothing_that_the_documents_show_is_absent():
    assert "absent" not in tables(RESULTS, everything=True).lower()


def test_every_committed_record_is_shown_but_peers_beside_themselves_and_what_another_machine_repeats():
    rows = [*ROWS, *(PREDICT.row(*cell) for cell in PREDICT.cells())]
    results = Results(RESULTS)
    told = {(record.name, str(record.params)) for row in rows for record in results.records_of(row)}

    files = {row.source for row in rows} - {"host_table_zen3.json"}
    committed = [each for file in files for each in json.loads((RESULTS / file).read_text())["records"]]
    assert told >= {(each["name"], str(each["params"])) for each in committed if not is_a_peer(each)}


def is_a_peer(record):
    """The smallest table against itself, and the rules that ours is compared with: docs/gpu_cache.md has these."""
    name, params = record["name"], record["params"]
    if name in ("scale.lookup", "scale.gather", "scale.slope"):
        return params["rows"] == 1_000_000
    return name == "cache_policy.hit_rate" and params["policy"] in ("LRU", "NVE", "clock")


def test_a_line_shows_the_figures_of_the_record_and_the_target(folder):
    results = folder(record(ours=4.0, keys=26), record(keys=1664, ours=1234.5, ratio=0.0654, least=0.06, most=21.0))

    told = shown(row(of(keys=(26, 1664)), at_most(3), what="{keys} keys"), results)

    assert told == "| 26 / 1,664 keys | 4.0 / 1,234 us | a peer | 2.00 (1.00..3.00) / 0.065 (0.060..21.000) | <= 3 |"


def test_a_record_of_one_round_has_no_spread(folder):
    results = folder(record(ratio=2.0, least=2.0, most=2.0))

    assert "| 2.00 |" in shown(row(of()), results)


@pytest.mark.parametrize(
    ("target", "is_missed"),
    [
        pytest.param(None, False, id="no target"),
        pytest.param(at_least(2), False, id="a ratio that just reaches it"),
        pytest.param(at_least(2.001), True, id="a ratio that rounds to it"),
        pytest.param(at_most(2), False, id="a ratio that is no larger"),
        pytest.param(at_most(1.999), True, id="a ratio that is larger"),
        pytest.param(ours_at_most(4, "us"), False, id="a figure that is no larger"),
        pytest.param(ours_at_most(3, "us"), True, id="a figure that is larger"),
        pytest.param(passes("its own"), True, id="what the benchmark has judged"),
    ],
)
def test_a_missed_target_is_said_so_and_a_met_one_is_not(folder, target, is_missed):
    results = folder(record(ours=4.0, ratio=2.0, passes=False))

    assert ("**missed**" in shown(row(of(), target), results)) == is_missed


def test_of_two_cases_that_which_misses_is_bold(folder):
    results = folder(record(ratio=2.0, keys=26), record(ratio=1.0, keys=1664))

    told = shown(row(of(keys=(26, 1664)), at_least(1.5)), results)

    assert told.endswith("| 2.00 (1.00..3.00) / **1.00** (1.00..3.00) | >= 1.5: **missed** |")


def test_a_figure_that_misses_is_bold_and_its_ratio_is_not(folder):
    results = folder(record(ours=21.0))

    told = shown(row(of(), ours_at_most(10, "us")), results)

    assert "| **21** us | a peer | 2.00 (1.00..3.00) | <= 10 us: **missed** |" in told


@pytest.mark.parametrize(("ratio", "is_missed"), [(3.0, False), (2.9, True)])
def test_a_prediction_that_misses_its_target_is_said_to(tmp_path, ratio, is_missed):
    params = {"engine": "int8", "samples": 64}
    dcn = record(unit="call/s", ratio=ratio, **params) | {"name": "predict.dcn"}
    wdl = record(unit="call/s", ratio=1.0, **params) | {"name": "predict.wdl"}
    (tmp_path / "predict.json").write_text(json.dumps({"records": [dcn, wdl]}))

    lines = tables(tmp_path).splitlines()

    assert ("**missed**" in find(lines, "| DCN | int8 |")) == is_missed
    assert "**missed**" not in find(lines, "| WDL | int8 |"), "there is no target for it"


def find(lines, beginning):
    [line] = [line for line in lines if line.startswith(beginning)]
    return line


def test_a_record_that_is_absent_is_named_and_misses_nothing(folder):
    results = folder(record(keys=26))

    told = shown(row(of(keys=(26, 1664), peer="triton"), at_least(1)), results)

    assert told == "| what | **absent** / **absent** us | a peer | **absent** / **absent** | >= 1 |"
    assert results.absent == ["`x.time keys=26 peer=triton` in x.json", "`x.time keys=1664 peer=triton` in x.json"]


def test_the_command_names_what_a_folder_without_results_lacks(tmp_path, capsys):
    main(["--results", str(tmp_path)])

    told = capsys.readouterr().out
    assert "`http_server.requests_per_s concurrency=8 peer=triton` in http_server.json" in told
    assert "`predict.dlrm engine=int8 samples=1024` in predict.json" in told
    assert "`snapshot.start` in snapshot.json" in told


def test_two_records_of_one_case_are_refused(folder):
    results = folder(record(keys=26, dim=32), record(keys=26, dim=128))

    with pytest.raises(ValueError, match=r"x\.json: expected one record of x\.time keys=26, found 2"):
        results.records_of(row(of(keys=26)))


def test_a_record_in_another_unit_is_refused(folder):
    results = folder(record(unit="ms"))

    with pytest.raises(ValueError, match=r"expected x\.time in 'us', found 'ms'"):
        results.records_of(row(of()))


def test_writing_replaces_what_lies_between_the_marks_and_nothing_else(tmp_path):
    begin, end = marks()
    file = tmp_path / "README.md"
    file.write_text(f"# Before\n\n{begin}\nold figures\n{end}\n\nAfter\n")

    for _ in range(2):
        main(["--write", str(file)])
        assert file.read_text() == f"# Before\n\n{begin}\n\n{tables(RESULTS)}\n{end}\n\nAfter\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("nothing", id="no marks"),
        pytest.param(f"{marks()[0]} no end", id="no end"),
        pytest.param(f"{marks()[1]} {marks()[0]}", id="the end before the beginning"),
        pytest.param(" ".join(marks() * 2), id="two pairs"),
        pytest.param(" ".join(marks(everything=True)), id="the marks of all rows"),
    ],
)
def test_a_file_without_one_pair_of_marks_is_refused_and_left_as_it_is(tmp_path, capsys, text):
    file = tmp_path / "README.md"
    file.write_text(text)

    with pytest.raises(SystemExit):
        main(["--write", str(file)])

    assert "README.md: expected '<!-- printed by python -m benchmarks.table -->' once" in capsys.readouterr().err
    assert file.read_text() == text
