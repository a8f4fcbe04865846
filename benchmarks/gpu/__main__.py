"""The GPU cache on a GPU: ``make bench-gpu``. Every answer is compared with NumPy before it is timed.

Peers and limits of the same run: the copy bandwidth, a gather of rows with known slots, PyTorch's ``embedding`` and
``embedding_bag``, an empty kernel. The exit status says whether every answer was right. The table of targets shows the
speed. ``--device runner --quick`` checks the answers without a GPU; its times mean nothing. A full run takes minutes;
``--only queries`` measures a part.
"""

import sys

from benchmarks.gpu import ceiling, latency, lookups, pooling, predictions, queries, writes
from benchmarks.gpu.keys import POPULATION_RATIO, WrongAnswerError, positions
from benchmarks.gpu.plot import draw
from benchmarks.gpu.records import about, write
from benchmarks.gpu.sizes import QUICK, Sizes
from benchmarks.gpu.targets import print_table
from benchmarks.gpu.torch_peer import open_peer
from benchmarks.report import parse_arguments
from kernels.device import open_device
from kernels.errors import DeviceUnavailableError, HotrowError

GROUPS = ("copy", "queries", "lookups", "pooling", "pooled_forms", "writes", "latency", "predictions")


def main():
    arguments = parse_arguments(
        __doc__,
        device={"default": "cuda:0", "help": "default: cuda:0"},
        only={"nargs": "+", "choices": GROUPS, "default": GROUPS, "help": "measure only these groups"},
    )
    try:
        device = open_device(arguments.device)
    except DeviceUnavailableError as err:
        print(f"make bench-gpu needs a GPU: {err}", file=sys.stderr)
        return 1
    print(device.properties(), flush=True)
    records, failures, absent, where = [], [], {}, about(device)
    for name, measured in measurements(device, QUICK if arguments.quick else Sizes()):
        if name not in arguments.only:
            continue
        try:
            for record in measured:
                print(record, flush=True)
                records.append(record)
                write(arguments.json, where, records, failures, absent)
        except (WrongAnswerError, HotrowError, MemoryError, RuntimeError) as err:  # CuPy and PyTorch raise RuntimeError
            failures.append(f"{name}: {err}")
            print(f"{name}: failed: {err}", flush=True)
        except ImportError as err:
            absent[name] = str(err)
            print(f"{name}: absent: {err}")
        write(arguments.json, where, records, failures, absent)
    if device.name.startswith("cuda:"):
        print_table(records)
        if arguments.json:
            draw_if_possible(records, device, arguments.json.with_suffix(".png"))
    for failure in failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return int(bool(failures))


def measurements(device, sizes):
    """Yield pairs of a name in ``GROUPS`` and an iterator of records, so that one group may fail and the next runs."""
    copies = ceiling.copy_bandwidth(device, sizes.copy_bytes, sizes.rounds)
    gb_per_s = copies[-1].details["gb_per_s"]
    places = {
        name: positions(name, int(sizes.slots * POPULATION_RATIO), sizes.pool_keys) for name in ("uniform", "zipf")
    }
    peer, why = open_peer(device)
    yield "copy", copies
    yield "queries", queries.measure(device, sizes, places, gb_per_s)
    yield "lookups", lookups.measure(device, peer, why, sizes, gb_per_s)
    yield "pooling", pooling.measure(device, peer, why, sizes, gb_per_s)
    yield "pooled_forms", pooling.measure_forms(device, peer, why, sizes, gb_per_s)
    yield "writes", writes.measure(device, sizes, places)
    yield "latency", latency.measure(device, sizes, places)
    yield "predictions", predictions.measure(device, sizes)


def draw_if_possible(records, device, file):
    """Draw if matplotlib is installed."""
    try:
        draw(records, device.properties()["name"], file)
    except ImportError as err:
        print(f"no plot: {err}: pip install 'hotrow[plot]'", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
