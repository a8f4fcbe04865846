"""The `hotrow import` command."""

import json
import sys

import numpy as np
import pytest

import hotrow
from serving.cli.main import main


@pytest.fixture
def run(network, tables, tmp_path):
    """Run `hotrow import` with the required options and `more`."""

    def run(*more, combiner="sum"):
        given = [f"--table={name}={path}" for name, path in tables.items()]
        own = f"--network={network} --repository={tmp_path / 'models'} --name=ctr --combiner={combiner}"
        return main(["import", *own.split(), *given, *more])

    return run


def test_a_model_is_described_and_written(run, tables, tmp_path, capsys):
    assert run("--combiner=users=mean", "--max-batchsize=9", "--version=3") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("dense.onnx: 3 dense features (dense), answers [B, 1]")
    assert lines[1].startswith("table ads: 2 slots, sum; 30 rows of 4 from ")
    assert lines[2].startswith("table users: 1 slot, mean; 20 rows of 4 from ")
    assert lines[3:] == [
        f"model written to {tmp_path / 'models' / 'ctr' / '3'}",
        f"serve it: hotrow serve {tmp_path / 'models'}",
    ]
    assert '"max_batchsize": 9' in (tmp_path / "models" / "ctr" / "3" / "graph.json").read_text()
    assert main(["check", str(tmp_path / "models")]) == 0


def test_a_dry_run_describes_and_writes_nothing(run, tmp_path, capsys):
    assert run("--dry-run") == 0

    assert capsys.readouterr().out.count("\n") == 3
    assert not (tmp_path / "models").exists()


def test_on_a_terminal_progress_is_shown(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    assert run() == 0

    assert capsys.readouterr().err == "\rads: 100%\n\rusers: 100%\n"


def test_logits_are_made_probabilities(run, sketch, network, capsys):
    sketch.write(network, sigmoid=False)

    assert run("--dry-run") == 1
    assert "are not probabilities; if they are logits, use --logits" in capsys.readouterr().err
    assert run("--logits") == 0


def test_outputs_get_their_kinds_and_are_verified_by_name(run, sketch, network, tmp_path, capsys):
    sketch.write(network, outputs=["answer", "logits"])
    assert run("--dry-run") == 1
    assert "'logits': answers such as [" in capsys.readouterr().err
    assert run("--output=logits=score", "--output=answer=probability") == 0
    assert "answers logits [B, 1] (score), answer [B, 1] (probability)" in capsys.readouterr().out
    keys, dense = np.array([[1, 2, 3], [4, 5, 6]]), np.ones((2, 3), np.float32)
    with hotrow.load_model(tmp_path / "models" / "ctr") as session:
        answers = session.predict(dense, keys)

    np.savez(tmp_path / "right.npz", DES=dense, CATCOLUMN=keys, **answers)
    assert run("--output=logits=score", "--output=answer=probability", f"--verify={tmp_path / 'right.npz'}") == 0
    np.savez(tmp_path / "wrong.npz", DES=dense, CATCOLUMN=keys, logits=answers["logits"] + 1, answer=answers["answer"])
    assert run("--output=logits=score", "--output=answer=probability", f"--verify={tmp_path / 'wrong.npz'}") == 1
    assert "a difference of" in capsys.readouterr().err
    assert run("--output=logits=score", "--output=answer=omit", f"--verify={tmp_path / 'right.npz'}") == 1
    assert "expected the arrays DES, CATCOLUMN, ROWINDEX and logits, found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (
            ["--output=answer=click"],
            2,
            "expected NAME=probability, NAME=score, NAME=vector or NAME=omit, got 'answer=click'",
        ),
        (["--output=score"], 2, "expected NAME=probability, NAME=score, NAME=vector or NAME=omit, got 'score'"),
        (["--output=answer=score", "--output=answer=score"], 1, "--output: answer: given twice"),
        (["--output=answers=score"], 1, "it has no output 'answers'; did you mean 'answer'?"),
        (["--output=answer=score", "--logits"], 1, "none of its outputs is a probability; remove --logits"),
    ],
)
def test_wrong_outputs_are_refused(run, capsys, options, code, reason):
    try:
        ended = run(*options)
    except SystemExit as end:
        ended = end.code

    assert ended == code
    assert reason in capsys.readouterr().err


