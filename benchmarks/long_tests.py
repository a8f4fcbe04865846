"""Run the tests marked ``long`` (`make test-long`) and write down what came of each.

They take minutes: processes killed fifty times, tables of millions of rows. `make test` leaves them out, so the record
beside the benchmarks says when they last ran, on what, and how long each took.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.report import hardware, versions


class Recorder:
    """A pytest plugin that keeps the outcome and the seconds of every test, its fixtures included."""

    def __init__(self):
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        """One of the three phases of a test has ended; the first that does not pass decides."""
        test = self.tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
            if report.skipped:
                test["reason"] = report.longrepr[2]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders (default: tests)")
    options = parser.parse_args(arguments)
    recorder = Recorder()
    began = datetime.now(UTC)
    code = pytest.main(["-m", "long", *options.tests], plugins=[recorder])
    if options.json is not None and code in (0, pytest.ExitCode.TESTS_FAILED):  # else they were not all run
        document = {
            "date": began.isoformat(timespec="seconds"),
            "hardware": hardware(),
            "versions": versions(),
            "tests": sorted(recorder.tests.values(), key=lambda test: test["test"]),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
