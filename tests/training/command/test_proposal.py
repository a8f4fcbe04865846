"""``hotrow train --data clicks.parquet --label clicked``: features are proposed from the columns."""

import json
import re
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.errors import FeatureValueError
from tests.training.command.running import hotrow_train

ROWS = 400


def columns():
    rng = np.random.default_rng(0)
    users = rng.integers(0, 40, ROWS)
    return {
        "clicked": users % 2,
        "user": [f"u{user}" for user in users],
        "session_id": rng.permutation(ROWS) + 10**9,
        "country": pa.array(rng.choice(["de", "日本", None], ROWS)),
        "tags": [list(rng.choice(["a", "b", "c"], size, replace=False)) for size in rng.integers(0, 4, ROWS)],
        "seen": [rng.integers(0, 9, 2).tolist() for _ in range(ROWS)],
        "stars": pa.array([int(stars) if stars else None for stars in rng.integers(0, 6, ROWS)], pa.float64()),
        "is_new": rng.random(ROWS) < 0.5,
        "price": pa.array([Decimal(int(cents)) / 100 for cents in rng.gamma(2, 500, ROWS)]),
        "income": np.where(rng.random(ROWS) < 0.02, 1e7, rng.gamma(2, 1000, ROWS)),
        "at": [datetime(2024, 1, 1 + int(day)) for day in rng.integers(0, 28, ROWS)],
        "constant": np.ones(ROWS),
        "nothing": pa.nulls(ROWS),
        "nested": [{"a": 1}] * ROWS,
        "cookie_hash": pa.array([2**63 + int(user) for user in users], pa.uint64()),
        "big": rng.integers(2**53, 2**60, ROWS),
        "close": 1_600_000_000 + rng.permutation(ROWS) % 50,
        "few": rng.choice(rng.integers(10**17, 2 * 10**17, 50), ROWS).astype(float),
        "__index_level_0__": rng.permutation(ROWS),
        "": rng.permutation(ROWS),
        "keys": rng.random(ROWS),
        "account": pa.array([Decimal(10**25 + int(user)) for user in users], pa.decimal128(30, 0)),
        "close_2": 1_600_000_000 + rng.permutation(ROWS),
        "paid": [f"${1000 + user:,}.50" for user in users],
        "cast": [", ".join(rng.choice(["Ann", "Bob", "Eve"], 2, replace=False)) for _ in range(ROWS)],
        "land": rng.choice(["NA", "DE"], ROWS),
        "day": [f"{1 + user % 28}/1/2024" for user in users],
        "at_text": [f"2024-01-{1 + user % 28:02} 12:00:00" for user in users],
        "ip": [f"10.0.0.{user}" for user in users],
        "size_text": [f"{user}.5" for user in users],
        "written": [str(["a", "b"][: user % 3]) for user in users],
        "objects": [f'{{"age": {user}}}' for user in users],
    }


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(columns()), "clicks.parquet")
    return tmp_path


def train(*more, file="clicks.parquet", label="clicked"):
    return hotrow_train(["--data", file, "--label", label, "--output", "models", "--batch-size", "50", *more])


