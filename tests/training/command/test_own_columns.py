"""``hotrow train`` on files as people have them: other separators, words for missing values, ratings, weights."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.features import MISSING_WORDS
from tests.training.command.running import hotrow_train
from training.command.notes import of_result, of_samples
from training.data import ColumnMap, read_csv, read_parquet
from training.data.opening import default_columns, open_data
from training.errors import DataError
from training.features import FeatureFile
from training.model.document import open_document
from training.proposal import propose
from training.synthetic.generator import generate_for

ROWS = 200


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns():
    rng = np.random.default_rng(0)
    users = rng.integers(0, 20, ROWS)
    return {"clicked": users % 2 == 1, "user": users, "year": rng.integers(1920, 2000, ROWS)}


def write_csv(name, rows, separator=",", header=True):
    lines = [separator.join(map(str, values)) for values in zip(*rows.values(), strict=True)]
    text = "\n".join([separator.join(rows), *lines] if header else lines)
    with open(name, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def train(file, *more, label="clicked"):
    given = [] if label is None else ["--label", label]
    return hotrow_train(["--data", file, *given, "--output", "models", "--batch-size", "50", *more])


@pytest.mark.parametrize(
    ("name", "separator", "text"),
    [
        ("u.data", "\t", "u.data: expected a Parquet or CSV file, or a folder of them; its columns are separated by "),
        (
            "ratings.dat",
            "::",
            "pandas.read_csv('ratings.dat', sep='::', engine='python').to_parquet('ratings.parquet')",
        ),
        ("semi.csv", ";", "semi.csv: expected columns that are separated by commas, found one column; its columns are"),
        ("tab.csv", "\t", "names=['column1', 'column2', 'column3']"),
        (
            "wide.csv",
            ";",
            "engine='python', decimal=',').to_parquet('wide.parquet'); without a header, name the columns:",
        ),
        ("u.item", "|", "pandas.read_csv('u.item', sep='|', engine='python').to_parquet('u.item.parquet')"),
    ],
)
def test_a_file_with_another_separator_is_refused_with_the_command_that_converts_it(name, separator, text, capsys):
    more = {f"price{number}": ["9,5"] * ROWS for number in range(9)} if name == "wide.csv" else {}
    write_csv(name, columns() | more, separator)
    assert train(name) == 1
    shown = capsys.readouterr().err
    assert text in shown
    assert ("'column8', ...]" in shown) == bool(more)


def test_the_command_that_converts_a_file_names_its_encoding(folder, capsys):
    (folder / "movies.dat").write_bytes(b"1::Toy Story\n2::Cit\xe9 des enfants perdus\n")
    assert train("movies.dat") == 1
    assert "sep='::', engine='python', encoding='latin-1').to_parquet('movies.parquet')" in capsys.readouterr().err


def test_a_file_without_a_header_is_refused(capsys):
    write_csv("none.csv", {"0.5": [1, 0], "7": [2, 3]})
    assert train("none.csv") == 1
    assert "missing; the file has 0.5, 7. If these are values, write the names of the" in capsys.readouterr().err


def test_raw_columns_without_a_label_are_refused(capsys):
    write_csv("a.csv", columns())
    assert train("a.csv", label=None) == 1
    assert "To train on raw columns, name the label: --label COLUMN" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_two_classes_that_are_not_0_and_1_are_refused_before_features_are_written(folder, kind, capsys):
    rows = {**columns(), "class": [5, 3] * (ROWS // 2)}
    write_csv("a.csv", rows)
    pq.write_table(pa.table(rows), "a.parquet")
    assert train(f"a.{kind}", label="class") == 1
    place = "line 2 column class" if kind == "csv" else "column class record 0"
    text = f"a.{kind} {place}: expected 0 or 1, found 5. To predict an amount or a rating, train a regression: --loss"
    assert text in capsys.readouterr().err
    assert not list(folder.glob("*.features.json"))


def test_a_column_whose_last_value_has_letters_is_text():
    """The first block of pyarrow has only digits."""
    rows = columns()
    write_csv("a.csv", {**rows, "zip": [*range(10_000, 10_000 + ROWS // 2 - 1), "T8H1N", *rows["user"][ROWS // 2 :]]})
    assert train("a.csv") == 0
    with open("a.features.json", encoding="utf-8") as file:
        by_name = {one["name"]: one for one in json.load(file)["features"]}
    assert "type" not in by_name["zip"]
    assert "T8H1N" in by_name["zip"]["values"]


def test_digits_after_a_zero_are_text_as_in_zip_codes():
    rows = columns()
    write_csv("a.csv", {**rows, "zip": [f"{7 * user:05}" for user in rows["user"]]})
    assert train("a.csv") == 0
    with open("a.features.json", encoding="utf-8") as file:
        by_name = {one["name"]: one for one in json.load(file)["features"]}
    assert "type" not in by_name["zip"]
    assert "00007" in by_name["zip"]["values"]


def test_words_for_missing_values_are_missing_numbers_and_are_text_in_texts():
    features = [
        {"name": "stars", "kind": "vocabulary", "type": "integer", "values": [1, 2]},
        {"name": "code", "kind": "vocabulary", "values": ["NA", "b"]},
        {"name": "price", "kind": "dense", "missing": 3},
        {"name": "is_new", "kind": "identity", "type": "boolean", "size": 2},
    ]
    with open("f.json", "w", encoding="utf-8") as file:
        json.dump({"format": 1, "features": features}, file)
    file_of = FeatureFile("f.json", open_document("dcn"), ["clicked"])
    for words in (["" for _ in MISSING_WORDS], MISSING_WORDS):
        count = len(words)
        rows = {
            **{
                "clicked": ["True", "false"] * (count // 2) + ["1"] * (count % 2),
                "stars": words,
                "code": ["NA"] * count,
            },
            **{"price": words, "is_new": words},
        }
        write_csv("a.csv", rows)
        samples = open_data(Path("a.csv"), file_of.document, features=file_of)
        assert samples.dense.tolist() == [[3.0]] * count
        assert samples.bags.sizes.tolist() == [[0, 1, 0]] * count
        assert samples.labels[:2, 0].tolist() == [1, 0]


@pytest.mark.parametrize("values", [["True", "false"], [True, False], [1.0, 0.0], ["1", "0"], ["NaN", "0"], [2.5, 0]])
def test_labels_are_numbers_booleans_or_their_text(values):
    rows = {"clicked": values, "user": [1, 2]}
    write_csv("a.csv", rows)
    pq.write_table(pa.table(rows), "a.parquet")
    columns = ColumnMap(("clicked",), (), ("user",))
    for read, file in ((read_csv, "a.csv"), (read_parquet, "a.parquet")):
        if values[0] in ("NaN", 2.5):
            with pytest.raises(DataError, match="column clicked"):
                list(read(file, columns))
        else:
            [samples] = read(file, columns)
            assert samples.labels[:, 0].tolist() == [1, 0]


def test_a_large_dense_column_is_named_and_a_model_that_diverges_is_not_written(folder, capsys):
    write_csv("a.csv", columns())
    features = [{"name": "user", "kind": "identity", "size": 100}, {"name": "year", "kind": "dense"}]
    (folder / "f.json").write_text(json.dumps({"format": 1, "features": features}))
    assert train("a.csv", "--features", "f.json", "--learning-rate", "0.01") == 1
    out, err = capsys.readouterr()
    assert (
        "note: the dense column year has values of about 1,961, and networks need about 1: give the feature mean" in out
    )
    assert "training has diverged, so no model is written: the log loss of clicked is " in err
    assert not list(folder.glob("models/*/1"))


def test_slots_with_equal_keys_in_one_table_are_named(folder, capsys):
    rng = np.random.default_rng(0)
    rows = {"click": rng.integers(0, 2, ROWS), "purchase": rng.integers(0, 2, ROWS)}
    rows |= {"dense_0": rng.random(ROWS), "dense_1": rng.random(ROWS), "history": rng.integers(0, 9, ROWS)}
    rows |= {f"profile_{slot}": rng.integers(0, 5, ROWS) + 100 * min(slot, 1) for slot in range(3)}
    pq.write_table(pa.table(rows), "a.parquet")
    assert train("a.parquet", "--model", "mmoe", label=None) == 0
    out = capsys.readouterr().out
    assert "note: profile_1 and profile_2 have 5 equal keys in one table, such as 100, so they share rows" in out
    document = open_document("din")
    samples = generate_for(document.graph, 100, 0).samples
    assert not list(of_samples(document, default_columns(document), samples, is_raw=False))  # a history has its targets


def test_a_vocabulary_without_the_values_of_the_data_is_named(capsys):
    write_csv("a.csv", {**columns(), "country": ["de", "fr"] * (ROWS // 2)})
    write_csv("b.csv", {**columns(), "country": ["DE", "fr", "IT", "FR"] * (ROWS // 4)})
    features = [{"name": "user", "kind": "hash", "buckets": 50}, {"name": "country", "kind": "vocabulary"}]
    with open("f.json", "w", encoding="utf-8") as file:
        json.dump({"format": 1, "features": [features[0], {**features[1], "values": ["de", "fr"]}]}, file)
    assert train("a.csv", "--features", "f.json") == 0
    assert "not in its vocabulary" not in capsys.readouterr().out
    assert train("a.csv", "--features", "f.json", "--eval-data", "b.csv") == 0
    assert "\nnote: b.csv: 75.0% of the values of country are not in its vocabulary\n" in f"\n{capsys.readouterr().out}"


def test_numbers_that_are_equal_in_float32_are_named(capsys):
    write_csv("a.csv", {**columns(), "stamp": [10**9 + number % 9 for number in range(ROWS)]})
    features = [{"name": "user", "kind": "hash", "buckets": 50}, {"name": "stamp", "kind": "dense", "mean": 1e9}]
    with open("f.json", "w", encoding="utf-8") as file:
        json.dump({"format": 1, "features": features}, file)
    assert train("a.csv", "--features", "f.json") == 0
    assert "note: the dense column stamp has the same number in " in capsys.readouterr().out


def test_a_model_that_is_worse_than_a_constant_is_named(capsys):
    rows = {"clicked": [0, 1, 1, 0] * 50, "user": ["a", "a", "b", "b"] * 50}
    write_csv("a.csv", rows)
    assert train("a.csv", "--learning-rate", "0.05", "--epochs", "2") == 0
    out = capsys.readouterr().out
    assert "note: the log loss of clicked is " in out
    assert ", and a constant prediction has 0.6931, and an AUC of 0.5" in out


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_weights_is_not_a_feature(kind, capsys):
    rows = {**columns(), "w": [0.0, 2.0] * (ROWS // 2)}
    write_csv("a.csv", rows)
    pq.write_table(pa.table(rows), "a.parquet")
    assert train(f"a.{kind}", "--weight", "w") == 0
    assert "AUC" in capsys.readouterr().out
    with open("a.features.json", encoding="utf-8") as file:
        assert [one["name"] for one in json.load(file)["features"]] == ["user", "year"]
    document = open_document("dcn")
    file_of = FeatureFile("a.features.json", document, ["clicked"], weight="w")
    samples = open_data(Path(f"a.{kind}"), file_of.document, features=file_of)
    assert samples[3:5].weights.tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("weight", "options", "text"),
    [
        (["1", "-1"], [], "a.csv line 3 column w: expected a weight of at least 0, found -1"),
        (["1", "inf"], [], "a.csv line 3 column w: expected a weight of at least 0, found inf"),
        (["1", "NA"], [], "a.csv line 3 column w: expected a number, found 'NA'"),
        (["1", "heavy"], [], "a.csv line 3 column w: expected a number, found 'heavy'"),
        (["0", "0"], [], "evaluation samples: expected a weight above 0, found none"),
        (["1", "1"], ["--weight", "v"], "a.csv column v: missing; the file has clicked, user, year, w"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weight, options, text, capsys):
    write_csv("a.csv", {**columns(), "w": weight * (ROWS // 2)})
    assert train("a.csv", "--weight", "w", *options) == 1
    assert text in capsys.readouterr().err


def test_a_training_with_weights_does_not_resume_without_them(capsys):
    write_csv("a.csv", {**columns(), "w": [0.5, 2.0] * (ROWS // 2)})
    options = ("--features", "f.json", "--checkpoint", "c")
    with open("f.json", "w", encoding="utf-8") as file:
        json.dump({"format": 1, "features": [{"name": "user", "kind": "hash", "buckets": 50}]}, file)
    assert train("a.csv", "--weight", "w", *options) == 0

    assert train("a.csv", *options, "--resume", "--epochs", "2") == 1

    assert '.weight: the checkpoint was made with "w", and now it is ' in capsys.readouterr().err


def test_arrays_have_no_column_of_weights(capsys):
    np.savez("a.npz", label=[0, 1])
    assert train("a.npz", "--weight", "w", label=None) == 1
    assert "expected a Parquet or CSV file, which has a column of weights 'w'" in capsys.readouterr().err


def test_half_floats_are_numbers():
    values = (np.arange(ROWS) / 8).astype(np.float16)
    pq.write_table(pa.table({**columns(), "half": values}), "a.parquet")
    assert propose(Path("a.parquet"), ["clicked"], holds_out=True)[-1].feature["kind"] == "dense"


def test_an_evaluation_of_one_class_is_not_compared_with_a_constant():
    epoch = {"log_loss": {"label": 0.1}, "auc": {"label": None}, "base_log_loss": {"label": 0.0}}
    document = open_document("dcn")
    assert not list(of_result(document, epoch))
    assert list(of_result(document, {**epoch, "base_log_loss": {"label": 0.05}}))
    [note] = of_result(document, {**epoch, "auc": {"label": 0.995}, "base_log_loss": {"label": 0.5}})
    assert note.startswith("note: an AUC of 0.9950 for label is rare")
    assert not list(of_result(document, {**epoch, "base_log_loss": {}}))  # of an earlier version's checkpoint
