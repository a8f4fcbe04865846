"""``hotrow train`` on labels that are any number, and what other commands make of the version."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from hotrow.replay.document import replay_document
from serving.cli.main import main
from serving.errors import RequestError, TraceError
from serving.model.records import Output
from tests.training.command.running import hotrow_train
from training.command.notes import LearnedLabels, of_epoch, of_result
from training.errors import TrainingError
from training.model.document import open_document
from training.model.loss_layers import with_losses
from training.model.losses import figure_text
from training.model.trainer import EpochResult

ROWS, HELD_OUT = 400, 40


def ratings(shift=0.0):
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 20, ROWS), rng.integers(0, 30, ROWS)
    quality = np.random.default_rng(1).uniform(0.5, 5, 30)
    stars = np.clip(np.rint(2 * quality[items] + rng.normal(0, 0.6, ROWS)) / 2, 0.5, 5)
    return {"rating": stars + shift, "user": [f"u{user}" for user in users], "item": [f"i{item}" for item in items]}


def train(folder, *options, data="ratings.parquet"):
    output = ["--output", str(folder / "models"), "--batch-size", "40", "--learning-rate", "0.01"]
    return hotrow_train(["--data", str(folder / data), *output, *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A version, and the lines of its training."""
    folder = tmp_path_factory.mktemp("trained")
    pq.write_table(pa.table(ratings()), folder / "ratings.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(folder, "--label", "rating", "--name", "stars", "--epochs", "3", "--metrics", "metrics.json") == 0
    return folder


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


@pytest.fixture(scope="module")
def liked(trained):
    """A version of the same features that predicts a probability."""
    pq.write_table(pa.table(ratings() | {"liked": np.arange(ROWS) % 2}), trained / "liked.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)
        options = ["--label", "liked", "--features", "ratings.features.json", "--name", "liked"]
        assert train(trained, *options, data="liked.parquet") == 0
    return trained / "models" / "liked"


def held_out():
    return {name: list(values)[-HELD_OUT:] for name, values in ratings().items()}


def test_ratings_are_a_regression_and_the_served_figures_are_those_of_the_trainer(folder):
    rows = held_out()
    labels = np.array(rows.pop("rating"))
    with hotrow.load_model(folder / "models" / "stars") as session:
        assert session.outputs == (Output("OUTPUT0", "score"),)
        answers = session.predict(rows)[:, 0].astype(np.float64)
    record = json.loads((folder / "models" / "stars" / "1" / "training.json").read_text())
    assert record["arguments"]["loss"] == ["mse"]
    assert json.loads((folder / "metrics.json").read_text())["epochs"] == record["epochs"]
    best = record["epochs"][record["epoch"] - 1]
    found = {name: best[name]["rating"] for name in ("rmse", "base_rmse", "mae", "r2")}
    errors = answers - labels
    assert found == pytest.approx(
        {
            "rmse": np.sqrt((errors**2).mean()),
            "base_rmse": labels.std(),
            "mae": np.abs(errors).mean(),
            "r2": 1 - (errors**2).mean() / labels.var(),
        },
        rel=1e-4,
    )
    assert found["r2"] > 0.5
    assert best["rmse"]["rating"] == min(epoch["rmse"]["rating"] for epoch in record["epochs"])
    head = json.loads((folder / "models" / "stars" / "1" / "graph.json").read_text())["layers"][-1]
    learned = ratings()["rating"][:-HELD_OUT]
    assert (head["type"], head["mean"], head["std"]) == (
        "Denormalize",
        pytest.approx([learned.mean()]),
        pytest.approx([learned.std()]),
    )


def test_the_proposal_says_what_is_learned_of_each_label(folder, capsys):
    labels = {"clicked": np.arange(ROWS) % 2, "price": 1e5 * ratings()["rating"]}
    pq.write_table(pa.table(labels | ratings()), "several.parquet")
    options = ["--label", "clicked", "--label", "price", "--model", "mmoe", "--plot", "several.svg"]
    assert train(folder, *options, data="several.parquet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] + line[line.index("label:") :] for line in lines[1:3]] == [
        "clickedlabel: the probability of 1",
        "pricelabel: a regression (mean squared error) of numbers from 50,000 to 500,000",
    ]
    assert any(line.endswith("several.features.json --loss log --loss mse") for line in lines)
    assert any(line.startswith("AUC clicked 0.") for line in lines)
    assert any(line.startswith("RMSE price ") and ", R2 price " in line for line in lines)
    picture = (folder / "several.svg").read_text()
    assert all(words in picture for words in ("AUC", "RMSE", "log loss", "squared error / variance", "price"))
    with hotrow.load_model(folder / "models" / "mmoe") as session:
        assert [output.kind for output in session.outputs] == ["score", "probability", "score"]
    assert main(["compare", "models/mmoe/1", "models/stars/1", "--plot", "c.svg"]) == 0
    titles = re.findall(
        "<!-- (log loss|squared error / variance|AUC|RMSE|calib.*?) -->", (folder / "c.svg").read_text()
    )
    calibration = "calibration of the last epoch"
    expected = ["log loss", "squared error / variance", "AUC", calibration, "RMSE", calibration, "RMSE", calibration]
    assert titles == expected  # of a click, a price and stars, whose errors differ


def test_csv_with_given_features_and_loss(folder, capsys):
    rows = ratings()
    lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
    (folder / "r.csv").write_text("\n".join([",".join(rows), *lines]) + "\n")
    options = ["--label", "rating", "--features", "ratings.features.json", "--name", "csv"]
    assert train(folder, *options, data="r.csv") == 1
    first = int(np.argmax(rows["rating"] != 1))
    found = f"r.csv line {first + 2} column rating: expected 0 or 1, found {rows['rating'][first]:g}. To predict an"
    assert found in capsys.readouterr().err
    assert train(folder, *options, "--loss", "mse", data="r.csv") == 0
    assert "RMSE " in capsys.readouterr().out


def test_a_version_of_a_version_keeps_the_loss_and_the_scale(folder, capsys):
    pq.write_table(pa.table(ratings(shift=2.0)), "later.parquet")
    assert train(folder, "--from", "models/stars/1", "--name", "later", data="later.parquet") == 0
    assert "RMSE " in capsys.readouterr().out
    heads = [
        json.loads((folder / "models" / name / "1" / "graph.json").read_text())["layers"][-1]
        for name in ("stars", "later")
    ]
    assert heads[0] == heads[1]
    assert main(["compare", "models/stars/1", "models/later/1", "--plot", "c.svg"]) == 0
    names = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert names[1:4] == [["RMSE", "rating"], ["MAE", "rating"], ["R2", "rating"]]


def test_a_resumed_regression_is_the_uninterrupted_one_and_changed_labels_are_refused(folder, capsys):
    options = ["--label", "rating", "--features", "ratings.features.json", "--loss", "mse"]
    assert train(folder, *options, "--name", "half", "--checkpoint", "saved") == 0
    resume = [*options, "--name", "whole", "--epochs", "3", "--checkpoint", "saved", "--resume"]
    assert train(folder, *resume) == 0
    both = [(folder / "models" / name / "1" / "dense.model").read_bytes() for name in ("stars", "whole")]
    assert both[0] == both[1]
    capsys.readouterr()
    pq.write_table(pa.table(ratings(shift=1.0)), "ratings.parquet")
    assert train(folder, *resume) == 1
    assert "ratings.parquet has changed since the checkpoint" in capsys.readouterr().err
    pq.write_table(pa.table(ratings()), "ratings.parquet")


def test_clients_are_told_that_an_answer_is_no_probability(folder, liked, capsys):
    assert main(["check", "models/stars", "--against", str(liked)]) == 0
    line = "read the outputs OUTPUT0 (score); the old version has OUTPUT0 (probability)"
    assert line in capsys.readouterr().out


def test_replay_compares_ratings_with_answers(folder, liked, capsys):
    rows = held_out()
    stars = np.array(rows["rating"])
    with hotrow.load_model("models/stars") as session:
        answers = session.predict({name: rows[name] for name in ("user", "item")})[:, 0]
        (unit,) = session.graph.units
        with pytest.raises(
            RequestError, match=r"1,025 rows, but .* at most 1,024 in one call: slice the frame, or score"
        ):
            session.predict(pa.table({"user": ["u1"] * 1025}))
    more = 0.09 * unit
    assert more > 0.1
    about = {"request_id": [f"r{n}" for n in range(HELD_OUT)], "request_sample": np.zeros(HELD_OUT, np.int32)}
    log = pa.table(about | rows | {"prediction": (answers + more).astype(np.float32)})
    pq.write_table(log.set_column(2, "rating", pa.array([None, *stars[1:]])), "log.parquet")
    found = replay_document(folder / "log.parquet", [folder / "models" / "stars"], ["rating"])
    for quality, shift in ((found["models"][0]["quality"], 0), (found["quality"], more)):
        errors = answers[1:].astype(np.float64) + shift - stars[1:]
        assert quality["rating"]["samples"] == HELD_OUT - 1
        assert quality["rating"]["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    assert found["models"][0]["differences"]["share_above"] == {"0.001": 1.0, "0.01": 1.0, "0.1": 0.0}
    capsys.readouterr()
    assert main(["replay", "log.parquet", "models/stars", "--label", "rating", "--plot", "replay.svg"]) == 0
    assert "different kinds" not in capsys.readouterr().out
    assert main(["replay", "log.parquet", str(liked)]) == 0
    assert "note: liked version 1 and the log answer with different kinds of numbers, such" in capsys.readouterr().out
    clicks = log.set_column(log.num_columns - 1, "prediction", pa.array(np.full(HELD_OUT, 0.25, np.float32)))
    pq.write_table(clicks, "clicks.parquet")
    assert main(["replay", "clicks.parquet", "models/stars"]) == 0
    assert "note: stars version 1 and the log answer with different kinds" in capsys.readouterr().out

    pq.write_table(log.set_column(2, "rating", pa.array([np.inf, *stars[1:]])), "log.parquet")
    with pytest.raises(TraceError, match="rating: expected a finite number, got inf in row 0"):
        replay_document(folder / "log.parquet", [folder / "models" / "stars"], ["rating"])
    pq.write_table(log.set_column(2, "rating", pa.array(np.arange(HELD_OUT) % 2)), "log.parquet")
    reason = "stars version 1 answers with score, and the version before with probability; replay them one after"
    with pytest.raises(TraceError, match=reason):
        replay_document(folder / "log.parquet", [liked, folder / "models" / "stars"], ["rating"])


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        (
            [-1] * 10 + [0, 1] * 195,
            [],
            "column y record 0: expected 0 or 1, found -1. To predict an amount",
        ),  # few others
        ([1, 2, 3, 4], ["--loss", "log"], "column y record 1: expected 0 or 1, found 2. To predict an amount"),
        ([1.5, np.inf, 2, 3], ["--loss", "mse"], "column y record 1: expected a finite number, found inf"),
        (
            [1.5, None, 2, 3],
            ["--loss", "mse"],
            "column y record 1: expected a finite number, found null; leave out rows without a label",
        ),
        (["good", "bad"], ["--loss", "mse"], "column y: expected a finite number, found the texts 'good', 'bad'"),
        (pa.array(["b", "a"]).dictionary_encode(), [], "column y: expected 0 or 1, true or false, found the texts 'b'"),
        (["good", "bad"], [], "column y: expected 0 or 1, true or false, found the texts 'good', 'bad'"),
        ([-1, 1], [], "column y record 0: expected 0 or 1, found -1. To predict an amount"),
        ([1e39, 1, 2, 3], [], "column y record 0: expected a number of at most 3.4e+38, found 1e+39"),
        (
            [10**9 + one for one in range(1, 6)],
            [],
            "column y: expected labels that float32 can tell apart, found numbers of about 1,000,000,000, where",
        ),
        ([[1], [2]], [], "column y: expected numbers, found list<element: int64>"),
        ([1, 2, 3, 4], ["--features", "ratings.features.json", "--loss", "log"], "column y record 1: expected 0 or 1"),
    ],
)
def test_labels_that_a_loss_does_not_take_are_refused(folder, values, options, text, capsys):
    rows = ratings()
    pq.write_table(
        pa.table(
            {
                "user": rows["user"],
                "item": rows["item"],
                "y": pa.chunked_array([pa.array(values)] * (ROWS // len(values))),
            }
        ),
        "y.parquet",
    )
    assert train(folder, "--label", "y", *options, data="y.parquet") == 1
    assert text in capsys.readouterr().err
    (folder / "y.features.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--loss", "mae"], "argument --loss: invalid choice: 'mae'"),
        (
            ["--label", "rating", "--loss", "mse", "--loss", "log"],
            "--loss: expected one for all labels, or one for each",
        ),
        (["--label", "rating", "--label", "rating"], "--label: a column is named twice"),
        (["--label", "rating", "--weight", "rating"], "--weight: the column is a label"),
        (["--from", "models/stars", "--loss", "mse"], "--from keeps the version's network, features and loss"),
    ],
)
def test_losses_that_do_not_fit_the_labels_are_refused(folder, options, text, capsys):
    with pytest.raises(SystemExit):
        train(folder, *options)
    assert text in capsys.readouterr().err