def test_each_column_gets_a_feature_or_a_reason(data, capsys):
    assert train() == 0
    printed = capsys.readouterr().out
    proposed = json.loads((data / "clicks.features.json").read_text())
    features = {feature.pop("name"): feature for feature in proposed["features"]}
    kinds = {name: (feature["kind"], feature.get("type")) for name, feature in features.items()}
    assert kinds == {
        "user": ("vocabulary", None),
        "session_id": ("vocabulary", "integer"),
        "country": ("vocabulary", None),
        "tags": ("vocabulary", None),
        "seen": ("vocabulary", "integer"),
        "stars": ("vocabulary", "integer"),
        "is_new": ("identity", "boolean"),
        "price": ("dense", None),
        "income": ("dense", None),
        "cookie_hash": ("vocabulary", None),
        "big": ("vocabulary", "integer"),
        "account": ("vocabulary", None),
        "paid": ("vocabulary", None),
        "cast": ("vocabulary", None),
        "land": ("vocabulary", None),
        "ip": ("vocabulary", None),
        "size_text": ("vocabulary", None),
    }
    assert features["account"]["values"][0].startswith("1" + "0" * 20)
    assert features["tags"]["list"] == {"most": 3, "keep": "first"}
    assert features["income"]["log1p"]
    assert "log1p" not in features["price"]
    for column, reason in {
        "income": "dense, log1p\n",
        "at": "left out: training times do not recur",
        "constant": "left out: it has fewer than two values",
        "nothing": "left out: a feature cannot be read from null",
        "nested": "left out: a feature cannot be read from struct",
        "close": "left out: float32 does not tell its numbers apart",
        "close_2": "left out: float32 does not tell its numbers apart",
        "paid": "vocabulary: texts such as '$1,0",
        "cast": "vocabulary: if the texts are lists, join their values with | instead of ', '",
        "land": "vocabulary: 'NA' is a text, but pandas.read_csv reads it as missing",
        "day": "left out: training times do not recur",
        "at_text": "left out: training times do not recur",
        "ip": "vocabulary\n",
        "size_text": "vocabulary: texts such as '",
        "few": "left out: floats lose digits of whole numbers above 2^53; store ids as integers or text",
        "__index_level_0__": "left out: the index of a pandas frame",
        " ": "left out: the index of a pandas frame",
        "keys": "left out: the name is reserved in requests; rename the column",
        "written": "left out: its values are lists as text; save the data as Parquet, or join the values of a list",
        "objects": "left out: its values are lists as text",
    }.items():
        assert any(line.startswith(column) and f"  {reason}" in line for line in printed.splitlines(keepends=True))
    with hotrow.load_model(data / "models" / "dcn") as session:
        table = pq.read_table("clicks.parquet")
        left_out = [
            "close_2",
            "day",
            "at_text",
            "at",
            "constant",
            "nothing",
            "nested",
            "close",
            "few",
            "",
            "keys",
            "written",
            "objects",
        ]
        with pytest.raises(FeatureValueError, match="clicked: is not a feature; leave it out"):
            session.predict(table)
        table = table.drop_columns(["clicked", *left_out])
        assert session.predict(table.slice(0, 64)).shape == (64, 1)


def test_only_rows_of_the_training_decide(data):
    rows = pa.table(
        {"clicked": [0, 1] * 50, "user": ["a", "b"] * 45 + ["late"] * 10, "price": [1.5, 2.5] * 45 + [1e9] * 10}
    )
    pq.write_table(rows, "late.parquet")
    assert train(file="late.parquet") == 0
    user, price = json.loads((data / "late.features.json").read_text())["features"]
    assert (user["values"], price["clip"], price["mean"]) == (["a", "b"], [1.5, 2.5], 2.0)


