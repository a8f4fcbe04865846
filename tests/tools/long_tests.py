"""Run the tests marked ``long`` (`make test-long`) and record their outcomes.

They take minutes: processes killed fifty times, tables of millions of rows. `make test` skips them. The record says
when they last ran, on which machine, and how long each test took.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.report import hardware, versions
from tests.tools.redis_servers import server_binary


class Recorder:
    """A pytest plugin that keeps the outcome and the seconds of every test, including its fixtures."""

    def __init__(self):
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        """Add one of the three phases of a test; the first phase that does not pass decides."""
        new = {"test": report.nodeid, "date": _now(), "outcome": "passed", "seconds": 0.0}
        test = self.tests.setdefault(report.nodeid, new)
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.user_properties:
            test["figures"] = dict(report.user_properties)
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
            if report.skipped:
                test["reason"] = report.longrepr[2]


def redis_server_version():
    """The version of the redis-server of the tests; empty if there is none."""
    binary = server_binary()
    if binary is None:
        return {}
    done = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    return {"redis-server": re.search(r"v=(\S+)", done)[1]}


def record_of(tests):
    """The record: outcomes by test, machine and versions."""
    return {
        "date": _now(),
        "hardware": hardware(),
        "versions": versions() | redis_server_version(),
        "outcomes": Counter(test["outcome"] for test in tests.values()),
        "seconds": round(sum(test["seconds"] for test in tests.values())),
        "tests": sorted(tests.values(), key=lambda test: test["test"]),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--again", action="store_true", help="keep the records in FILE of tests that do not run now")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders (default: tests)")
    options = parser.parse_args(arguments)
    if options.again and options.json is None:
        parser.error("--again needs --json")
    before = json.loads(options.json.read_text())["tests"] if options.again else []
    recorder = Recorder()
    code = pytest.main(["-m", "long", *options.tests], plugins=[recorder])
    if options.json is not None and code in (
        0,
        pytest.ExitCode.TESTS_FAILED,
    ):  # else some tests have not run
        document = record_of({test["test"]: test for test in before} | recorder.tests)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(code)


def _now():
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
