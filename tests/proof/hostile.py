"""Hostile inputs by the million for the decoders, under the fuzzer atheris.

Each decoder has a process of its own, ``python -m tests.proof.hostile NAME INPUTS SEED FOLDER``. Inputs that reach
other code are kept in ``tests/proof/corpus``, and the next run begins with them.
"""

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 2**20
#: How much memory a decoder's process may take in all, and how long one input may take.
MOST_MIB, LONGEST_S = 1024, 20
MOST_KEPT_BYTES = 4096
#: Atheris itself takes memory for each input, so no process gets more inputs.
INPUTS_OF_A_PROCESS = 200_000
#: How much memory a decoder may keep after so many inputs, without the fuzzer.
REPEATED, MOST_GROWTH_MIB = 10_000, 8


def fuzz(name, inputs, seed, folder):
    """Fuzz one decoder in this process, which then ends. New inputs that reach other code go to ``folder/new``."""
    import atheris

    with atheris.instrument_imports(include=["serving"]):
        from tests.proof.decoders import TARGETS
    target = TARGETS[name]

    def mutate(data, max_bytes, number):
        rng = random.Random(number)
        changed = target.change(data or target.seed, rng) if rng.random() < 0.8 else atheris.Mutate(data, max_bytes)
        return changed[:max_bytes]

    limits = [f"-rss_limit_mb={MOST_MIB}", f"-timeout={LONGEST_S}", "-max_len=65536", f"-artifact_prefix={folder}/"]
    arguments = [sys.argv[0], f"-runs={inputs}", f"-seed={seed}", *limits, "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([*arguments, f"{folder}/new", f"{folder}/known"], target.takes, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz_in_process(name, inputs, seed, folder):
    """Fuzz one decoder in processes of its own, and keep its new inputs; return the figures."""
    from tests.proof.decoders import CORPUS, corpus_of  # not before ``fuzz`` has instrumented what they import

    figures = {"inputs": 0, "peak_rss_mib": 0, "faults": []}
    for number, begin in enumerate(range(0, inputs, INPUTS_OF_A_PROCESS)):
        part = folder / str(number)
        for place in ("new", "known"):
            (part / place).mkdir(parents=True)
        for position, data in enumerate(corpus_of(name)):
            (part / "known" / str(position)).write_bytes(data)
        count = min(INPUTS_OF_A_PROCESS, inputs - begin)
        command = [sys.executable, "-m", "tests.proof.hostile", name, str(count), str(seed + number), str(part)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, check=False)
        text = done.stdout.decode(errors="replace")
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for file in (part / "new").iterdir():
            if file.stat().st_size <= MOST_KEPT_BYTES:
                shutil.copy(file, CORPUS / name)
        read = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", text)}
        figures["inputs"] += read.get("number_of_executed_units", 0)
        figures["peak_rss_mib"] = max(figures["peak_rss_mib"], read.get("peak_rss_mb", 0))
        if done.returncode:
            artifacts = [file for file in part.iterdir() if file.name.startswith(("crash-", "timeout-", "oom-"))]
            figures["faults"] += [text[-3000:], *(repr(file.read_bytes()[:2000]) for file in artifacts)]
    return {**figures, "growth_mib": growth_mib(name, seed)}


def growth_mib(name, seed):
    """Decode the neighbours of the kept inputs without the fuzzer; return how much memory stays."""
    from tests.proof.decoders import TARGETS, corpus_of

    rng, known = random.Random(seed), corpus_of(name)
    for number in range(2 * REPEATED):
        if number == REPEATED:
            before = resident_bytes("self")
        TARGETS[name].takes(TARGETS[name].change(rng.choice(known), rng))
    return (resident_bytes("self") - before) // MIB


def resident_bytes(pid):
    """The memory of a process that is not backed by files."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1]) << 10


if __name__ == "__main__":
    fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
