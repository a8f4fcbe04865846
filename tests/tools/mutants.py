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

``--drawn N`` tries N faults of ``tests.tools.drawn_faults`` instead. After the tests of its file, such a fault runs all
tests of the kernels and of the GPU cache. A fault that nobody can notice is listed with the reason in
tests/kernels/cuda/unnoticeable_faults.toml. Such a fault does not count, nor does one that the compiler refuses.
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
from tests.tools.drawn_faults import PLAIN_ATOMICS, draw

ROOT = Path(__file__).parent.parent.parent
CUDA, GPU_CACHE = Path("kernels/cuda"), Path("gpu_cache")
FAULTS = ROOT / "tests/kernels/cuda/faults"
UNNOTICEABLE = FAULTS.parent / "unnoticeable_faults.toml"
ALL_TESTS = ("tests/kernels/cuda", "tests/gpu_cache")
LEAST_SCORE, LEAST_DRAWN_SCORE = 0.8, 0.9
LEAST_LIMIT_S = 120
LIMIT_RATIO = 5  # times the duration of the tests of all files without a fault, for a busier machine
RUN_TESTS = """
import pathlib, sys, pytest, kernels.source
from importlib.machinery import PathFinder

class ShortSearch:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", max_examples=20, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

class Faulty:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "gpu_cache":
            return PathFinder.find_spec(name, path or [sys.argv[1]])

sys.meta_path.insert(0, Faulty)
kernels.source.CUDA_DIRECTORY = pathlib.Path(sys.argv[1]) / "kernels/cuda"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", *sys.argv[2:]], [ShortSearch()]))
"""
MARKS = dict.fromkeys(("race check", "memory check"), "not gpu and not long and not slow")
SANITIZERS = {  # libraries to preload, and their options
    "race check": (
        ("tsan",),
        {"TSAN_OPTIONS": f"exitcode=66 halt_on_error=1 suppressions={FAULTS.parent}/race_check.supp"},
    ),
    "memory check": (("asan", "ubsan"), {"ASAN_OPTIONS": "detect_leaks=0"}),
}
COMPILER = "compiler"
RACES = ("barrier", "atomic")  # operators whose faults are races
SCHEDULES = {  # in the order of the attempts
    "race check": {"HOTROW_RUNNER_SEED": "1", "HOTROW_RUNNER_THREADS": "2", "HOTROW_RUNNER_SANITIZER": "thread"},
    "fixed order": {"HOTROW_RUNNER_SEED": "0"},
    "drawn order": {"HOTROW_RUNNER_SEED": "3", "HOTROW_RUNNER_THREADS": "2"},
    "late streams": {"HOTROW_RUNNER_SEED": "4", "HOTROW_RUNNER_DELAY_MS": "10"},  # for drawn faults of launches
    "memory check": {"HOTROW_RUNNER_SEED": "0", "HOTROW_RUNNER_SANITIZER": "address"},  # for other drawn faults
}


@dataclass(frozen=True)
class Fault:
    """One edit of one source, at the place ``at`` or at the only place of ``old``."""

    file: str  # below kernels/cuda, or of gpu_cache
    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    race_tests: tuple[str, ...]  # empty unless it is a race
    at: int | None = None

    def tests_of(self, schedule):
        """Return the tests for a schedule."""
        is_launch = self.file.endswith(".py")
        if schedule in ("late streams", "memory check"):
            return self.tests if self.at is not None and is_launch == (schedule == "late streams") else ()
        return self.race_tests if schedule == "race check" else self.tests

    def plant(self, directory):
        """Edit the source in a copy of the sources."""
        path = directory / (GPU_CACHE if self.file.endswith(".py") else CUDA) / self.file
        text = path.read_text(encoding="utf-8")
        if self.at is None and text.count(self.old) != 1:
            raise ValueError(
                f"{self.file}: {self.name}: {self.old!r} occurs {text.count(self.old)} times, expected once"
            )
        at = text.index(self.old) if self.at is None else self.at
        path.write_text(text[:at] + self.new + text[at + len(self.old) :], encoding="utf-8")
        if self.new == "plain":
            types = directory / CUDA / "types.cuh"
            types.write_text(types.read_text(encoding="utf-8") + PLAIN_ATOMICS, encoding="utf-8")


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


