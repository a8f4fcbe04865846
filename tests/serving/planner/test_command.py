"""`hotrow plan` end to end, and the example in docs/planning.md."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from serving import ParameterServer
from serving.cli.main import main
from serving.cli.numbers import memory_size
from serving.config import read_model_directory, read_ps_config
from tests.serving.ps_files import listed, write_ps
from tests.tools import warm
from tests.tools.tiny_model import TinyModel

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "planning.md").read_text()


@pytest.fixture
def repository(tmp_path):
    """A model of two tables with 1,000 rows of 16 floats each, and a trace of its lookups."""
    TinyModel(rows=1000, dim=16).write(tmp_path / "models", "ctr")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "trace.npz", user=rng.zipf(1.3, 5000) % 1000, item=rng.integers(0, 1000, 20_000))
    return tmp_path / "models"


def plan(*arguments):
    return main(["plan", *map(str, arguments)])


def rows_of(output):
    """Return the lines of the first table's sizes, with cells split at two or more spaces."""
    table = output.partition("table ctr.item")[0]
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if re.match(r"\s+[\d,]+\s+[\d.]+ %", line)]


def test_without_a_trace_every_table_and_the_total_have_a_line(repository, capsys):
    assert plan(repository) == 0

    header, *lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert header[-3:] == ["RAM", "GPU cache", "disk, about"]
    assert [line[0] for line in lines] == ["ctr.user", "ctr.item", "total"]
    assert lines[0][1].split()[0] == "1,000"
    # 67 lines of 128 bytes and their 1,005 rows of 64, the descriptor of 64, 12 counters of 8
    assert lines[0][-2] == "72.55 KiB"


def test_the_hit_rates_of_the_default_sizes_are_printed_for_every_policy(repository, tmp_path, capsys):
    assert plan(repository, tmp_path / "trace.npz", "--hit-rate", 0.9) == 0

    output = capsys.readouterr().out
    assert "table ctr.user: 1,000 rows of 16 floats\n  5,000 lookups of" in output
    rows = rows_of(output)
    assert [row[0] for row in rows] == ["10", "20", "50", "100", "200", "500", "1,000"]
    assert [row[1] for row in rows] == ["1 %", "2 %", "5 %", "10 %", "20 %", "50 %", "100 %"]
    rates = np.array([[float(cell) for cell in row[2:5]] for row in rows])
    assert (np.diff(rates, axis=0) >= 0).all()
    assert (rates[:, 1] >= rates.max(axis=1)).all()  # nothing beats the best fixed set on these
    assert rates[-1, 1] == rates[-1, 2] == 1
    assert re.search(r"hit rate 0\.9, pinned: [\d,]+ rows, 0\.\d+ of the table", output)
    assert re.search(r"hit rate 0\.9 of lru over all of its tables: \"gpucacheper\": 0\.\d+", output)


def test_a_hit_rate_that_no_size_reaches_is_reported(repository, tmp_path, capsys):
    np.save(tmp_path / "t.npy", np.arange(100))

    assert plan(repository, tmp_path / "t.npy", "--table", "user", "--hit-rate", 0.5) == 0

    output = capsys.readouterr().out
    assert "hit rate 0.5, lru: out of reach, at most 0.0000" in output
    assert "over all of its tables: out of reach" in output
    assert "table ctr.item: 1,000 rows of 16 floats\n  0 lookups of 0 rows" in output


def test_sizes_are_rows_or_parts_of_the_table_and_at_most_its_rows(repository, tmp_path, capsys):
    assert plan(repository, tmp_path / "trace.npz", "--sizes", "5000, 2.5%,7") == 0

    assert [row[0] for row in rows_of(capsys.readouterr().out)] == ["7", "25", "1,000"]


def test_outputs_that_cannot_be_written_are_reported_and_leave_the_earlier_ones(repository, tmp_path, capsys):
    (tmp_path / "curves.csv").write_text("earlier")
    (tmp_path / "curves.svg").mkdir()

    assert plan(repository, tmp_path / "trace.npz", "--csv", "/dev/full") == 1
    assert capsys.readouterr().err == "hotrow plan: /dev/full: cannot be written: No space left on device\n"
    assert plan(repository, tmp_path / "trace.npz", "--csv", tmp_path / "none" / "x.csv") == 1
    assert "none/x.csv: cannot be written: No such file or directory" in capsys.readouterr().err
    assert plan(repository, tmp_path / "trace.npz", "--plot", tmp_path / "curves.svg") == 1
    assert "curves.svg: cannot be written: Is a directory" in capsys.readouterr().err

    assert Path("/dev/full").is_char_device()
    assert (tmp_path / "curves.csv").read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize("policy", ["file", "lru", "pinned"])
