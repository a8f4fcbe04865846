"""Whole predictions: the time of one ``InferenceSession.predict``, from host arrays to host probabilities."""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.gpu.keys import WrongAnswerError
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import SOURCE, take_turns

FAMILY = "dcn"
REQUESTS = 8  # in turn
CALLS = 32  # per round
# Record names, and the type of the caches: with all rows, or with a fifth of them.
CACHES = {"predict": "static", "predict_misses": "dynamic"}


def measure(device, sizes):
    """Yield records by the share of cached rows and the number of samples; the peer is the same model on the CPU.

    Raises:
        ImportError: a package that serving or PyTorch needs is not installed.
    """
    from benchmarks.families import FAMILIES
    from benchmarks.predict import write_model
    from serving import load_model
    from serving.opening import Runtime
    from serving.repository import ModelRepository

    family = FAMILIES[FAMILY]
    with tempfile.TemporaryDirectory() as folder:
        peer = family(*write_model(Path(folder), family, sizes.model_rows)).eval()
        with load_model(folder, device="cpu") as on_cpu:
            for name, kind in CACHES.items():
                file = _configured(Path(folder), kind, max(sizes.predicted_samples))
                with ModelRepository(file, Runtime(device=device.name)) as repository:
                    repository.load()
                    ours = repository.session(FAMILY)
                    for samples in sizes.predicted_samples:
                        yield _measured(name, device, (ours, on_cpu), peer, samples, sizes)


def _configured(folder, kind, samples):
    """Write a ps.json that serves the model in ``folder`` through caches of a type."""
    graph = json.loads((folder / "graph.json").read_text())
    names = graph["inference"]["sparse_model_file"]
    model = {"model": FAMILY, "sparse_files": names, "dense_file": "dense.model", "network_file": "graph.json"}
    said = {"embedding_cache_type": kind, "max_batch_size": samples}
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"supportlonglong": True, "models": [model | said]}))
    return file


def _measured(name, device, sessions, peer, samples, sizes):
    from benchmarks.families import FAMILIES
    from benchmarks.predict import FP32_ERROR, arrays_of, check, draw_request

    family, (ours, on_cpu) = FAMILIES[FAMILY], sessions
    requests = [draw_request(sizes.model_rows, samples, seed) for seed in range(REQUESTS)]
    try:
        check(ours, peer, family, requests, FP32_ERROR)
    except AssertionError as err:
        raise WrongAnswerError(f"{name}: {samples} samples: {err}") from err
    sent = [arrays_of(request, family) for request in requests]
    calls = min(CALLS, sizes.host_calls)
    floor = _floor(device, sum(array.nbytes for array in sent[0]), samples)
    before = _found(ours)
    times = take_turns(
        [
            lambda: _us_per_call(lambda number: ours.predict(*sent[number % REQUESTS]), calls),
            lambda: _us_per_call(lambda number: on_cpu.predict(*sent[number % REQUESTS]), calls),
            lambda: _us_per_call(lambda _: floor(), calls),
        ],
        sizes.rounds,
    )
    hits, misses = _found(ours) - before
    return Record.of(
        name, times, "the same on the CPU", batch=samples, distribution="uniform",
        hit_rate=round(float(hits / (hits + misses)), 4), model=FAMILY,
        launch_floor_us=median(of_round[2] for of_round in times),
    )  # fmt: skip


def _floor(device, request_bytes, samples):
    """The floor of a request: the same bytes up, a graph that downloads the answers, a wait, and no work."""
    stream, nothing = device.stream(), device.kernel(SOURCE, "nothing", ROW_UNITS=1, OUT_UNITS=1)
    host, on_device = device.pinned(request_bytes, np.uint8), device.empty(request_bytes, np.uint8)
    host_answer, answer = device.pinned(samples, np.float32), device.zeros(samples, np.float32)

    def do_nothing():
        nothing((1,), (1,), (), stream)
        device.download(answer, host_answer, stream)

    do_nothing()
    stream.synchronize()
    graph = device.capture(stream, do_nothing)

    def ask():
        device.upload(host, on_device, stream)
        graph.launch(stream)
        stream.synchronize()

    return ask


def _found(session):
    """Hits and misses of the session's caches so far."""
    counted = {"hotrow_gpu_cache_hits": 0, "hotrow_gpu_cache_misses": 0}
    for reading in session.readings():
        if reading.name in counted:
            counted[reading.name] += reading.value
    return np.array([*counted.values()])


def _us_per_call(call, calls):
    begin = time.perf_counter()
    for number in range(calls):
        call(number)
    return (time.perf_counter() - begin) * 1e6 / calls
