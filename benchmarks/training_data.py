"""Samples per second of reading training data, against pyarrow's own readers on the same Parquet and CSV files.

The files have one label, 13 dense features and 26 slots with one key each, as Criteo's data has. Both yield batches of
4,096 rows, except pyarrow's CSV reader, whose batches are blocks of the file. pyarrow yields record batches of columns.
Hotrow yields ``Samples``: checked values, keys as int64[B, S]. pyarrow's CSV reader gets the same types of columns, and
fields may have several lines, because its other mode may cut a field in two. A Norm file with the same samples is
compared with pyarrow's reader of the Parquet file.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.report import Record, parse_arguments, publish
from training.data import ColumnMap, read_csv, read_norm, read_parquet, write_norm
from training.samples import Bags

SLOTS, DENSE, BATCH = 26, 13, 4096
COLUMNS = ColumnMap(
    ("label",), tuple(f"I{index + 1}" for index in range(DENSE)), tuple(f"C{index + 1}" for index in range(SLOTS))
)


def write_files(folder, rows):
    """Write the same samples as Parquet, CSV and Norm. Return the files by format."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (rows, 1)).astype(np.float32)
    dense = rng.standard_normal((rows, DENSE), dtype=np.float32)
    keys = rng.zipf(1.2, (rows, SLOTS)) % 1_000_000 + np.arange(SLOTS) * 1_000_000
    table = pa.table([*labels.T, *dense.T, *keys.T], names=COLUMNS.names)
    files = {name: folder / f"data.{name}" for name in ("parquet", "csv", "norm")}
    pq.write_table(table, files["parquet"])
    pa.csv.write_csv(table, files["csv"])
    write_norm(files["norm"], labels, dense, Bags.one_key_each(keys))
    return files


def read_with_pyarrow(file):
    """Yield pyarrow's record batches."""
    with pq.ParquetFile(file) as parquet:
        yield from parquet.iter_batches(BATCH)


def read_csv_with_pyarrow(file):
    """Yield pyarrow's record batches."""
    types = dict.fromkeys((*COLUMNS.labels, *COLUMNS.dense), pa.float32()) | dict.fromkeys(COLUMNS.slots, pa.int64())
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with pa.csv.open_csv(file, None, parse, pa.csv.ConvertOptions(column_types=types)) as batches:
        yield from batches


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rows, rounds = (10_000, 1) if options.quick else (500_000, 7)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), rows)
        readers = {
            "parquet": lambda: read_parquet(files["parquet"], COLUMNS, batch_size=BATCH),
            "csv": lambda: read_csv(files["csv"], COLUMNS, batch_size=BATCH),
            "norm": lambda: read_norm(files["norm"], batch_size=BATCH),
            "pyarrow": lambda: read_with_pyarrow(files["parquet"]),
            "pyarrow csv": lambda: read_csv_with_pyarrow(files["csv"]),
        }
        speeds = {name: [] for name in readers}
        for _ in range(rounds + 1):
            for name, read in readers.items():
                began = time.perf_counter()
                assert sum(1 for _ in read()) > 0
                speeds[name].append(rows / (time.perf_counter() - began))
    params = {"rows": rows, "batch": BATCH, "slots": SLOTS, "dense": DENSE}
    records = [
        Record.of(
            f"training_data.{kind}samples_per_s",
            {**params, "format": name},
            "1/s",
            list(zip(speeds[name][1:], speeds[peer][1:], strict=True)),  # the first round warms up
        )
        for name, peer, kind in (("parquet", "pyarrow", ""), ("csv", "pyarrow csv", "csv_"), ("norm", "pyarrow", ""))
    ]
    publish(records, options.json)


if __name__ == "__main__":
    main()