def test_the_fragment_for_ps_json_opens_and_gives_every_table_its_rows(repository, tmp_path, capsys, policy):
    assert plan(repository, tmp_path / "trace.npz", "--ram", "100KiB", "--policy", policy) == 0

    output = capsys.readouterr().out
    fragment = json.loads(output[output.index("\n{") :])
    entry = listed(repository / "ctr" / "1" / "graph.json", "ctr", gpucache=False, gpucacheper=0.25)
    file = write_ps(repository, [entry], **fragment, persistent_db={"type": "rocks_db", "path": "rows"})
    rows = read_ps_config(file).volatile_db.capacity_rows_per_table
    assert set(rows) == {"ctr.user", "ctr.item"}
    with ParameterServer.from_config(file) as server:
        memory = server.stores[0]
        assert {name: memory.tables[name].capacity_rows for name in rows} == rows
        assert 0 < sum(memory.tables[name].size_bytes for name in rows) <= 100 * 2**10
    assert ("filled with the first rows of the files, as RAM is at startup" in output) == (policy != "file")
    assert ("an eviction leaves 0.8 of the rows: hit rate at least" in output) == (policy == "lru")
    assert fragment["volatile_db"].get("overflow_policy") == ("evict_oldest" if policy == "lru" else None)


@pytest.mark.parametrize("policy", ["file", "lru", "pinned"])
def test_a_table_without_rows_has_a_line_with_the_reason(repository, tmp_path, capsys, policy):
    np.savez(tmp_path / "user.npz", user=np.arange(2000) % 500)

    assert plan(repository, tmp_path / "user.npz", "--ram", "5GiB", "--policy", policy) == 0
    roomy = capsys.readouterr().out
    assert plan(repository, tmp_path / "trace.npz", "--ram", "1KiB", "--policy", policy) == 0
    narrow = capsys.readouterr().out

    assert "  ctr.item gets 0 rows: no row would answer a lookup of the trace\n" in roomy
    assert "ctr.user gets" not in roomy
    for table in ("ctr.user", "ctr.item"):
        assert re.search(rf"  {table} gets 0 rows: too little memory is left: one row takes [0-9.,]+ (Ki)?B\n", narrow)
    assert "capacity_rows_per_table" in roomy
    assert narrow.endswith("no volatile_db for ps.json: no table gets a row\n")


@pytest.mark.parametrize("hot", [[], ["--write-hot-keys", "hot"]], ids=["file", "hot"])
@pytest.mark.parametrize("policy", ["file", "lru", "pinned"])
def test_serving_counts_the_planned_hit_rate_of_the_ram_tier(repository, tmp_path, capsys, monkeypatch, policy, hot):
    monkeypatch.chdir(tmp_path)
    assert plan(repository, tmp_path / "trace.npz", "--ram", "150KiB", "--policy", policy, *hot) == 0

    output = capsys.readouterr().out
    promised = re.findall(r"together .*|as RAM is at startup: .*", output)[-1].split()[-1]
    tiers = {**json.loads(output[output.index("\n{") :]), "persistent_db": {"type": "rocks_db", "path": "rows"}}
    write_ps(repository, **tiers)
    with ParameterServer.from_config(repository / "ps.json") as server, np.load(tmp_path / "trace.npz") as trace:
        server.load_model(read_model_directory(repository / "ctr"))
        for table in ("user", "item"):
            server.lookup(f"ctr@1.{table}", trace[table].astype(np.int64))
        hits = sum(counters.hits.get("memory", 0) for counters in server.counters().values())
    assert hits / 25_000 == pytest.approx(float(promised), abs=6e-5)  # four decimals are printed


def test_the_hot_keys_are_the_keys_that_were_looked_up_hottest_first(repository, tmp_path):
    np.save(tmp_path / "t.npy", np.array([7, 3, 7, 5, 3, 7, 999_999], dtype=np.int64))

    assert plan(repository, tmp_path / "t.npy", "--table", "user", "--write-hot-keys", tmp_path / "a" / "hot") == 0

    (file,) = (tmp_path / "a" / "hot").iterdir()
    assert file.name == "ctr.user.npy"
    assert np.load(file).tolist() == [7, 3, 5]  # the table has no 999999


def test_hot_keys_that_cannot_be_written_are_reported(repository, tmp_path, capsys):
    (tmp_path / "file").write_text("")

    assert plan(repository, tmp_path / "trace.npz", "--write-hot-keys", tmp_path / "file" / "hot") == 1

    assert "cannot be written" in capsys.readouterr().err


def test_csv_has_the_curves_of_all_tables(repository, tmp_path):
    assert plan(repository, tmp_path / "trace.npz", "--csv", tmp_path / "curves.csv", "--sizes", "123") == 0

    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["table"], row["policy"]) for row in rows} == {
        (table, policy) for table in ("ctr.user", "ctr.item") for policy in ("lru", "pinned", "file")
    }
    whole = [row for row in rows if row["rows"] == "1000" and row["policy"] == "file"]
    assert [(row["rows_ratio"], row["hit_rate"]) for row in whole] == [("1.0", "1.0")] * 2
    assert any(row["rows"] == "123" for row in rows)


