"""The report of a benchmark: one line per measurement, and the same as JSON.

A measurement compares Hotrow with a peer or a physical limit in the same run. Both sides take turns, round by round,
and every round gives a ratio. The median ratio is the result. The smallest and the largest ratio are the spread.
"""

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

_PACKAGES = (
    "hotrow",
    "numpy",
    "onnxruntime",
    "torch",
    "rocksdict",
    "redis",
    "uvicorn",
    "fastapi",
    "cupy-cuda12x",
    "cupy-cuda13x",
)

# Hotrow's loops and the int8 engine choose their code by these.
_INSTRUCTION_SETS = {"avx2", "avx512f", "avx512_vnni", "avx_vnni"}


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        name: ``<benchmark>.<measure>``.
        params: sizes, concurrency and other settings.
        ours: median over the rounds, in ``unit``.
        peer: the same for the peer.
        unit: unit of both.
        ratio: median of ours / peer, round by round.
        ratio_min: its smallest value.
        ratio_max: its largest value.
    """

    name: str
    params: dict
    ours: float
    peer: float
    unit: str
    ratio: float
    ratio_min: float
    ratio_max: float

    @classmethod
    def of(cls, name, params, unit, rounds):
        """Make a record from pairs (ours, peer), one per round."""
        ratios = [ours / peer for ours, peer in rounds]
        ours, peer = (median(values) for values in zip(*rounds, strict=True))
        return cls(name, params, ours, peer, unit, median(ratios), min(ratios), max(ratios))


def parse_arguments(description, **options):
    """The arguments of every benchmark; ``options`` are further options by name, as argparse takes them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small inputs and few rounds, to check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    for name, option in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser.parse_args()


def take_turns(ours, peer, rounds):
    """Call both sides with the same arguments, round by round; the side that goes first changes every round.

    Args:
        ours: a function.
        peer: another one.
        rounds: for each round, the arguments of its calls as a list of tuples.

    Returns:
        one pair (ours, peer) of seconds per round.
    """
    pairs = []
    for number, calls in enumerate(rounds):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            function = (ours, peer)[which]
            begin = time.perf_counter()
            for arguments in calls:
                function(*arguments)
            took[which] = time.perf_counter() - begin
        pairs.append(tuple(took))
    return pairs


def publish(records, file=None):
    """Print the records, and write them to ``file`` if given."""
    for record in records:
        params = " ".join(f"{key}={value}" for key, value in record.params.items())
        decimals = 4 if record.name.endswith(".loss") else 2
        print(
            f"{record.name:<28} {params:<44} ours {record.ours:>12,.{decimals}f}  peer {record.peer:>12,.{decimals}f}"
            f" {record.unit:<6} ratio {record.ratio:.{decimals}f}"
            f" ({record.ratio_min:.{decimals}f}..{record.ratio_max:.{decimals}f})"
        )
    write(records, file)


def write(records, file=None):
    """Write the records to ``file`` if given."""
    if file is not None:
        document = {"hardware": hardware(), "versions": versions(), "records": [asdict(record) for record in records]}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def hardware():
    """The machine of a run. Family and model identify a processor whose name a virtual machine hides."""
    cpu = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        cpu.setdefault(name.strip(), value.strip())
    memory = [line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_family": cpu.get("cpu family"),
        "cpu_model": cpu.get("model"),
        "instruction_sets": sorted(_INSTRUCTION_SETS & set(cpu.get("flags", "").split())),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[0].split()[1]) / 2**20, 1) if memory else None,
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
    }


def versions():
    """Versions of Python and of the relevant packages."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _lines(path):
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
