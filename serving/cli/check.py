"""``hotrow check``: validate a configuration, a model or a repository, and print the memory that it takes."""

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.errors import HotrowError
from serving.calibration import refuse_shared_calibration
from serving.cli.engine_options import add_engine_options, checked_tolerance
from serving.cli.numbers import column_names
from serving.cli.snapshot import describe_snapshot
from serving.config import (
    DisabledConfig,
    ModelConfig,
    SharedMemoryConfig,
    TableConfig,
    VolatileDbConfig,
    read_model,
    read_repository,
)
from serving.dense.calibration import Quantization
from serving.dense.files import open_dense
from serving.errors import ConfigError, about, told
from serving.features import FeatureReader, changes, open_features, triton_inputs
from serving.lookup import LookupSession
from serving.lookup.cache_plan import Memory, buffers_memory, caches_memory, idle_refresh, keys_left_out, plan_caches
from serving.model.graph import is_network_file
from serving.model.snapshot_model import SnapshotModel, is_snapshot
from serving.model.triton_config import TritonTensors, triton_faults, write_triton_files
from serving.option_values import Engine
from serving.parameter_server import ParameterServer
from serving.parameter_server.preflight import check_tiers, connect_tiers
from serving.parameter_server.table_files import memory_needed, table_source
from serving.parameter_server.truth import LOAD_BATCH_ROWS
from serving.session import InferenceSession
from serving.storage import MemoryStore, open_snapshot
from serving.storage.rocksdb.engine import has_database
from serving.storage.row_codec import rounding_error


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        description="Check a configuration, a model or a repository without serving it, and print the memory of each "
        "table.",
    )
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="a v3.0 inference JSON, a ps.json, a model directory, a repository or a snapshot",
    )
    parser.add_argument(
        "--full", action="store_true", help="also read every byte of snapshots and every row of RocksDB"
    )
    parser.add_argument(
        "--write-config",
        action="store_true",
        help="give each config.pbtxt the inputs and outputs of the model's newest version",
    )
    parser.add_argument(
        "--skew",
        type=Path,
        nargs=2,
        metavar=("LOG", "DATA"),
        help="compare the features of logged requests with those of training data, Parquet or CSV files",
    )
    parser.add_argument(
        "--on",
        type=column_names,
        metavar="COLUMNS",
        help="the columns that --skew joins on, separated by commas (default: request_id)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="list what clients of the version OLD must change for CONFIG; each is a version's folder, or a model's "
        "folder for its newest version",
    )
    parser.add_argument("--connect", action="store_true", help="also connect to Redis, if it is a tier")
    add_engine_options(parser, None, "also open the dense network with this engine, and print the error of int8")
    parser.set_defaults(run=_run, error_code=1)


def _run(options: argparse.Namespace) -> int:
    if options.skew is None and options.on is not None:
        raise ConfigError("--on", "", "needs --skew")
    alone = next((name for name in ("skew", "against") if getattr(options, name) is not None), None)
    for name in ("against", "full", "write_config", "connect", "engine") if alone is not None else ():
        if name != alone and getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}", "", f"has no effect with --{alone}")
    if options.against is not None:
        return _compare_with_old(options)
    return check(options) if options.skew is None else _compare_with_training(options)


def _compare_with_training(options: argparse.Namespace) -> int:
    """Print how the features of logged requests differ from those of training data."""
    skew = import_module("hotrow.replay.skew").skew  # only commands that need it import it
    for line in skew(options.config, *options.skew, options.on or ["request_id"]):
        print(line)
    return 0


def check(options: argparse.Namespace) -> int:
    """Print the memory that the configuration takes, or one line for each fault."""
    if is_snapshot(options.config):
        return _check_snapshot(options)
    faults: list[HotrowError] = []
    config = read_repository(options.config, faults)
    options.tolerance = checked_tolerance(options)
    refuse_shared_calibration(options.calibration, len(config.models))
    total_bytes = sum(_check_model(model, options, faults, config.headroom_ratio) for model in config.models)
    newest = {folder: model for model in sorted(config.models, key=_version) if (folder := _folder(model)) is not None}
    triton = [line for folder, model in newest.items() for line in _check_triton(folder, model, options, faults)]
    warnings = check_tiers(config, faults, full=options.full)
    answers = connect_tiers(config, faults) if options.connect else []
    if faults:
        for line in dict.fromkeys(map(told, faults)):  # int8 also loads the tables, so a fault may appear twice
            print(f"hotrow check: {line}", file=sys.stderr)
        return 1
    of_caches = [line for model in config.models for say in (idle_refresh, keys_left_out) if (line := say(model))]
    for line in (*triton, *warnings, *of_caches):
        print(f"hotrow check: warning: {line}", file=sys.stderr)
    print(f"total {'':<28} {_mib(total_bytes):>16}")
    if options.connect:
        print(*(answers or ["--connect has no effect: no tier is Redis"]), sep="\n")
    limit = _limit(config.volatile_db)
    if limit:
        print(f"this is the total with every row in RAM; {limit}")
    path = config.persistent_db.path
    if path is not None and not has_database(path):
        print("there is no database yet")
    elif path is not None and options.full:
        print("every row of the database was read")
    elif path is not None:
        print("the database was not read; --full reads every row of it")
    return 0


def _compare_with_old(options: argparse.Namespace) -> int:
    """Print what clients of the old version must change."""
    new, old = read_model(options.config), read_model(options.against)
    lines = list(changes(new, old))
    print(f"from {old.name} version {old.version} to {new.name} version {new.version}")
    print(*lines or ["clients need not change anything"], sep="\n")
    return 0


