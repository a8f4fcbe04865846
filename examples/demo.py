"""Train a DCN on raw features, serve it, query it with NVIDIA's client, and print how many rows each tier answered.

    python examples/demo.py [--data criteo.csv] [--rows 500000] [--output demo_output]

The data has counts, strings and missing values, in Criteo's columns. A features.json defines how they become numbers
and keys, and clients send raw values. RAM has room for half of the embedding rows, and RocksDB has every row. Answers
are exact from either tier. At the end, `hotrow stats` shows how many rows came from each tier.
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
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import tritonclient.http as triton
from tqdm import tqdm

from training.data.criteo import CATEGORY_NAMES, COLUMNS, COUNT_NAMES
from training.model.metrics import area_under_curve
from training.synthetic.criteo_like import SyntheticCriteo, generate_blocks

#: A count becomes log(1 + count), and a category one of a million keys. A missing category is a category too.
FEATURES = [
    *({"name": name, "kind": "dense", "clip": [0, 1e9], "log1p": True, "missing": 0} for name in COUNT_NAMES),
    *({"name": name, "kind": "hash", "buckets": 1_000_000, "missing": "none"} for name in CATEGORY_NAMES),
]
TYPES = {"label": pa.int64(), **dict.fromkeys(COUNT_NAMES, pa.float64()), **dict.fromkeys(CATEGORY_NAMES, pa.string())}
SCHEMA = pa.schema(TYPES)
SAMPLES_PER_REQUEST, FEWEST_REQUESTS, MOST_REQUESTS = 64, 10, 500
MARK = ".hotrow-demo"  # the demo writes to a folder with files only if this file is in it


def main() -> int:
    options = read_options()
    started = perf_counter()
    prepare(options.output)
    repository = options.output / "models"

    data = options.output / "data"
    title("1. Train a DCN on raw features and export it")
    with set_aside(repository / "dcn", options.output / ".earlier"), set_aside(data, options.output / ".earlier_data"):
        write_data(options, data)
        train(options, data, repository)
    shutil.rmtree(options.output / "rocksdb", ignore_errors=True)  # of the earlier model
    limit_memory(repository)

    title("2. Serve it")
    with serving(repository) as url:
        title("3. Query it like any KServe v2 client")
        asked = held_out(data / "clicks.parquet")
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


def write_data(options: argparse.Namespace, folder: Path) -> None:
    """Write clicks.parquet, with the raw values of a Criteo file or of generated samples, and features.json."""
    folder.mkdir()
    if options.data:
        batches = criteo_batches(options.data)
    else:
        batches = (raw_rows(part) for part in generate_blocks(options.rows, seed=0))
    with pq.ParquetWriter(folder / "clicks.parquet", SCHEMA) as file:
        for batch in batches:
            file.write_batch(batch)
    lines = ",\n".join(f"  {json.dumps(feature)}" for feature in FEATURES)
    (folder / "features.json").write_text(f'{{"format": 1, "features": [\n{lines}\n]}}\n')


def criteo_batches(path: Path):
    """Yield the rows of a Criteo file, raw (tab-separated) or CSV, with or without a header."""
    try:
        with pa.input_stream(path, compression="detect") as file:
            first = file.read(4096).decode(errors="replace").partition("\n")[0]
            separator = "\t" if "\t" in first else ","
            names = None if "I1" in first.replace('"', "").split(separator) else COLUMNS
        how = {"column_types": SCHEMA, "include_columns": COLUMNS, "null_values": [""], "strings_can_be_null": True}
        parse, read = csv.ParseOptions(delimiter=separator), csv.ReadOptions(column_names=names)
        with pa.input_stream(path, compression="detect") as file:
            yield from csv.open_csv(
                file, read_options=read, parse_options=parse, convert_options=csv.ConvertOptions(**how)
            )
    except (OSError, pa.ArrowException) as err:
        raise SystemExit(f"{path}: {getattr(err, 'strerror', None) or err}") from err


def raw_rows(part: SyntheticCriteo) -> pa.RecordBatch:
    """Return generated samples as they are before they are encoded: a label, counts and categories."""
    keys = part.samples.bags.keys.reshape(-1, len(CATEGORY_NAMES)) & (2 << 32) - 1
    columns = [part.samples.labels[:, 0].astype(np.int64), *part.counts.T]
    arrays = [pa.array(column, from_pandas=True) for column in columns]
    for column in keys.T:
        values, codes = np.unique(column, return_inverse=True)
        texts = [None if value >> 32 else f"{value:08x}" for value in values.tolist()]
        arrays.append(pa.array(texts, pa.string()).take(pa.array(codes)))
    return pa.record_batch(arrays, schema=SCHEMA)


def train(options: argparse.Namespace, data: Path, repository: Path) -> None:
    files = ["--data", str(data / "clicks.parquet"), "--features", str(data / "features.json"), "--label", "label"]
    is_small = options.data and (data / "clicks.parquet").stat().st_size < 5_000_000
    arguments = ["--model", "dcn", "--output", str(repository), "--epochs", "10" if is_small else "1"]
    if subprocess.run([sys.executable, "-m", "hotrow", "train", *files, *arguments]).returncode:
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


def held_out(path: Path) -> pa.Table:
    """Return rows of the last tenth, which training does not see."""
    file = pq.ParquetFile(path)
    left_out = file.metadata.num_rows - max(1, file.metadata.num_rows // 10)
    batches, wanted = [], SAMPLES_PER_REQUEST * MOST_REQUESTS
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if rows > left_out and wanted > 0:
            batches.append(file.read_row_group(group).slice(max(left_out, 0), wanted))
            wanted -= batches[-1].num_rows
        left_out -= rows
    return pa.concat_tables(batches)


def ask(url: str, samples: pa.Table) -> tuple[np.ndarray, np.ndarray, int]:
    """Send all samples, at most 64 per request. Return probabilities, each request's milliseconds, defaulted keys."""
    probabilities, latencies_ms, defaulted_keys = [], [], 0
    size = min(SAMPLES_PER_REQUEST, -(-len(samples) // FEWEST_REQUESTS))
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        for start in tqdm(range(0, len(samples), size), desc="requests", disable=None):
            inputs = tensors(samples.slice(start, size))
            began = perf_counter()
            answer = client.infer("dcn", inputs)
            latencies_ms.append((perf_counter() - began) * 1000)
            probabilities.append(answer.as_numpy("OUTPUT0").reshape(-1))
            defaulted_keys += answer.get_response()["parameters"]["defaulted_keys"]
    return np.concatenate(probabilities), np.array(latencies_ms), defaulted_keys


def tensors(samples: pa.Table) -> list[triton.InferInput]:
    """Return a tensor of raw values for each feature. NaN and an empty text are missing values."""
    inputs = []
    for name in (*COUNT_NAMES, *CATEGORY_NAMES):
        column = samples.column(name)
        if name in COUNT_NAMES:
            values = column.cast(pa.float32()).fill_null(float("nan")).to_numpy()
        else:
            values = column.fill_null("").to_numpy()
        inputs.append(triton.InferInput(name, list(values.shape), "FP32" if name in COUNT_NAMES else "BYTES"))
        inputs[-1].set_data_from_numpy(values)
    return inputs


def report(samples: pa.Table, probabilities: np.ndarray, latencies_ms: np.ndarray, defaulted_keys: int) -> None:
    labels = samples.column("label").to_numpy()
    for label, probability in list(zip(labels, probabilities, strict=True))[:5]:
        print(f"probability {probability:.4f}   label {label}")
    auc = f"{area_under_curve(labels, probabilities):.4f}" if 0 < labels.mean() < 1 else "needs both labels"
    print(f"AUC {auc} on {len(samples):,} samples that training did not see")
    keys = len(samples) * len(CATEGORY_NAMES)
    print(f"defaulted_keys {defaulted_keys:,} of {keys:,}: training did not see these keys")
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    size = -(-len(samples) // len(latencies_ms))
    count = len(latencies_ms)
    print(f"latency p50 {p50:.2f} ms, p99 {p99:.2f} ms, over {count} requests of {size} samples, one at a time")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
