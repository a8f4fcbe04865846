"""Train a DCN, export it, serve it, query it with NVIDIA's client, and print how many rows each tier answered.

    python examples/demo.py [--data criteo.csv] [--rows 500000] [--output demo_output]

RAM has room for half of the embedding rows, and RocksDB has every row. Answers are exact from either tier. At the end,
`hotrow stats` shows how many rows came from each tier.
"""

import argparse
import fcntl
import json
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import tritonclient.http as triton
from tqdm import tqdm

from training.data.criteo_reader import read_criteo
from training.model.metrics import area_under_curve
from training.samples import Samples
from training.synthetic.criteo_like import generate

SAMPLES_PER_REQUEST, FEWEST_REQUESTS, MOST_REQUESTS = 64, 10, 500
MARK = ".hotrow-demo"  # the demo writes to a folder with files only if this file is in it


def main() -> int:
    options = read_options()
    started = perf_counter()
    prepare(options.output)
    repository = options.output / "models"

    title("1. Train a DCN and export it")
    with set_aside(repository / "dcn", options.output / ".earlier"):
        train(options, repository)
    shutil.rmtree(options.output / "rocksdb", ignore_errors=True)  # of the earlier model
    limit_memory(repository)

    title("2. Serve it")
    with serving(repository) as url:
        title("3. Query it like any KServe v2 client")
        asked = held_out(options)
        report(asked, *ask(url, asked))
        title("4. Where the embedding rows came from")
        subprocess.run([sys.executable, "-m", "hotrow", "stats", url], check=True)

    title("Done")
    print(f"{perf_counter() - started:.0f} s in all, and the server has stopped. What to try next:\n")
    print(f"  .venv/bin/hotrow serve {repository}          then open http://127.0.0.1:8000")
    print(f"  .venv/bin/hotrow check {repository}          how much memory it takes, without serving it")
    print("  make demo DATA=train.txt                     your own Criteo file, raw or CSV")
    print("  README.md                                    Python, HTTP and Triton")
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a Criteo file, raw (tab-separated) or CSV (default: generated data)")
    parser.add_argument("--rows", type=int, default=500_000, help="generated samples (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="(default: %(default)s)")
    return parser.parse_args()


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def prepare(output: Path) -> None:
    """Make the output folder, or check that it is an earlier demo's and that no server uses it."""
    if output.exists() and any(output.iterdir()) and not (output / MARK).exists():
        raise SystemExit(f"{output} is not empty and not from an earlier demo: choose another with --output")
    database = output / "rocksdb" / "LOCK"
    if database.exists():
        with database.open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as RocksDB locks it
            except OSError:
                raise SystemExit(
                    f"a server uses {database.parent}: stop it first, or choose another --output"
                ) from None
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).touch()


@contextmanager
def set_aside(folder: Path, aside: Path):
    """Move a folder away, delete it at the end of the block, or put it back if the block fails."""
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def train(options: argparse.Namespace, repository: Path) -> None:
    source = ["--data", str(options.data)] if options.data else ["--synthetic", str(options.rows)]
    is_small = options.data and options.data.is_file() and options.data.stat().st_size < 10_000_000
    epochs = "10" if is_small else "1"
    arguments = ["--model", "dcn", "--output", str(repository), "--epochs", epochs]
    command = [sys.executable, "-m", "hotrow", "train", *source, *arguments]
    if subprocess.run(command).returncode:
        raise SystemExit("training failed; the line above says why")


def limit_memory(repository: Path) -> None:
    """Write a ps.json with room for half of the rows in RAM and for all of them in RocksDB."""
    [keys] = repository.glob("dcn/1/*/key")
    rows = keys.stat().st_size // 8
    room = max(1, rows // 2)
    tiers = {
        "supportlonglong": True,
        "models": [],
        "volatile_db": {"type": "parallel_hash_map", "capacity_rows": room},
        "persistent_db": {"type": "rocks_db", "path": "../rocksdb"},
    }
    (repository / "ps.json").write_text(json.dumps(tiers, indent=2) + "\n")
    print(f"{repository / 'ps.json'}: {rows:,} embedding rows in RocksDB, room for {room:,} of them in RAM")


@contextmanager
def serving(repository: Path, *options: str):
    """Run ``hotrow serve`` on a free port and yield its URL. Stop it with SIGTERM, as an operator does."""
    command = [sys.executable, "-m", "hotrow", "serve", str(repository), "--http-port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith("listening on "):
                yield line.removeprefix("listening on ").strip()
                break
        else:
            raise SystemExit("the server did not start; the lines above say why")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def held_out(options: argparse.Namespace) -> Samples:
    """Return the last tenth of the samples, which training does not see."""
    samples = read_criteo(options.data) if options.data else generate(options.rows, seed=0).samples
    tail = samples[len(samples) - max(1, len(samples) // 10) :]
    return tail[: SAMPLES_PER_REQUEST * MOST_REQUESTS]


def ask(url: str, samples: Samples) -> tuple[np.ndarray, np.ndarray, int]:
    """Send all samples, at most 64 per request. Return probabilities, each request's milliseconds, defaulted keys."""
    probabilities, latencies_ms, defaulted_keys = [], [], 0
    size = min(SAMPLES_PER_REQUEST, -(-len(samples) // FEWEST_REQUESTS))
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        for start in tqdm(range(0, len(samples), size), desc="requests", disable=None):
            part = samples[start : start + size]
            began = perf_counter()
            answer = client.infer("dcn", tensors(part))
            latencies_ms.append((perf_counter() - began) * 1000)
            probabilities.append(answer.as_numpy("OUTPUT0").reshape(-1))
            defaulted_keys += answer.get_response()["parameters"]["defaulted_keys"]
    return np.concatenate(probabilities), np.array(latencies_ms), defaulted_keys


def tensors(samples: Samples) -> list[triton.InferInput]:
    """Return DES, CATCOLUMN and ROWINDEX, each [1, N], as HugeCTR's Triton clients send them."""
    arrays = {
        "DES": ("FP32", samples.dense.reshape(1, -1)),
        "CATCOLUMN": ("INT64", samples.bags.keys.reshape(1, -1)),
        "ROWINDEX": ("INT32", samples.bags.row_ptrs.astype(np.int32).reshape(1, -1)),
    }
    inputs = []
    for name, (datatype, values) in arrays.items():
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(np.ascontiguousarray(values))
        inputs.append(tensor)
    return inputs


def report(samples: Samples, probabilities: np.ndarray, latencies_ms: np.ndarray, defaulted_keys: int) -> None:
    for label, probability in list(zip(samples.labels[:, 0], probabilities, strict=True))[:5]:
        print(f"probability {probability:.4f}   label {label:.0f}")
    labels = samples.labels[:, 0]
    auc = f"{area_under_curve(labels, probabilities):.4f}" if 0 < labels.mean() < 1 else "needs both labels"
    print(f"AUC {auc} on {len(samples):,} samples that training did not see")
    print(f"defaulted_keys {defaulted_keys:,} of {samples.bags.keys.size:,}: training did not see these keys")
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    size = -(-len(samples) // len(latencies_ms))
    count = len(latencies_ms)
    print(f"latency p50 {p50:.2f} ms, p99 {p99:.2f} ms, over {count} requests of {size} samples, one at a time")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
