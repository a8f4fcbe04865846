"""`hotrow predict --data` against `session.predict` on the same rows, which are already in memory.

The command reads Parquet, predicts, and writes Parquet with the predictions and an id. The peer gets data frames of
1024 rows, one after another, and writes nothing. Both open the model, so both times include it. The models: 26 hashed
strings and 13 numbers per row with a weighted sum as the network; the same with keys in place of strings; keys and the
DCN of HugeCTR's samples.

Target: at least 0.9 of the peer's rows per second on two cores. On one core, nothing can overlap.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import hotrow
from benchmarks.families import FAMILIES, FEATURES, SLOTS
from benchmarks.features import write_model as write_raw_model
from benchmarks.predict import write_model as write_family
from benchmarks.report import Record, parse_arguments, publish, take_turns
from hotrow.scoring import score
from serving.model.graph import name_inputs
from tests.tools.tiny_model import NamedModel

ROWS_OF_TABLE, ROWS_OF_FRAME = 100_000, 1024
NAMES = [f"c{slot}" for slot in range(SLOTS)], [f"i{column}" for column in range(FEATURES)]
ROWS = {"strings": 500_000, "keys": 1_000_000, "dcn": 100_000}


def main():
    arguments = parse_arguments(__doc__)
    rounds, share = (1, 200) if arguments.quick else (7, 1)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in ROWS.items():
            write_model(Path(folder), name)
            write_rows(Path(folder) / f"{name}.parquet", name, rows // share)
            for cores in (1, 2):
                with ProcessPoolExecutor(1, get_context("spawn"), bind, (cores,)) as process:  # binds all its threads
                    pairs = process.submit(rates, Path(folder), name, rounds).result()
                params = {"model": name, "rows": rows // share, "cores": cores}
                records.append(Record.of("offline.rate", params, "rows/s", pairs))
    publish(records, arguments.json)


def bind(cores):
    """Use this many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def rates(folder, name, rounds):
    """Rows per second of both sides, round by round."""
    table = pq.read_table(folder / f"{name}.parquet")
    frames = [table.slice(first, ROWS_OF_FRAME).combine_chunks() for first in range(0, len(table), ROWS_OF_FRAME)]
    output = folder / f"{name}.scores.parquet"
    options = argparse.Namespace(
        model=str(folder / name),
        data=folder / f"{name}.parquet",
        output=output,
        keep=["id"],
        outputs=None,
        without=(),
        overwrite=False,
    )
    answers = []

    def ours():
        score(options)

    def peer():
        with hotrow.load_model(folder / name) as session:
            answers[:] = [session.predict(frame.drop_columns("id")) for frame in frames]

    pairs = take_turns(ours, peer, [[()]] * (rounds + 1))[1:]
    found = pq.read_table(output)
    np.testing.assert_allclose(found["prediction"].to_numpy(), np.concatenate(answers)[:, 0], atol=1e-5)
    np.testing.assert_array_equal(found["id"].to_numpy(), table["id"].to_numpy())
    return [(len(table) / took, len(table) / of_peer) for took, of_peer in pairs]


def write_model(folder, name):
    """Write one of the models."""
    if name == "strings":
        write_raw_model(folder, name, {"kind": "hash", "buckets": ROWS_OF_TABLE})
    elif name == "keys":
        NamedModel(
            tables={"t": SLOTS},
            dense_dim=FEATURES,
            dim=16,
            rows=ROWS_OF_TABLE,
            max_batchsize=ROWS_OF_FRAME,
            names=tuple(NAMES[0]),
            dense_names=tuple(NAMES[1]),
        ).write(folder, name)
    else:
        version = folder / name / "1"
        version.mkdir(parents=True)
        write_family(version, FAMILIES["dcn"], ROWS_OF_TABLE)
        graph = version / "graph.json"
        graph.write_text(json.dumps(name_inputs(json.loads(graph.read_text()), *NAMES)))


def write_rows(file, name, rows):
    """Write the rows that a model reads."""
    rng = np.random.default_rng(0)
    keys, numbers = rng.integers(0, ROWS_OF_TABLE, (SLOTS, rows)), rng.normal(size=(FEATURES, rows)).astype(np.float32)
    columns = list(map(pa.array, keys))
    if name == "strings":
        columns = [pa.compute.binary_join_element_wise("value", array.cast(pa.string()), "_") for array in columns]
    columns = {"id": np.arange(rows), **dict(zip(NAMES[0], columns, strict=True))}
    pq.write_table(pa.table(columns | dict(zip(NAMES[1], numbers, strict=True))), file)


if __name__ == "__main__":
    main()