def drawn_faults(count, seed):
    """Return faults that were drawn, each with the tests of its file and then all tests."""
    by_file = {}
    for path in FAULTS.glob("*.toml"):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        by_file[document["file"]] = document
    faults = []
    for path, operator, at, old, new in draw(ROOT, count, seed):
        text = (ROOT / path).read_text(encoding="utf-8")
        line = text.splitlines()[text[:at].count("\n")].strip()
        document = by_file.get(path.name, {"tests": ()})
        tests = (*document["tests"], *ALL_TESTS)
        races = tuple(document.get("race_tests", document["tests"])) or ALL_TESTS
        name = f"{operator} at {at}: {line[:100]}"
        faults.append(Fault(path.name, name, old, new, tests, races if operator in RACES else (), at))
    return faults


def unnoticeable_reason(record):
    """Return why no test can notice a drawn fault; None if tests should."""
    document = tomllib.loads(UNNOTICEABLE.read_text(encoding="utf-8"))
    for fault in document["faults"]:
        operator, _, line = record["fault"].partition(" at ")
        if (fault["file"], fault["operator"]) == (record["file"], operator) and line.endswith(fault["line"]):
            return fault["reason"]
    return None


def run_tests(directory, tests, schedule, limit_s=None):
    """Run tests with the sources of a directory; return pytest's status, None after the limit, and its output."""
    environment = os.environ | SCHEDULES[schedule]
    libraries, options = SANITIZERS.get(schedule, ((), {}))
    if libraries:
        names = [f"-print-file-name=lib{library}.so" for library in libraries]
        found = [
            subprocess.run(["g++", name], capture_output=True, text=True, check=True).stdout.strip() for name in names
        ]
        environment |= {"LD_PRELOAD": " ".join(found), **options}
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
        if fault.at is not None and "does not compile" in output:
            return COMPILER, "it does not compile"
        if fault.at is None and ("does not compile" in output or status in (2, 3, 4, 5)):  # the tests could not run
            raise ValueError(f"{fault.file}: {fault.name}: the tests could not run:\n{output[-2000:]}")
        if status != 0:
            words = ("FAILED ", "ERROR ", "SUMMARY: ")
            failures = [line for line in output.splitlines() if line.startswith(words)]
            return schedule, failures[-1][:160] if failures else f"status {status}"
    return None


def copy_sources(directory):
    """Copy the sources in which faults are planted."""
    for folder in (CUDA, GPU_CACHE):
        shutil.copytree(ROOT / folder, directory / folder, ignore=shutil.ignore_patterns("__pycache__"))


def try_fault(fault, limits_s):
    """Plant one fault in a copy of the sources and run its tests."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        copy_sources(directory)
        fault.plant(directory)
        return caught_by(fault, directory, limits_s)


def check_without_faults(faults):
    """Run the tests on the unchanged sources, one schedule per core at a time, and return each schedule's limit."""
    tests = {one: sorted({test for fault in faults for test in fault.tests_of(one)}) for one in SCHEDULES}

    def limit_s(schedule):
        began_s = time.monotonic()
        status, output = run_tests(ROOT, tests[schedule], schedule)
        if status != 0:
            raise ValueError(f"the tests fail without a fault ({schedule}):\n{output[-3000:]}")
        return round(max(LEAST_LIMIT_S, LIMIT_RATIO * (time.monotonic() - began_s)))

    schedules = [schedule for schedule in SCHEDULES if tests[schedule]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(schedules, pool.map(limit_s, schedules), strict=True))


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
    parser.add_argument("--drawn", type=int, metavar="N", help="try N drawn faults instead of the hand-picked faults")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args(arguments)
    faults, target = read_faults(), LEAST_SCORE
    if options.drawn:
        faults, target = drawn_faults(options.drawn, options.seed), LEAST_DRAWN_SCORE
    tried = [fault for fault in faults if options.only is None or fault.file in options.only]
    records, errors = try_faults(tried, check_without_faults(tried))
    for error in errors:
        print(error, file=sys.stderr)
    if options.json and options.only is not None and options.json.exists():
        records += earlier_records(options.json, faults, tried)
    for record in records:
        record["unnoticeable"] = None if record["caught_by"] else unnoticeable_reason(record)
    counted = [record for record in records if record["caught_by"] != COMPILER and not record["unnoticeable"]]
    score = sum(record["caught_by"] is not None for record in counted) / max(len(counted), 1)
    print(f"{len(counted)} faults, score {score:.2f}, target {target}")
    if options.json:
        document = {"hardware": hardware(), "versions": versions(), "score": round(score, 3)}
        document["faults"] = sorted(records, key=lambda record: (record["file"], record["fault"]))
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(errors) or score < target)


if __name__ == "__main__":
    sys.exit(main())
