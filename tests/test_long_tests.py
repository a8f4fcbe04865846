"""`make test-long` writes down what came of each long test."""

import json
import subprocess
import sys

import pytest

TESTS = """
import pytest

@pytest.mark.long
def test_good():
    pass

@pytest.mark.long
def test_bad():
    assert 1 == 2

@pytest.mark.long
def test_left_out():
    pytest.skip("no such machine")

def test_short():
    raise RuntimeError("is not run")
"""


def run(tmp_path, tests, *options):
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: takes minutes\n")
    command = [
        sys.executable,
        "-m",
        "benchmarks.long_tests",
        "--json",
        tmp_path / "out.json",
        *options,
        tmp_path / "test_it.py",
    ]
    code = subprocess.run(command, check=False, capture_output=True).returncode
    return code, json.loads((tmp_path / "out.json").read_text()) if (tmp_path / "out.json").exists() else None


def test_the_record_has_the_outcome_and_the_time_of_each_long_test_and_of_no_other(tmp_path):
    code, record = run(tmp_path, TESTS)

    assert code == 1
    outcomes = {test["test"].partition("::")[2]: test["outcome"] for test in record["tests"]}
    assert outcomes == {"test_good": "passed", "test_bad": "failed", "test_left_out": "skipped"}
    assert record["outcomes"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert record["seconds"] == round(sum(test["seconds"] for test in record["tests"]))
    assert all(test["seconds"] >= 0 for test in record["tests"])
    assert [test.get("reason", "") for test in record["tests"]] == ["", "", "Skipped: no such machine"]
    assert {"python", "numpy"} <= record["versions"].keys()
    assert record["date"].startswith("20")


@pytest.mark.parametrize("tests", ["no python", "def test_short():\n    pass\n"], ids=["no python", "no long test"])
def test_tests_that_were_not_run_leave_no_record(tmp_path, tests):
    code, record = run(tmp_path, tests)

    assert code != 0
    assert record is None


def test_a_test_that_runs_again_takes_the_place_of_its_record_and_the_others_keep_theirs(tmp_path):
    _, first = run(tmp_path, TESTS)

    code, record = run(tmp_path, "import pytest\n\n@pytest.mark.long\ndef test_bad():\n    pass\n", "--again")

    assert code == 0
    assert record["outcomes"] == {"passed": 2, "skipped": 1}
    others = [[test for test in one["tests"] if "test_bad" not in test["test"]] for one in (first, record)]
    assert others[0] == others[1]


def test_again_without_a_record_is_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.long_tests", "--again", tmp_path]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 2
    assert "--again needs --json" in done.stderr
