"""`hotrow import --verify`: the imported model's answers next to the right ones."""

import numpy as np
import pytest

from serving.cli.main import main
from serving.errors import ModelFileError
from serving.importers import plan_import, read_expected_answers, write_model

DENSE = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
# two slots of ads, then one of users; -1 is an empty slot
KEYS = np.array([[1, 29, 3], [5, -1, 4], [0, 7, 19]])


@pytest.fixture
def expected(sketch, tables):
    """The right answers to DENSE and KEYS, each slot with one key or none."""
    ads, users = (np.concatenate([np.load(tables[name]), np.zeros((1, 4))]) for name in ("ads", "users"))
    return sketch.probabilities(DENSE, ads[KEYS[:, :2]], users[KEYS[:, 2]])


@pytest.fixture
def verify(network, tables, tmp_path, expected):
    """Write samples, of which some arrays may be changed or left out (None), and import with them."""

    def verify(*more, **changes):
        arrays = {"DES": DENSE, "CATCOLUMN": KEYS, "OUTPUT0": expected, **changes}
        np.savez(tmp_path / "samples.npz", **{name: array for name, array in arrays.items() if array is not None})
        given = [f"--table={name}={path}" for name, path in tables.items()]
        own = f"--network={network} --repository={tmp_path / 'models'} --name=ctr --combiner=sum"
        return main(["import", *own.split(), *given, f"--verify={tmp_path / 'samples.npz'}", *more])

    return verify


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "models").glob("ctr/[!.]*"))


FLAT = KEYS[KEYS >= 0]


@pytest.mark.parametrize(
    "keys",
    [
        {"CATCOLUMN": KEYS},
        {"CATCOLUMN": KEYS[:, :, None]},
        {"CATCOLUMN": np.stack([KEYS, np.full_like(KEYS, -1)], axis=2)},
        {"CATCOLUMN": FLAT, "ROWINDEX": np.array([0, 1, 2, 3, 4, 4, 5, 6, 7, 8])},
        {"CATCOLUMN": FLAT[None], "ROWINDEX": np.array([0, 1, 2, 3, 3, 4, 5, 0, 1, 2, 3])},
    ],
    ids=["[B, S]", "[B, S, 1]", "[B, S, 2]", "one CSR", "a CSR per table"],
)
def test_right_answers_pass_and_the_largest_difference_is_printed(verify, tmp_path, capsys, keys):
    assert verify(**keys) == 0

    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith("verified")]
    assert line.startswith("verified with 3 samples: largest difference ")
    assert line.endswith(", tolerance 1e-05")
    assert 0 < float(line.split("difference ")[1].split(",")[0]) < 1e-6
    assert "1" in versions(tmp_path)


def test_answers_may_have_one_dimension(verify, expected):
    assert verify(OUTPUT0=expected[:, 0]) == 0


def test_more_samples_than_a_request_may_have_are_compared(verify):
    assert verify("--max-batchsize=2") == 0


def test_a_wrong_answer_is_named_and_no_version_is_left(verify, expected, tmp_path, capsys):
    wrong = expected.copy()
    wrong[1] = 0.25

    assert verify(OUTPUT0=wrong) == 1

    error = capsys.readouterr().err
    assert "samples.npz: sample 1: expected [0.25], got [" in error
    assert f"got [{expected[1, 0]:.5f}"[:-1] in error
    assert "samples that differ by more than 1e-05: 1 of 3; keys in no table: 0" in error
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_verification_leaves_the_versions_that_are_there(verify, expected, tmp_path):
    assert verify() == 0
    before = versions(tmp_path)

    assert verify(OUTPUT0=expected + 0.25) == 1

    assert versions(tmp_path) == before


def test_a_wrong_answer_within_the_tolerance_passes(verify, expected, capsys):
    assert verify("--verify-tolerance=0.02", OUTPUT0=expected + 0.01) == 0

    assert "largest difference 0.01, tolerance 0.02" in capsys.readouterr().out