def test_features_are_written_with_the_model_and_answer_raw_requests(run, tmp_path, capsys):
    definition = tmp_path / "features.json"
    features = [
        {"name": "shown", "slot": "ads[0]", "kind": "hash", "buckets": 10},
        {"name": "clicked", "slot": "ads[1]", "kind": "hash", "buckets": 10, "shares": "shown", "list": {}},
        {"name": "users", "kind": "vocabulary", "values": ["a", "b"]},
        *({"name": f"price{place}", "kind": "dense", "missing": place} for place in range(3)),
    ]
    definition.write_text(json.dumps({"format": 1, "features": features}))

    assert run(f"--features={definition}") == 0

    assert "raw features: shown, clicked, users, price0, price1, price2" in capsys.readouterr().out
    assert '"clicked.offsets"' in (tmp_path / "models" / "ctr" / "config.pbtxt").read_text()
    with hotrow.load_model(tmp_path / "models" / "ctr") as session:
        raw = {"shown": ["a", ""], "clicked": [["a", "Hello"], []], "users": ["b", "c"], "price1": [4, None]}
        batch = session.read(raw)
        a, hello = 12917804110809363939 % 10, 15404698994557526151 % 10  # of TensorFlow
        assert [table.keys.tolist() for table in batch.tables] == [[a, a, hello], [2, 0]]
        assert batch.dense.tolist() == [[0, 4, 2], [0, 1, 2]]
        assert session.predict(raw).shape == (2, 1)


def test_keys_by_table_and_place_need_no_features(run, tmp_path):
    assert run() == 0
    with hotrow.load_model(tmp_path / "models" / "ctr") as session:
        by_name = {
            "ads[0]": [1, 2],
            "ads[1]": [3, 4],
            "users": [5, 6],
            **{f"dense[{place}]": [0, 1] for place in range(3)},
        }
        answer = session.predict([[0] * 3, [1] * 3], [[1, 3, 5], [2, 4, 6]])
        assert session.predict(by_name).tobytes() == answer.tobytes()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            [{"name": "shown", "kind": "hash"}],
            "features[0].name: the model has no slot 'shown'; it has ads[0], ads[1], users",
        ),
        ([{"name": "user", "kind": "hash"}], "features[0].name: the model has no slot 'user'; did you mean 'users'?"),
        ([{"name": "users", "kind": "hsh"}], "features[0].kind: "),
    ],
)
def test_features_that_do_not_fit_are_refused_before_anything_is_written(run, tmp_path, capsys, features, message):
    (tmp_path / "features.json").write_text(json.dumps({"format": 1, "features": features}))

    assert run(f"--features={tmp_path / 'features.json'}") == 1

    assert message in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_tables_are_found_in_the_checkpoint_by_name(network, tmp_path, capsys):
    for name, rows in (("ads", 30), ("users", 20)):
        (tmp_path / "tables" / name).mkdir(parents=True)
        np.arange(rows).tofile(tmp_path / "tables" / name / "key")
        np.ones((rows, 4), np.float32).tofile(tmp_path / "tables" / name / "emb_vector")

    options = f"--network {network} --checkpoint {tmp_path / 'tables'} --combiner sum --name ctr"
    assert main(["import", *options.split(), "--repository", str(tmp_path / "models")]) == 0

    assert "20 rows of 4" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["import", "dry run"])
