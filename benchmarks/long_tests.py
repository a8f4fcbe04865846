"""Run the tests marked ``long`` (`make test-long`) and write down what came of each.

They take minutes: processes killed fifty times, tables of millions of rows. `make test` leaves them out, so the record
beside the benchmarks says when they last ran, on what, and how long each took.
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

from benchmarks.redis_servers import server_binary
from benchmarks.report import hardware, versions


class Recorder:
    """A pytest plugin that keeps the outcome and the seconds of every test, its fixtures included."""

    def __init__(self):
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        """One of the three phases of a test has ended; the first that does not pass decides."""
        new = {"test": report.nodeid, "date": _now(), "outcome": "passed", "seconds": 0.0}
        test = self.tests.setdefault(report.nodeid, new)
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
            if report.skipped:
                test["reason"] = report.longrepr[2]


def redis_server_version():
    """The version of the redis-server that the tests start; nothing where there is none."""
    binary = server_binary()
    if binary is None:
        return {}
    said = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    return {"redis-server": re.search(r"v=(\S+)", said)[1]}


def record_of(tests):
    """What is written down: the outcomes, by test, and what they ran on."""
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--again", action="store_true", help="tests that do not run now stay in FILE, with their dates")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders (default: tests)")
    options = parser.parse_args(arguments)
    if options.again and options.json is None:
        parser.error("--again needs --json")
    before = json.loads(options.json.read_text())["tests"] if options.again else []
    recorder = Recorder()
    code = pytest.main(["-m", "long", *options.tests], plugins=[recorder])
    if options.json is not None and code in (0, pytest.ExitCode.TESTS_FAILED):  # else they were not all run
        document = record_of({test["test"]: test for test in before} | recorder.tests)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(code)


def _now():
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