def test_names_and_values_tell_categories_times_and_lists(data):
    rng = np.random.default_rng(0)
    genres = [
        "|".join(rng.choice(["Action", "Comedy", "Drama"], size, replace=False)) for size in rng.integers(1, 4, 600)
    ]
    rows = {
        "clicked": [0, 1] * 300,
        "userId": rng.integers(0, 100, 600),
        "movieid": rng.integers(0, 200, 600),
        "SHOP_ID": rng.integers(0, 200, 600),
        "customer_no": rng.integers(0, 200, 600),
        "signup_date": rng.choice([20240105, 20240219, 20251231], 600),
        "velocity": rng.integers(0, 200, 600),
        "age": rng.integers(10, 80, 600),
        "timestamp": rng.integers(978_300_000, 1_046_000_000, 600),
        "ts_ms": rng.integers(978_300_000_000, 1_046_000_000_000, 600),
        "genres": genres,
        "tags": [text.replace("|", ";") for text in reversed(genres)],
    }
    pq.write_table(pa.table(rows), "movies.parquet")
    assert train(file="movies.parquet") == 0
    features = json.loads((data / "movies.features.json").read_text())["features"]
    assert [(feature["name"], feature["kind"]) for feature in features] == [
        ("userId", "vocabulary"),
        ("movieid", "vocabulary"),
        ("SHOP_ID", "vocabulary"),
        ("customer_no", "vocabulary"),
        ("velocity", "dense"),
        ("age", "dense"),
        ("genres", "vocabulary"),
        ("tags", "vocabulary"),
    ]
    assert [sorted(feature["values"]) for feature in features[-2:]] == 2 * [["Action", "Comedy", "Drama"]]
    assert [feature["list"]["separator"] for feature in features[-2:]] == ["|", ";"]
    with hotrow.load_model(data / "models" / "dcn") as session:
        row = {"userId": [3], "movieid": [5], "age": [30]}
        answers = [session.predict({**row, "genres": genres}) for genres in (["Drama|Action"], [["Drama", "Action"]])]
        assert answers[0] == answers[1]


def test_files_of_a_folder_may_have_other_orders_and_types_of_columns(data, capsys):
    rows = pa.table({"clicked": [0, 1] * 50, "item_id": np.arange(100) % 7})
    (data / "parts").mkdir()
    pq.write_table(rows, "parts/a.parquet")
    floats = pa.array(np.arange(100) % 7, pa.float64())
    pq.write_table(pa.table({"item_id": floats, "clicked": [0, 1] * 50, "new": [1] * 100}), "parts/b.parquet")
    assert train(file="parts") == 0
    [item] = json.loads((data / "parts.features.json").read_text())["features"]
    assert (item["type"], sorted(item["values"])) == ("integer", list(range(7)))
    for column, text in (
        (["a"] * 100, "parts column item_id: expected one type in all files, found int64, string"),
        (None, "parts/b.parquet column item_id: missing; the file has clicked"),
    ):
        changed = {"clicked": [0, 1] * 50} | ({} if column is None else {"item_id": column})
        pq.write_table(pa.table(changed), "parts/b.parquet")
        assert train(file="parts") == 1
        assert text in capsys.readouterr().err


def test_spaces_around_numbers_of_csv_do_not_count_and_around_texts_they_do(data, capsys):
    lines = [f"{n % 2}, {n % 9} , {'de' if n % 3 else 'fr'}" for n in range(100)]
    (data / "spaces.csv").write_text("\n".join(["clicked,user_id,country", *lines]) + "\n")
    assert train(file="spaces.csv") == 0
    user, country = json.loads((data / "spaces.features.json").read_text())["features"]
    assert (user["type"], sorted(user["values"])) == ("integer", list(range(9)))
    assert country["values"] == [" de", " fr"]
    assert "vocabulary: the space at the start or end of texts such as ' fr' counts" in capsys.readouterr().out


def test_csv_columns_of_long_digits_are_texts_and_times_with_a_zone_are_times(data):
    users = np.arange(100) % 9
    lines = [f"{user % 2},{10**25 + user},2024-01-01 10:00:{user:02}+01:00" for user in map(int, users)]
    (data / "ids.csv").write_text("\n".join(["clicked,account,at", *lines]) + "\n")
    assert train(file="ids.csv") == 0
    [account] = json.loads((data / "ids.features.json").read_text())["features"]
    assert (account["kind"], len(account["values"])) == ("vocabulary", 9)


