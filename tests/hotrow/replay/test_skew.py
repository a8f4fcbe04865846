"""``hotrow check --skew``: served features next to those of training data."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.cli.main import main
from tests.tools.tiny_model import TinyModel

PAIRS = ["--on", "request_id,request_sample"]


@pytest.fixture
def check(models, log, tmp_path, capsys):
    """Compare the log with a table, and return the lines."""

    def run(table, *options):
        pq.write_table(table, tmp_path / "data.parquet")
        assert main(["check", str(models / "1"), "--skew", str(log), str(tmp_path / "data.parquet"), *options]) == 0
        return capsys.readouterr().out.splitlines()

    return run


def figures(lines):
    """The percentages of each feature."""
    rows = (re.fullmatch(r"(\w+)((?: +[\d.]+%)+)", re.sub(r" +", " ", line)) for line in lines)
    return {row[1]: [float(share[:-1]) for share in row[2].split()] for row in rows if row}


def test_equal_features_have_no_differences(check, rows):
    shuffled = rows.take(pa.array(np.random.default_rng(0).permutation(rows.num_rows)))

    lines = check(shuffled, *PAIRS)

    assert "120 of 120 samples" in lines[0]
    assert {name: shares[0] for name, shares in figures(lines).items()} == dict.fromkeys(
        ["user", "country", "tags", "seen", "member", "price"], 0.0
    )
    assert "for both differ by 0.0000 on average and by 0.0000 at most; 0.0% by more than 0.01" in lines[-1]


def test_differences_missing_and_unknown_values_are_shares_of_the_samples(check, models, rows):
    country = rows["country"].to_pylist()
    tags = [[*tags, "z"] if number < 12 else tags for number, tags in enumerate(rows["tags"].to_pylist())]
    trained = [None if number < 30 else "yy" if value == "de" else value for number, value in enumerate(country)]
    table = rows.set_column(rows.column_names.index("country"), "country", pa.array(trained))
    table = table.set_column(rows.column_names.index("tags"), "tags", pa.array(tags))

    lines = check(table, *PAIRS)

    found = figures(lines)
    different = [ours != theirs for ours, theirs in zip(country, trained, strict=True)]
    present = [value for value in trained if value is not None]
    expected = [
        100 * np.mean(different),
        0,
        25,
        100 * np.mean([value == "xx" for value in country]),
        100 * np.mean([value in ("xx", "yy") for value in present]),
    ]
    assert found["country"] == pytest.approx(expected, abs=0.06)
    assert found["tags"][0] == 10
    assert f"country of request r0 sample 0: {country[0]!r} served, missing trained" in lines
    names = ["user", "country", "tags", "seen", "member", "price"]
    with hotrow.load_model(models / "1") as session:
        sizes = np.abs(session.predict(rows.select(names)) - session.predict(table.select(names)))
    assert f"differ by {sizes.mean():.4f} on average and by {sizes.max():.4f} at most" in lines[-1]


def test_values_are_compared_as_the_type_of_the_feature_and_csv_is_read_as_text(models, log, rows, tmp_path, capsys):
    table = rows.drop_columns(["tags", "seen", "member", "request_time"])
    pa_csv.write_csv(table, tmp_path / "data.csv")

    assert main(["check", str(models / "1"), "--skew", str(log), str(tmp_path / "data.csv"), *PAIRS]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = figures(lines)
    assert {name: found[name][0] for name in ("user", "country", "price")} == {"user": 0, "country": 0, "price": 0}
    assert f"{tmp_path / 'data.csv'} has no tags, seen, member, so the feature is missing there" in lines


def test_missing_values_of_lists_make_no_difference(check, rows):
    def padded(values):
        return [None, *values, None, None] if values else [None, [], [None], [None, None]][sum(map(len, names)) % 4]

    names = rows.column_names
    table = rows
    for name in ("tags", "seen"):
        values = [[*filter(None, row or [])] for row in rows[name].to_pylist()]
        names = [*names, "x"]  # each form of an empty list occurs
        table = table.set_column(
            rows.column_names.index(name), name, pa.array([padded(row) for row in values], rows[name].type)
        )
    empty = pa.array([[*(value or "" for value in row or [])] for row in table["tags"].to_pylist()])
    for form in (table, table.set_column(rows.column_names.index("tags"), "tags", empty)):
        lines = check(form, *PAIRS)
        found, same = figures(lines), figures(check(rows, *PAIRS))
        assert (found["tags"], found["seen"]) == (same["tags"], same["seen"])
        assert found["tags"][0] == found["seen"][0] == 0


def test_words_for_missing_are_text_in_a_string_of_a_csv_file_as_in_training(models, log, rows, tmp_path, capsys):
    words = rows.select(["request_id", "request_sample"]).append_column("country", pa.array(["NA"] * rows.num_rows))
    pa_csv.write_csv(words, tmp_path / "data.csv")

    assert main(["check", str(models / "1"), "--skew", str(log), str(tmp_path / "data.csv"), *PAIRS]) == 0
    country = figures(capsys.readouterr().out.splitlines())["country"]
    assert country[2] == 0  # missing in the training data
    assert country[4] == 100  # unknown there


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_data_is_read_in_parts_and_many_samples_are_drawn(models, log, rows, tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr("hotrow.replay.tables._PART_ROWS", 7)
    monkeypatch.setattr("hotrow.replay.tables._MOST_DRAWN", 60)
    country = pa.array(["fr" if value == "de" else value for value in rows["country"].to_pylist()])
    table = rows.set_column(rows.column_names.index("country"), "country", country)
    table = table.take(pa.array(np.random.default_rng(0).permutation(rows.num_rows)))
    table = table.drop_columns(["tags", "seen", "member"])
    (pa_csv.write_csv if kind == "csv" else pq.write_table)(table, tmp_path / f"data.{kind}")

    assert main(["check", str(models / "1"), "--skew", str(log), str(tmp_path / f"data.{kind}"), *PAIRS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"120 of 120 samples of {log} are in {tmp_path / f'data.{kind}'}",
        "the figures are from 60 evenly drawn samples",
    ]
    german = 100 * np.mean([value == "de" for value in rows["country"].to_pylist()])
    assert figures(lines)["country"][0] == pytest.approx(german, abs=15)
    assert figures(lines)["user"][0] == figures(lines)["price"][0] == 0


def test_rows_without_a_match_are_counted(check, rows):
    lines = check(pa.concat_tables([rows.slice(0, 60), rows.slice(57, 3)]), *PAIRS)

    assert "57 of 120 samples" in lines[0]
    assert lines[1] == "3 others have a request_id and request_sample that occurs several times"


def test_predictions_are_not_compared_if_a_value_cannot_be_used(check, rows):
    place = rows.column_names.index("seen")
    table = rows.set_column(place, "seen", pa.array([[5000]] * rows.num_rows))

    lines = check(table, *PAIRS)

    assert figures(lines)["seen"][0] == 100
    assert re.match(r"predictions were not compared: .*data.parquet: row 0: seen: value 0: .*", lines[-1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["MODEL", "--skew", "LOG", "WORDS", *PAIRS], "words.parquet: row 1: price: expected a number, got 'x'"),
        (["MODEL", "--skew", "LOG", "none.parquet"], "none.parquet: no such file or folder"),
        (["MODEL", "--skew", "LOG", "LOG", "--on", "id"], "has no column 'id' to join on"),
        (["MODEL", "--skew", "LOG", "LOG", "--on", "tags"], "cannot be joined on tags: "),
        (["MODEL", "--skew", "LOG", "LOG"], "120 rows share their key with another row, so add a column to --on"),
        (["KEYS", "--skew", "LOG", "LOG", *PAIRS], "has no features.json, and --skew compares raw features"),
        (["MODEL", "--skew", "LOG", "m.keys"], "m.keys: has requests with keys, and --skew compares raw features"),
        (["MODEL", "--on", "request_id"], "--on: needs --skew"),
        (["MODEL", "--skew", "LOG", "LOG", "--full"], "--full: has no effect with --skew"),
        (["MODEL", "--skew", "LOG", "LOG", "--against", "MODEL"], "--against: has no effect with --skew"),
        (["MODEL", "--against", "MODEL", "--write-config"], "--write-config: has no effect with --against"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_refused(models, log, rows, tmp_path, capsys, options, reason):
    words = rows.slice(0, 2).set_column(rows.column_names.index("price"), "price", pa.array(["1.5", "x"]))
    pq.write_table(words, tmp_path / "words.parquet")
    paths = {"MODEL": models / "1", "LOG": log, "WORDS": tmp_path / "words.parquet", "KEYS": tmp_path / "tiny" / "1"}
    if "KEYS" in options:
        TinyModel().write(tmp_path)

    assert main(["check", *(str(paths.get(word, word)) for word in options)]) == 1
    assert reason in capsys.readouterr().err
