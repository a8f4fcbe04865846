"""Hostile files and arguments for the commands of ``hotrow``. Each command runs in a fork of this process."""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from serving.cli.entry import run
from serving.cli.main import main
from serving.config import read_ps_config
from serving.dumps import dump_table
from serving.parameter_server import ParameterServer
from tests.proof.decoders import FOLDER, LOOKUP_PS, MODEL, PBTXT, SAMPLES
from tests.proof.mutations import change_bytes, change_json

DEADLINE_S = 60
MOST_BYTES = 8 << 30
MIB = 1 << 20
COMMANDS = (
    ("check", "models"),
    ("check", "--full", "models"),
    ("check", "models/tiny"),
    ("check", "models/tiny/1/graph.json"),
    ("check", "lookup/ps.json"),
    ("plan", "models", "trace.jsonl"),
    ("plan", "lookup/ps.json", "keys.npz"),
    ("dump", "lookup/ps.json", "rows.user", "rows.bin"),
    ("load", "lookup/ps.json", "rows.user", "dump.bin"),
    ("snapshot", "models/tiny/1/user", "user.snapshot"),
    ("export-onnx", "models/tiny/1", "tiny.onnx"),
    ("predict", "tiny", "request.json", "--url", "http://127.0.0.1:9"),
    ("stats", "http://127.0.0.1:9"),
)
WORDS = (
    "",
    "-",
    "--",
    "-1",
    "--full",
    "--model",
    "--sizes",
    "1GiB",
    "a" * 5000,
    "\udcff",
    "é",
    "nan",
    "0",
    "models",
    "/dev/null",
)


def commands(inputs, folder):
    """Run ``inputs`` commands; return the figures.

    A new process runs them: a fork of this one would lack the threads of a RocksDB that another test has opened.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new:
        return new.submit(_commands, inputs, folder).result()


def _commands(inputs, folder):
    return Commands(folder, random.Random(inputs)).run(inputs)


class Commands:
    """Commands and the files that they get."""

    def __init__(self, folder, rng):
        """Write whole files into ``folder``; each command gets a copy of them."""
        self._folder, self._rng = folder, rng
        self._whole = folder / "whole"
        version = MODEL.write(self._whole / "models", "tiny")
        (version.parent / "config.pbtxt").write_bytes(PBTXT)
        (self._whole / "lookup").mkdir()
        document = json.dumps(LOOKUP_PS).replace(str(FOLDER), "..")
        (self._whole / "lookup" / "ps.json").write_text(document, encoding="utf-8")
        (self._whole / "trace.jsonl").write_text(json.dumps(SAMPLES) + "\n", encoding="utf-8")
        (self._whole / "request.json").write_text(json.dumps(SAMPLES), encoding="utf-8")
        np.savez(self._whole / "keys.npz", user=np.arange(9), item=np.arange(30))
        code, log = _in_fork(_fill_database, self._whole, folder / "log")  # RocksDB's threads would not be forked
        assert code == 0, log

    def run(self, inputs):
        """Run ``inputs`` commands; return the figures."""
        codes, faults, began_s = Counter(), [], time.monotonic()
        for number in range(inputs):
            folder = self._folder / "files"
            shutil.copytree(self._whole, folder)
            changed = [self._change(folder) for _ in range(self._rng.randint(0, 2))]
            command = self._command()
            code, log = _in_fork(partial(run, command), folder, self._folder / "log")
            codes[code] += 1
            if code not in (0, 1, 2) or "Traceback" in log:
                faults.append(
                    {"command": command, "changed": changed, "code": code, "number": number, "log": log[-2000:]}
                )
            shutil.rmtree(folder)
            if len(faults) > 20:
                break
        return {
            "inputs": codes.total(),
            "seconds": round(time.monotonic() - began_s),
            "codes": {str(code): count for code, count in codes.most_common()},
            "faults": faults,
        }

    def _command(self):
        words = list(self._rng.choice(COMMANDS))
        if self._rng.random() < 0.2:
            words.insert(self._rng.randint(1, len(words)), self._rng.choice(WORDS))
        return words

    def _change(self, folder):
        """Change one file, or put something else in its place; return what was done."""
        rng = self._rng
        files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < MIB)  # none is "huge"
        file = rng.choice(sorted(files))
        kind = rng.choices(("bytes", "json", "empty", "gone", "other"), (3, 4, 1, 1, 2))[0]
        data = file.read_bytes()
        if kind == "bytes":
            file.write_bytes(change_bytes(data, rng))
        elif kind == "json":
            file.write_bytes(change_json(data, rng))
        elif kind == "empty":
            file.write_bytes(b"")
        else:
            file.unlink()
        if kind == "other":
            kind = rng.choice(("pipe", "folder", "loop", "endless", "huge", "dead link"))
            if kind == "pipe":
                os.mkfifo(file)
            elif kind == "folder":
                file.mkdir()
            elif kind == "huge":
                with file.open("wb") as huge:
                    huge.truncate(1 << 40)
            else:
                file.symlink_to({"loop": file.name, "endless": "/dev/zero", "dead link": "nowhere"}[kind])
        return f"{file.relative_to(folder)}: {kind}"


def _fill_database():
    """Write the rows of the files into the database, and into a dump."""
    with ParameterServer.from_config(read_ps_config("lookup/ps.json")):
        pass
    dump_table("lookup/ps.json", "rows.user", Path("dump.bin"))


def _in_fork(work, folder, log):
    """Work in a fork of this process, in ``folder``; return the fork's exit code, and what it wrote."""
    pid = os.fork()
    if not pid:
        _become(work, folder, log)
    deadline_s = time.monotonic() + DEADLINE_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs", log.read_text(encoding="utf-8", errors="replace")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1]), log.read_text(encoding="utf-8", errors="replace")


def _become(work, folder, log):
    """Work as a console script does, in this process, which then ends."""
    code = 99
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # what the interpreter would do
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


assert callable(main)  # imported here, so that no fork has to