def test_many_values_are_hashed_unless_each_row_has_its_own(data, capsys):
    rng = np.random.default_rng(0)
    rows = {
        "clicked": [0, 1] * 1000,
        "user": [f"u{n % 1500}" for n in rng.permutation(2000)],
        "click_id": np.arange(2000),
        "token": [f"t{n}" for n in range(2000)],
        "amount": np.arange(2000) % 1500,
    }
    pq.write_table(pa.table(rows), "many.parquet")
    assert train(file="many.parquet") == 0
    printed = capsys.readouterr().out
    assert printed.count("left out: each row has a value of its own") == 2
    assert "dense: if the numbers are ids, give it another kind, such as hash" in printed
    user, _ = json.loads((data / "many.features.json").read_text())["features"]
    assert user == {"name": "user", "kind": "hash", "buckets": 8192}


def test_csv_gets_the_same_features(data):
    table = pa.table(columns()).drop_columns(["tags", "seen", "nested", "nothing", "at", "cookie_hash", "size_text"])
    pq.write_table(table, "flat.parquet")
    pa_csv.write_csv(table, "other.csv")
    assert train(file="flat.parquet") == 0
    assert train(file="other.csv") == 0
    flat, other = (json.loads((data / f"{name}.features.json").read_text())["features"] for name in ("flat", "other"))
    assert [(one["name"], one["kind"], one.get("type")) for one in flat] == [
        (one["name"], one["kind"], one.get("type")) for one in other
    ]


def test_a_file_of_features_is_kept(data, capsys):
    assert train() == 0
    assert train() == 0  # the same proposal again
    path = data / "clicks.features.json"
    path.write_text(path.read_text().replace('"most": 3', '"most": 2'))
    changed = path.read_text()
    assert train("--features", "clicks.features.json") == 0
    capsys.readouterr()
    for _ in range(2):
        assert train() == 0
        written = "features written to clicks-2.features.json, because clicks.features.json has others: change"
        assert written in capsys.readouterr().out
    assert path.read_text() == changed
    assert sorted(file.name for file in data.glob("*.json")) == ["clicks-2.features.json", "clicks.features.json"]


