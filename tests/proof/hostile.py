"""Hostile inputs by the million: for the decoders in process, over sockets, and as files of commands.

    python -m tests.proof.hostile decoders --inputs 9000000
    python -m tests.proof.hostile sockets --inputs 500000
    python -m tests.proof.hostile commands --inputs 2000

Each prints its figures as JSON, and exits with 1 after a fault, whose input it names. The decoders run under the
fuzzer atheris, which keeps inputs that reach other code in ``tests/proof/corpus``.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
MIB = 2**20
#: How much memory a decoder's process may take in all, and how long one input may take.
MOST_MIB, LONGEST_S = 1024, 20


def fuzz(name, inputs, seed, corpus):
    """Fuzz one decoder in this process, which then ends."""
    import atheris

    with atheris.instrument_imports(include=["serving"]):
        from tests.proof.decoders import TARGETS
    target = TARGETS[name]

    def mutate(data, max_bytes, number):
        rng = random.Random(number)
        changed = target.change(data or target.seed, rng) if rng.random() < 0.8 else atheris.Mutate(data, max_bytes)
        return changed[:max_bytes]

    limits = [f"-rss_limit_mb={MOST_MIB}", f"-timeout={LONGEST_S}", "-max_len=65536", f"-artifact_prefix={corpus}/../"]
    arguments = [sys.argv[0], f"-runs={inputs}", f"-seed={seed}", *limits, "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([*arguments, str(corpus)], target.takes, custom_mutator=mutate)
    atheris.Fuzz()


def decoders(inputs, seed):
    """Fuzz every decoder, those of requests with nine of ten inputs; return the figures."""
    from tests.proof.decoders import REQUESTS, TARGETS, corpus_of

    figures, faults, began_s = {}, [], time.monotonic()
    of_request, of_file = inputs * 9 // 10 // len(REQUESTS), inputs // 10 // (len(TARGETS) - len(REQUESTS))
    waiting = {name: of_request if name in REQUESTS else of_file for name in TARGETS}
    with TemporaryDirectory() as folder:
        running = {}
        while waiting or running:
            if waiting and len(running) < (os.cpu_count() or 1):
                name, runs = waiting.popitem()
                corpus = Path(folder) / name / "corpus"
                corpus.mkdir(parents=True)
                for number, data in enumerate(corpus_of(name)):
                    (corpus / str(number)).write_bytes(data)
                command = [sys.executable, "-m", "tests.proof.hostile", "fuzz", name]
                command += ["--inputs", str(runs), "--seed", str(seed), "--corpus", str(corpus)]
                log = (corpus.parent / "log").open("wb+")
                running[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT), log
                continue
            time.sleep(0.1)
            for name, (process, log) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                log.seek(0)
                text = log.read().decode(errors="replace")
                log.close()
                figures[name] = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", text)}
                if process.returncode:
                    faults.append({"decoder": name, "log": text[-3000:], "input": _artifact(Path(folder) / name)})
    return {
        "inputs": sum(of["number_of_executed_units"] for of in figures.values() if of),
        "seconds": round(time.monotonic() - began_s),
        "peak_rss_mib": max((of.get("peak_rss_mb", 0) for of in figures.values()), default=0),
        "decoders": {name: of.get("number_of_executed_units", 0) for name, of in sorted(figures.items())},
        "faults": faults,
    }


def _artifact(folder):
    """The input that ended a decoder's process."""
    found = [file for file in folder.iterdir() if file.name.startswith(("crash-", "timeout-", "oom-"))]
    return repr(found[0].read_bytes()[:2000]) if found else ""


def resident_bytes(pid):
    """The memory of a process that is not backed by files."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1]) << 10


def sockets(inputs, seed):
    """Send hostile requests to a server over HTTP and gRPC; return the figures."""
    from tests.proof.hostile_sockets import Attack

    with TemporaryDirectory() as folder:
        return Attack(Path(folder), random.Random(seed)).run(inputs)


def commands(inputs, seed):
    """Give hostile files and arguments to the commands; return the figures."""
    from tests.proof.hostile_commands import Commands

    with TemporaryDirectory() as folder:
        return Commands(Path(folder), random.Random(seed)).run(inputs)


def main():
    """Run one kind of attack, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["decoders", "sockets", "commands", "fuzz"])
    parser.add_argument("decoder", nargs="?", help="with fuzz: one decoder")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="with fuzz: the folder of its inputs")
    options = parser.parse_args()
    if options.kind == "fuzz":
        fuzz(options.decoder, options.inputs, options.seed, options.corpus)
    kinds = {"decoders": decoders, "sockets": sockets, "commands": commands}
    figures = kinds[options.kind](options.inputs, options.seed)
    print(json.dumps(figures, indent=1))  # noqa: T201
    return int(bool(figures["faults"]))


if __name__ == "__main__":
    sys.exit(main())