def _check_model(
    config: ModelConfig, options: argparse.Namespace, faults: list[HotrowError], headroom_ratio: float
) -> int:
    """Print the memory that a model takes and return its bytes, or add its faults and return 0."""
    quantization, rounding, before = None, {}, len(faults)
    caches: Memory | None = None
    features: FeatureReader | None = None
    with about(config.name, faults):
        features = open_features(config)
    with about(config.name, faults):
        quantization = _check_dense(config, options)
    for table in config.tables if config.base is None else ():
        with about(config.name, faults):
            rounding[table.name] = _check_table(config, table, options.full)
    if config.gpu_cache.wanted and config.base is None:
        with about(config.name, faults):
            caches = caches_memory(plan_caches(config))
    if len(faults) > before:
        return 0
    needed = dict(memory_needed(config, headroom_ratio))
    for name, size_bytes in features.vocabulary_bytes.items() if features is not None else ():
        needed[f"vocabulary of {name}"] = size_bytes
    shared = "" if config.base is None else f", on the tables of version {config.base.version}"
    print(f"model {config.name} version {config.version}{shared}")
    if quantization is not None:
        print(f"  {quantization}")
    for part, size_bytes in needed.items():
        print(f"  {part:<32} {_mib(size_bytes):>16}" + rounding.get(part, ""))
    if caches:
        print(_on_gpus("caches, if GPUs are used", caches))
        print(_on_gpus("caches' worker buffers", buffers_memory(config)))
    return sum(needed.values())


def _version(config: ModelConfig) -> int:
    return config.version


def _folder(config: ModelConfig) -> Path | None:
    """Return the folder of a model's versions; None if the model has no version folder."""
    return config.graph_file.parent.parent if config.version and config.graph_file is not None else None


def _check_triton(
    folder: Path, config: ModelConfig, options: argparse.Namespace, faults: list[HotrowError]
) -> Iterator[str]:
    """Yield how a model's Triton configuration differs from its newest version, or correct it."""
    with about(config.name, faults):
        features = open_features(config)
        raw_inputs = () if features is None else triton_inputs(features.definition)
        tensors = TritonTensors(config.dense_dim, config.outputs, raw_inputs)
        if options.write_config:
            for path in write_triton_files(folder, tensors):
                print(f"{path} now has the inputs and outputs of version {config.version}")
        else:
            yield from (f"{line}; --write-config corrects it" for line in triton_faults(folder, tensors))


def _on_gpus(part: str, taken: Memory) -> str:
    """Return the line about memory that is only taken if a GPU is used."""
    pinned = f" and {_mib(taken.host_bytes)} page-locked on the host" if taken.host_bytes else ""
    return f"  {part:<32} {_mib(taken.device_bytes):>16}  on each GPU{pinned}, not in the total"


def _limit(tier: VolatileDbConfig | DisabledConfig) -> str:
    """Return a line about the fastest tier, or an empty text if it keeps every row in RAM."""
    if isinstance(tier, DisabledConfig):
        return "volatile_db is disabled, and tables take no memory"
    if tier.type == "snapshot":
        return "volatile_db is a snapshot: its rows are in files, and the page cache keeps as many of them as fit"
    if tier.type == "redis_cluster":
        return "volatile_db is Redis, and tables take no memory here"
    if isinstance(tier, SharedMemoryConfig):
        return ""
    if tier.capacity_rows is not None:
        return f"volatile_db.capacity_rows allows {tier.capacity_rows:,}"
    if tier.capacity_bytes is not None:
        return f"volatile_db.capacity_bytes allows {_mib(tier.capacity_bytes)}"
    if tier.capacity_rows_per_table is not None:
        return f"volatile_db.capacity_rows_per_table limits {len(tier.capacity_rows_per_table):,} of the tables"
    return ""


def _check_dense(config: ModelConfig, options: argparse.Namespace) -> Quantization | None:
    """Open the dense network, if there is one. Without ``--engine`` NumPy runs its layers."""
    if config.dense_file is None and options.engine is None:
        return None
    if options.engine == "int8":
        with ParameterServer([MemoryStore()]) as server:
            lookup = LookupSession(server, server.load_model(config))
            measured = {"calibration": options.calibration, "tolerance": options.tolerance}
            return InferenceSession(config, 0, lookup, options.engine, **measured).quantization
    graph_file, dense_file = config.network_files()
    engine: Engine = options.engine or ("auto" if is_network_file(dense_file) else "numpy")
    open_dense(graph_file, dense_file, config.onnx_file, engine)
    return None


def _check_snapshot(options: argparse.Namespace) -> int:
    """Check one snapshot file."""
    with open_snapshot(options.config) as snapshot:
        snapshot.check(full=options.full)
        print(*describe_snapshot(snapshot), sep="\n")
    print(
        "every byte is as it was written" if options.full else "header and index are sound; --full reads the rows too"
    )
    return 0


def _check_table(config: ModelConfig, table: TableConfig, full: bool) -> str:
    """Read every row, and describe the rounding error of a table with narrow rows."""
    model = table_source(config, table).model
    if isinstance(model, SnapshotModel):
        model.check(full=full)
        if table.row_dtype == "fp32":
            return f"  {model.snapshot.row_dtype} in a snapshot"
    batches = model.batches(LOAD_BATCH_ROWS)
    error = rounding_error("memory", config.hps_name(table), table.row_dtype, batches)
    if table.row_dtype == "fp32":
        return ""
    return (
        f"  {table.row_dtype}, off by {error.mean:.2g} on average and {error.largest:.2g} at most"
        f" (mean magnitude {error.magnitude:.2g})"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.2f} MiB"