@pytest.mark.parametrize(
    ("file", "label", "text"),
    [
        ("clicks.parquet", "click", "clicks.parquet column click: missing; the file has clicked, user"),
        ("clicks.parquet", "clickd", "; did you mean clicked?"),
        ("short.csv", "clicked", "short.csv line 3: expected 3 fields, as the header has, found 2"),
        (
            "latin.csv",
            "clicked",
            r"latin.csv line 2 column a: expected text in UTF-8, found b'Z\xfcrich'; if it is in latin-1, convert it",
        ),
        ("twice.csv", "clicked", "twice.csv column a: occurs twice"),
        ("absent.parquet", "clicked", "absent.parquet: no such file"),
        ("clicks.npz", "clicked", "clicks.npz: expected a Parquet or CSV file, or a folder of them"),
        (
            "numbers.parquet",
            "clicked",
            "numbers.parquet: no other column can be a category, which an embedding needs (x: dense)",
        ),
        (
            "null.parquet",
            "clicked",
            "column clicked record 1: expected 0 or 1, found null; leave out rows without a label",
        ),
        ("null.csv", "clicked", "line 3 column clicked: expected 0 or 1, found ''; leave out rows without a label"),
        ("late.csv", "clicked", "line 12 column clicked: expected 0 or 1, found 'NA'; leave out rows without a label"),
        ("empty.parquet", "clicked", "empty.parquet: no samples"),
        ("clicks.csv.zip", "clicked", "; convert it: pandas.read_csv('clicks.csv.zip').to_parquet('clicks.parquet')"),
        ("one.csv", "clicked", "one.csv: 1 sample, expected at least 2: one to train on, one to evaluate on"),
        (
            "utf16.csv",
            "clicked",
            "if it is in utf-16, convert it: pandas.read_csv('utf16.csv', encoding='utf-16').to_p",
        ),
        ("clicks.jsonl", "clicked", "; convert it: pandas.read_json('clicks.jsonl', lines=True).to_parquet('clicks.p"),
        ("clicks.txt", "clicked", "; if its columns are separated by commas, let its name end in .csv"),
        (
            "hive",
            "clicked",
            "hive: the folder has no Parquet or CSV files, and files in its subfolders are not read; 0 of 1",
        ),
        ("wrong.parquet", "clicked", "wrong.parquet: "),
        ("answers.csv", "clicked", "column clicked: expected 0 or 1, true or false, found the texts 'yes', ' no'"),
    ],
)
def test_data_without_features_is_refused(data, capsys, file, label, text):
    pq.write_table(pa.table({"clicked": [0, 1] * 50, "x": np.arange(100) / 7}), "numbers.parquet")
    pq.write_table(pa.table({"clicked": pa.array([], pa.int64())}), "empty.parquet")
    pq.write_table(pa.table({"clicked": [True, None, None, False] * 2, "a": ["x", "y"] * 4}), "null.parquet")
    (data / "null.csv").write_text("clicked,a\n1,x\n,y\n0,z\n1,x\n")
    (data / "late.csv").write_text("clicked,a\n" + "1,x\n0,y\n" * 5 + "NA,x\n")  # a row that is held out
    (data / "one.csv").write_text("clicked,a\n1,x\n")
    (data / "utf16.csv").write_text("clicked,a\n1,x\n", encoding="utf-16")
    (data / "clicks.jsonl").write_text('{"clicked": 1, "a": "x|y"}\n')
    (data / "clicks.txt").write_text("clicked,a\n1,x\n")
    (data / "clicks.csv.zip").write_bytes(b"PK,,")
    (data / "hive" / "day=1").mkdir(parents=True)
    (data / "wrong.parquet").write_bytes(b"PAR1 no file")
    (data / "short.csv").write_text("clicked,a,b\n1,x,1\n0,y\n")
    (data / "latin.csv").write_bytes(b"clicked,a,b\n1,Z\xfcrich,1\n0,y,2\n")
    (data / "twice.csv").write_text("clicked,a,a\n1,x,1\n0,y,2\n")
    (data / "answers.csv").write_text("clicked,a\nyes,x\n no,y\n")
    assert train(file=file, label=label) == 1
    assert text in capsys.readouterr().err
    assert not list(data.glob("*.features.json"))


def test_few_numbers_may_be_ids_and_text_without_a_name_is_no_index(data, capsys):
    lines = [f"{n % 2},{n % 9},{3000 + 7 * (n % 40)},{10**17 + n % 30},word {n % 5}" for n in range(100)]
    (data / "few.csv").write_text("\n".join(["clicked,user_id,thing,other,", *lines]) + "\n")
    assert train(file="few.csv") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^thing .* dense: if the numbers are ids, give it another kind", printed, re.MULTILINE)
    assert re.search(r"^other .* vocabulary$", printed, re.MULTILINE)
    assert re.search(r"^ +string .* left out: the column has no name$", printed, re.MULTILINE)


def test_padding_does_not_make_lists_longer(data):
    seen = [[f"m{n % 7}", "", f"m{n % 5}", "", None] for n in range(100)]
    stars = [[n % 5, None, float("nan")] for n in range(100)]
    pq.write_table(pa.table({"clicked": [0, 1] * 50, "seen": seen, "stars": stars}), "padded.parquet")
    assert train(file="padded.parquet") == 0
    features = json.loads((data / "padded.features.json").read_text())["features"]
    assert {feature["name"]: feature["list"]["most"] for feature in features} == {"seen": 2, "stars": 1}


def test_a_rating_that_is_missing_is_expected_to_be_a_number(data, capsys):
    ratings = pa.array([None, *range(1, 6)] * 20, pa.float64())
    pq.write_table(pa.table({"rating": ratings, "user_id": np.arange(120) % 9}), "ratings.parquet")
    assert train(file="ratings.parquet", label="rating") == 1
    assert "expected a finite number, found null; leave out rows without a label" in capsys.readouterr().err