def test_generated_samples_have_no_ratings(tmp_path, capsys):
    assert hotrow_train(["--synthetic", "100", "--loss", "mse", "--output", str(tmp_path)]) == 1
    assert "generated labels are 0 and 1, from which no regression is learned" in capsys.readouterr().err


def test_a_regression_that_is_likely_a_mistake_is_named():
    document = with_losses(open_document("dcn"), ["mse"])
    figures = {"rmse": 1.25, "base_rmse": 1.125, "mae": 1.0, "r2": -0.2, "calibration": ()}

    def notes(**changed):
        return list(of_result(document, {name: {"label": value} for name, value in (figures | changed).items()}))

    [note] = notes()
    assert note.startswith(
        "note: the RMSE of label is 1.2500, and a constant prediction has 1.1250. The model is worse"
    )
    assert not notes(rmse=1.0, r2=0.2)
    assert not notes(rmse=1.0, base_rmse=0.0, r2=None)
    assert notes(rmse=0.1, r2=0.995)[0].startswith("note: an R2 of 0.9950 for label is rare")
    with pytest.raises(
        TrainingError, match="no model is written: the RMSE of label is 100,000, and a constant predict"
    ):
        notes(rmse=1e5)
    learned = LearnedLabels(np.array([[1.0], [3.0]]), None)  # a mean of 2 and a standard deviation of 1

    def of_rows(rows, mean):
        result = EpochResult(1, 0.5, (0.5,), ({**figures, "calibration": ((2.0, mean - 0.5), (2.5, mean + 0.5))},), 1.0)
        return list(of_epoch(document, result, rows, learned))

    assert of_rows(29, 2.0) == ["note: 29 evaluation rows are too few for a reliable RMSE of label"]
    assert not of_rows(30, 2.6)  # by chance
    assert not of_rows(1000, 2.4)
    [note] = of_rows(1000, 2.6)
    assert note.startswith("note: the mean of label is 2.0000 in the training rows and 2.6000 in the evaluation rows")


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([1] * ROWS, "note: in all 360 training rows y is 1, so the model learns a constant. If the data is sorted"),
        ([1] * 360 + [0, 1] * 20, "note: in all 360 training rows y is 1"),
        ([1] * 200 + [0] * 200, "the mean of y is 0.5556 in the training rows and 0.0000 in the evaluation rows. If"),
    ],
)
def test_constant_and_sorted_labels_are_named(folder, labels, text, capsys):
    rows = ratings()
    pq.write_table(pa.table({"user": rows["user"], "item": rows["item"], "y": labels}), "y.parquet")
    assert train(folder, "--label", "y", "--name", "sorted", data="y.parquet") == 0
    assert text in capsys.readouterr().out


