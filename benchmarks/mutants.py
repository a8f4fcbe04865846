"""Plant faults in the kernels, one at a time, and check that the tests fail (`make mutants`).

Each file of tests/kernels/cuda/faults names edits of one source in kernels/cuda::

    file = "query.cu"
    tests = ["tests/kernels/cuda/test_query.py"]
    race_tests = [...]                 # optional: other tests for the race check, which is slow

    [[faults]]
    name = "a miss is listed one place too far"
    old = "1u << lane_id()"            # occurs exactly once in the file
    new = "2u << lane_id()"
    race = true                        # optional: a race; the race check runs first

A fault is caught if a test fails with the fixed order of threads, with a random order or, for a race, under
ThreadSanitizer. A fault is also caught if the tests take far longer than without it. Each fault runs only the tests of
its file, until the first failure; hypothesis does not shrink examples. The score is the share of caught faults.
A fault that no longer applies or does not compile is an error.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report import hardware, versions
from kernels.source import CUDA_DIRECTORY

FAULTS = Path(__file__).parent.parent / "tests/kernels/cuda/faults"
LEAST_SCORE = 0.8
LEAST_LIMIT_S = 120
LIMIT_RATIO = 5  # times the duration of the tests of all files without a fault, for a busier machine
RUN_TESTS = """
import pathlib, sys, pytest, kernels.source

class ShortSearch:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", max_examples=20, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

kernels.source.CUDA_DIRECTORY = pathlib.Path(sys.argv[1])
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", *sys.argv[2:]], [ShortSearch()]))
"""
MARKS = {"race check": "not gpu and not long and not slow"}
SCHEDULES = {  # in the order of the attempts
    "race check": {"HOTROW_RUNNER_SEED": "1", "HOTROW_RUNNER_THREADS": "2", "HOTROW_RUNNER_SANITIZER": "thread"},
    "fixed order": {"HOTROW_RUNNER_SEED": "0"},
    "drawn order": {"HOTROW_RUNNER_SEED": "3", "HOTROW_RUNNER_THREADS": "2"},
}


@dataclass(frozen=True)
class Fault:
    """One edit of one source."""

    file: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    race_tests: tuple[str, ...]  # empty unless it is a race

    def tests_of(self, schedule):
        """Return the tests for a schedule."""
        return self.race_tests if schedule == "race check" else self.tests

    def plant(self, directory):
        """Edit the source in a copy of kernels/cuda."""
        path = directory / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file}: {self.name}: {self.old!r} occurs {text.count(self.old)} times, expected once"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def read_faults(directory=FAULTS):
    """Return all faults, in the order of the files."""
    faults = []
    for path in sorted(directory.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        for fault in document["faults"]:
            faults.append(
                Fault(
                    document["file"],
                    fault["name"],
                    fault["old"],
                    fault["new"],
                    tuple(document["tests"]),
                    tuple(document.get("race_tests", document["tests"]) if fault.get("race") else ()),
                )
            )
    return faults


def run_tests(directory, tests, schedule, limit_s=None):
    """Run tests with the sources of a directory; return pytest's status, None after the limit, and its output."""
    environment = os.environ | SCHEDULES[schedule]
    if schedule == "race check":
        found = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
        environment |= {
            "LD_PRELOAD": found.stdout.strip(),
            "TSAN_OPTIONS": f"exitcode=66 halt_on_error=1 suppressions={FAULTS.parent}/race_check.supp",
        }
    marks = MARKS.get(schedule, "not gpu and not long")
    command = [sys.executable, "-c", RUN_TESTS, str(directory), marks, *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def caught_by(fault, directory, limits_s):
    """Return the schedule and the test or sanitizer summary that catch a planted fault, or None."""
    for schedule in filter(fault.tests_of, SCHEDULES):
        status, output = run_tests(directory, fault.tests_of(schedule), schedule, limits_s[schedule])
        if status is None:  # a fault may make a kernel loop forever
            return schedule, f"does not end in {limits_s[schedule]} s"
        if "does not compile" in output or status in (2, 3, 4, 5):  # pytest could not run the tests
            raise ValueError(f"{fault.file}: {fault.name}: the tests could not run:\n{output[-2000:]}")
        if status != 0:
            words = ("FAILED ", "ERROR ", "SUMMARY: ")
            failures = [line for line in output.splitlines() if line.startswith(words)]
            return schedule, failures[-1][:160] if failures else f"status {status}"
    return None


def try_fault(fault, limits_s):
    """Plant one fault in a copy of the sources and run its tests."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "cuda"
        shutil.copytree(CUDA_DIRECTORY, directory)
        fault.plant(directory)
        return caught_by(fault, directory, limits_s)


def check_without_faults(faults):
    """Run the tests on the unchanged sources and return the time limit of each schedule."""
    limits_s = {}
    for schedule in SCHEDULES:
        tests = sorted({test for fault in faults for test in fault.tests_of(schedule)})
        if tests:
            began_s = time.monotonic()
            status, output = run_tests(CUDA_DIRECTORY, tests, schedule)
            if status != 0:
                raise ValueError(f"the tests fail without a fault ({schedule}):\n{output[-3000:]}")
            limits_s[schedule] = round(max(LEAST_LIMIT_S, LIMIT_RATIO * (time.monotonic() - began_s)))
    return limits_s


def record_of(fault, limits_s):
    """Try a fault and return its record."""
    found = try_fault(fault, limits_s)
    print(
        f"{'caught' if found else 'SURVIVED':8} {fault.file}: {fault.name}{f' ({found[0]})' if found else ''}",
        flush=True,
    )
    return {
        "file": fault.file,
        "fault": fault.name,
        "caught_by": found and found[0],
        "told": found and found[1],
        "date": datetime.now(UTC).date().isoformat(),
    }


def try_faults(faults, limits_s):
    """Try all faults, one per core at a time.

    Returns:
        the records, and the errors of faults that could not be tried.
    """
    records, errors = [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for tried in as_completed(pool.submit(record_of, fault, limits_s) for fault in faults):
            try:
                records.append(tried.result())
            except ValueError as err:
                errors.append(str(err))
    return records, errors


def earlier_records(path, faults, tried):
    """Return the records in ``path`` of the faults that were not tried now."""
    records = json.loads(path.read_text(encoding="utf-8"))["faults"]
    known = {(record["file"], record["fault"]): record for record in records}
    names = [(fault.file, fault.name) for fault in faults if fault not in tried]
    return [known[name] for name in names if name in known]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument(
        "--only", nargs="*", metavar="FILE", help="try only the faults of these sources and keep the other records"
    )
    options = parser.parse_args(arguments)
    faults = read_faults()
    tried = [fault for fault in faults if options.only is None or fault.file in options.only]
    records, errors = try_faults(tried, check_without_faults(tried))
    for error in errors:
        print(error, file=sys.stderr)
    if options.json and options.only is not None and options.json.exists():
        records += earlier_records(options.json, faults, tried)
    score = sum(record["caught_by"] is not None for record in records) / max(len(records), 1)
    print(f"{len(records)} faults, score {score:.2f}, target {LEAST_SCORE}")
    if options.json:
        document = {"hardware": hardware(), "versions": versions(), "score": round(score, 3)}
        document["faults"] = sorted(records, key=lambda record: (record["file"], record["fault"]))
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(errors) or score < LEAST_SCORE)


if __name__ == "__main__":
    sys.exit(main())