@pytest.mark.parametrize(
    ("ending", "begins"), [(".png", b"\x89PNG"), pytest.param(".svg", b"<?xml", marks=pytest.mark.long)]
)
def test_a_plot_is_drawn_by_matplotlib(repository, tmp_path, capsys, ending, begins):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"curves{ending}"

    assert plan(repository, tmp_path / "trace.npz", "--plot", picture) == 0

    assert not capsys.readouterr().err
    assert picture.read_bytes().startswith(begins)


def test_without_matplotlib_the_extra_is_named(repository, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert plan(repository, tmp_path / "trace.npz", "--plot", tmp_path / "x.svg") == 1

    assert "--plot needs the package 'matplotlib': pip install 'hotrow[plot]'" in capsys.readouterr().err


def test_a_sample_reports_its_standard_error(repository, tmp_path, capsys):
    assert plan(repository, tmp_path / "trace.npz", "--sample", "0.5") == 0

    assert re.search(r"lru is estimated from a sample; standard error at most 0\.\d+", capsys.readouterr().out)


def test_one_model_of_several_is_chosen_by_its_name(repository, tmp_path, capsys):
    TinyModel(rows=10).write(repository, "other")

    assert plan(repository, "--model", "other") == 0

    output = capsys.readouterr().out
    assert "other.user" in output
    assert "ctr.user" not in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{models}", "--model", "cvr"], "no model 'cvr' in it; there is 'ctr'"),
        (["{models}", "--hit-rate", "0.9"], "--hit-rate: needs a trace"),
        (["{models}", "--ram", "1GiB"], "--ram: needs a trace"),
        (
            ["{models}", "{trace}", "--plot", "x.txt"],
            "--plot: expected a file that ends in .svg, .png, .pdf, got x.txt",
        ),
        (["{models}", "{trace}", "--plot", "{none}/x.svg"], "x.svg: cannot be written: No such file"),
        (["{models}", "{trace}", "--csv", "{none}/x.csv"], "x.csv: cannot be written: No such file"),
        (["{models}", "{none}.npy", "--table", "user"], "none.npy: no such file or folder"),
        (["{models}", "{none}.npy"], "none.npy: no such file or folder"),
        (["{none}"], "no such file"),
        (["{models}", "{trace}", "--sample", "0.0001"], "ctr.user: --sample: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_configuration_that_cannot_be_planned_gives_one_line_and_exit_code_1(
    repository, tmp_path, capsys, arguments, expected
):
    places = {"models": repository, "trace": tmp_path / "trace.npz", "none": tmp_path / "none"}

    assert plan(*(argument.format(**places) for argument in arguments)) == 1

    error = capsys.readouterr().err
    assert error.startswith("hotrow plan: ")
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("plan", "CONFIG"),
        ("plan x --hit-rate 0", "expected more than 0 and at most 1, got '0'"),
        ("plan x --hit-rate 1.01", "at most 1, got '1.01'"),
        ("plan x --hit-rate nan", "at most 1, got 'nan'"),
        ("plan x --sample much", "at most 1, got 'much'"),
        ("plan x --ram 8GB", "expected bytes, or a number of KiB, MiB, GiB or TiB, got '8GB'"),
        ("plan x --ram 0", "TiB, got '0'"),
        ("plan x --ram -1GiB", "expected one argument"),
        ("plan x --sizes 0", "expected rows, or a percentage of a table such as 5%, got '0'"),
        ("plan x --sizes 5,", "such as 5%, got ''"),
        ("plan x --sizes 101%", "such as 5%, got '101%'"),
        ("plan x --sizes 0%", "such as 5%, got '0%'"),
        ("plan x --policy fifo", "'fifo'"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_reports_what_was_expected(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())

    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1", 1), ("8GiB", 2**33), ("1.5 MiB", 3 * 2**19), ("0.5KiB", 512), ("1TiB", 2**40)]
)
def test_amounts_of_memory_are_bytes_or_binary_units(text, size_bytes):
    assert memory_size(text) == size_bytes


@pytest.mark.slow
def test_the_example_of_the_guide_prints_what_the_guide_shows(tmp_path):
    train, record, command = re.findall(r"^```(?:python)?\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)[:3]

    def run(*arguments):
        done = warm.run(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "serving.cli.main", *train.split()[1:])
    run("-c", record)
    prompt, _, shown = command.partition("\n")
    assert prompt.startswith("$ hotrow plan ")
    printed = run("-m", "serving.cli.main", *prompt.split()[2:])
    assert re.fullmatch(".*".join(map(re.escape, shown.split("...\n"))), printed, re.DOTALL)