def test_an_expected_answer_that_is_nan_is_wrong(verify, expected, capsys):
    assert verify("--verify-tolerance=1", OUTPUT0=np.where(np.arange(3)[:, None] == 2, np.nan, expected)) == 1

    assert "sample 2: expected [nan]" in capsys.readouterr().err


def test_keys_that_no_table_has_are_counted(verify, sketch, capsys):
    answers = sketch.probabilities(DENSE, np.zeros((3, 2, 4)), np.zeros((3, 4)))

    assert verify(CATCOLUMN=np.full((3, 3), 1_000_000), OUTPUT0=answers) == 0

    assert "tolerance 1e-05; keys in no table: 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"OUTPUT0": None}, "missing: OUTPUT0; expected the arrays DES, CATCOLUMN, ROWINDEX and OUTPUT0, found DES, "),
        ({"OUTPUT0": None, "CATCOLUMN": None}, "missing: CATCOLUMN, OUTPUT0; expected"),
        ({"DES": None}, "missing: DES, [B, 3]"),
        ({"ROWINDX": np.array([0])}, "expected the arrays DES, CATCOLUMN, ROWINDEX and OUTPUT0, found DES, CATCOLUMN"),
        ({"CATCOLUMN": KEYS[:, :2]}, "CATCOLUMN: expected [B, 3] or [B, 3, nnz] as there is no ROWINDEX, got [3, 2]"),
        ({"CATCOLUMN": FLAT}, "CATCOLUMN: expected [B, 3] or [B, 3, nnz] as there is no ROWINDEX, got [8]"),
        ({"CATCOLUMN": KEYS[:0]}, "ROWINDEX: the request has no sample"),
        ({"CATCOLUMN": KEYS[:, :, None][:, :, :0], "DES": DENSE[:2]}, "DES: expected 3 samples of 3 features"),
        ({"CATCOLUMN": KEYS * 0.5}, "CATCOLUMN: expected"),
        ({"OUTPUT0": np.ones((3, 2))}, "OUTPUT0: expected numbers [3, 1], got float64 [3, 2]"),
        ({"OUTPUT0": np.array(["a"] * 3)}, "OUTPUT0: expected numbers [3, 1], got <U1 [3]"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_named(verify, tmp_path, capsys, changes, message):
    assert verify(**changes) == 1

    assert f"samples.npz: {message}" in capsys.readouterr().err
    assert versions(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_a_file_that_cannot_be_read_is_refused_before_the_network_is_opened(verify, network, tmp_path, capsys, content):
    assert verify("--version=1") == 0
    (tmp_path / "other.npz").unlink(missing_ok=True)
    if content is not None:
        (tmp_path / "other.npz").write_bytes(content)
    network.unlink()

    assert verify(f"--verify={tmp_path / 'other.npz'}") == 1

    assert "other.npz: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify-tolerance=0.1"], "--verify-tolerance: has no effect without --verify"),
        (["--verify=x.npz", "--dry-run"], "--verify: cannot be used with --dry-run, which writes no model to verify"),
    ],
)
def test_options_without_effect_are_refused(capsys, options, message):
    assert main(["import", "--network=n", "--combiner=sum", "--repository=r", "--name=x", *options]) == 1

    assert capsys.readouterr().err == f"hotrow import: {message}\n"


def test_the_python_calls_do_the_same(network, tables, tmp_path, expected):
    np.savez(tmp_path / "samples.npz", DES=DENSE, CATCOLUMN=KEYS, OUTPUT0=expected + 0.1)
    answers = read_expected_answers(tmp_path / "samples.npz")
    plan = plan_import(network, "sum", tables)
    found = []

    write_model(
        plan, tmp_path / "models", "ctr", check=lambda folder: found.append(answers.compare(folder, "ctr", 0.2))
    )

    assert (found[0].samples, found[0].defaulted_keys) == (3, 0)
    assert found[0].difference == pytest.approx(0.1, abs=1e-6)
    with pytest.raises(ModelFileError, match="sample 2: expected"):
        write_model(plan, tmp_path / "models", "ctr", check=lambda folder: answers.compare(folder, "ctr", 0.01))
    assert "1" in versions(tmp_path)
    assert "2" not in versions(tmp_path)