class TestWhereNoVersionCanBe:
    """The error comes before a network or a table is read: here they are missing."""

    @pytest.fixture
    def refusal(self, run, network, tables, capsys):
        def refusal(*more):
            for path in (network, *tables.values()):
                path.unlink()
            assert run(*more) == 1
            captured = capsys.readouterr()
            assert captured.out == ""
            return captured.err

        return refusal

    def test_a_version_that_exists_is_refused(self, run, refusal, capsys, more):
        assert run("--version=1") == 0
        capsys.readouterr()

        assert "1: this version exists, and a version is never changed" in refusal("--version=1", *more)

    def test_a_name_that_no_server_takes_is_refused(self, refusal, more):
        assert "expected 1 to 120 letters" in refusal("--name=a b", *more)

    def test_a_repository_that_is_a_file_is_refused(self, refusal, tmp_path, more):
        (tmp_path / "models").write_text("")

        assert refusal(*more) == f"hotrow import: {tmp_path / 'models'}: expected a folder, found a file\n"

    def test_a_model_that_is_a_file_is_refused(self, refusal, tmp_path, more):
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "ctr").write_text("")

        assert refusal(*more) == f"hotrow import: {tmp_path / 'models' / 'ctr'}: expected a folder, found a file\n"

    def test_tiers_that_are_not_json_are_refused(self, refusal, tmp_path, more):
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "ps.json").write_text("{")

        assert "ps.json: " in refusal(*more)

    def test_a_folder_that_cannot_be_written_is_refused(self, refusal, tmp_path, monkeypatch, more):
        monkeypatch.setattr("os.access", lambda path, mode: False)  # also if root runs the tests

        assert refusal(*more) == f"hotrow import: {tmp_path}: cannot be written\n"


def test_an_interrupted_import_says_so(run, monkeypatch, capsys):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("serving.importers.plan_import", interrupted)

    assert run() == 130
    assert capsys.readouterr().err == "hotrow import: interrupted\n"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--table=ads=x.npy"], "hotrow import: --table: ads: given twice"),
        (["--combiner=mean"], "hotrow import: --combiner: given twice"),
        (["--combiner=user=mean"], "no table is called 'user'; did you mean 'users'?"),
        (["--name=a b"], "expected 1 to 120 letters"),
        (["--name=a b", "--dry-run"], "expected 1 to 120 letters"),
    ],
)
def test_an_error_is_one_line_and_the_exit_code_1(run, capsys, more, expected):
    assert run(*more) == 1

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hotrow import: ")
    assert expected in line


def test_a_combiner_for_one_table_only_is_refused(run, capsys):
    assert run(combiner="ads=sum") == 1

    assert "expected sum, mean or sqrtn for all tables too" in capsys.readouterr().err


def test_a_version_that_exists_is_left_alone(run, capsys):
    assert run("--version=1") == 0
    assert run("--version=1") == 1

    assert "this version exists, and a version is never changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--network"),
        ("--network n --repository r --name x", "--combiner"),
        ("--table ads", "expected NAME=SOURCE, got 'ads'"),
        ("--table =ads.npy", "expected NAME=SOURCE, got '=ads.npy'"),
        ("--table ads=", "expected NAME=SOURCE, got 'ads='"),
        ("--combiner max", "expected sum, mean, sqrtn or NAME=sum and so on, got 'max'"),
        ("--combiner ads=max", "got 'ads=max'"),
        ("--version 0", "expected a whole number from 1"),
        ("--max-batchsize 0", "expected a whole number from 1"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_reports_what_was_expected(capsys, arguments, expected):
    with pytest.raises(SystemExit) as stopped:
        main(["import", *arguments.split()])

    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (
            '{"type": "hash_map", "capacity_rows": 40}',
            ".ads': the model file has 30 rows, but there is room for 23",
        ),
        ('{"type": "hash_map", "capacity_row": 40}', "ps.json: volatile_db.capacity_row"),
    ],
)
def test_tiers_that_prevent_serving_are_reported(run, tmp_path, capsys, tier, expected):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ps.json").write_text(f'{{"supportlonglong": true, "volatile_db": {tier}}}')

    assert run() == 0

    out, error = capsys.readouterr()
    assert "hotrow import: warning: hotrow serve will refuse it: " in error
    assert expected in error
    assert "serve it" not in out


def test_a_repository_of_uint32_models_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ps.json").write_text('{"supportlonglong": false}')

    assert run() == 1

    assert "ps.json: supportlonglong: expected true" in capsys.readouterr().err
    assert not (tmp_path / "models" / "ctr").exists()