def test_labels_of_every_arrow_type_are_the_same_labels(folder, capsys):
    rows, clicked = ratings(), np.arange(ROWS) % 2
    texts = pa.array(np.where(clicked, "true", "false"))
    lines = []
    for labels in (
        pa.array(clicked).dictionary_encode(),
        texts.dictionary_encode(),
        texts.cast(pa.string_view()),
        pa.array(clicked).cast(pa.decimal128(20, 0)),
        pa.array(clicked.astype(np.float16)),
    ):
        pq.write_table(pa.table({"user": rows["user"], "item": rows["item"], "y": labels}), "types.parquet")
        assert train(folder, "--label", "y", "--name", "types", data="types.parquet") == 0
        lines.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("AUC")))
    assert len(set(lines)) == 1


def test_classes_of_whole_numbers_are_called_a_regression(folder, capsys):
    rows = ratings()
    pq.write_table(pa.table({"user": rows["user"], "item": rows["item"], "y": [0, 1, 2, 1] * 100}), "y.parquet")
    assert train(folder, "--label", "y", "--name", "classes", data="y.parquet") == 0
    line = "label: a regression (mean squared error) of numbers from 0 to 2; for the probability of a class, turn"
    assert line in capsys.readouterr().out


def test_figures_of_small_labels_have_digits():
    assert [figure_text(value) for value in (0.0, 2.7e-6, 0.0123456, -0.5, 1234.56)] == [
        "0.0000",
        "2.7e-06",
        "0.0123",
        "-0.5000",
        "1,234.6",
    ]
