"""``hotrow check``: is this configuration, model or repository right, and how much memory will it take."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.calibration import refuse_idle_calibration, refuse_shared_calibration
from serving.cli.engine_options import add_engine_options
from serving.config import (
    ModelConfig,
    VolatileDbConfig,
    memory_needed,
    read_inference_config,
    read_model_directory,
    read_ps_config,
)
from serving.config.model_directory import GRAPH_FILE, complete_versions
from serving.dense.calibration import Quantization
from serving.dense.files import open_dense
from serving.dense.network import Engine
from serving.errors import ConfigError
from serving.lookup import LookupSession
from serving.model.graph import is_network_file
from serving.model.strict_json import read_json
from serving.parameter_server import ParameterServer
from serving.parameter_server.loading import LOAD_BATCH_ROWS, table_source
from serving.repository import ModelRepository
from serving.session import InferenceSession
from serving.storage import MemoryStore
from serving.storage.row_dtype import rounding_error


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="validate a configuration, a model or a repository without serving it",
        description="Validate, without serving, and print the memory that each table takes.",
    )
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="a v3.0 inference JSON, a ps.json, a model directory or a repository",
    )
    add_engine_options(parser, None, "also open the dense network in this engine, and say what int8 costs")
    parser.set_defaults(run=check, error_code=1)


def check(options: argparse.Namespace) -> int:
    """Print what the configuration describes; the first thing wrong with it is a HotrowError."""
    models, tier = read_config(options.config)
    refuse_idle_calibration(options.calibration, options.engine)
    refuse_shared_calibration(options.calibration, len(models))
    total_bytes = 0
    for config in models:
        quantization = _check_dense(config, options)
        rounding = _check_tables(config)
        needed = memory_needed(config)
        print(f"model {config.name}" + (f" version {config.version}" if config.version else ""))
        if quantization is not None:
            print(f"  {quantization}")
        for part, size_bytes in needed.items():
            print(f"  {part:<32} {_mib(size_bytes):>16}" + rounding.get(part, ""))
        total_bytes += sum(needed.values())
    print(f"total {'':<28} {_mib(total_bytes):>16}")
    limit = _limit(tier)
    if limit:
        print(f"that is with every row in RAM; {limit}")
    return 0


def read_config(path: Path) -> tuple[Sequence[ModelConfig], VolatileDbConfig]:
    """The models that ``path`` describes, whichever of the four forms it has, and the memory tier they would have.

    Raises:
        ConfigError: it is none of them, or something is wrong with it.
        ModelFileError: a model's file is wrong.
    """
    if path.is_dir():
        if (path / GRAPH_FILE).is_file() or complete_versions(path):
            return [read_model_directory(path)], VolatileDbConfig()
        repository = ModelRepository(path)
        return repository.configs(), repository.ps_config().volatile_db
    document = read_json(path)
    if isinstance(document, dict) and "inference" in document:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", path.stem)[:120]  # the file does not say what the model is called
        return [read_inference_config(path, name)], VolatileDbConfig()
    if isinstance(document, dict) and {"models", "volatile_db", "persistent_db"} & document.keys():
        ps = read_ps_config(path)
        return ps.models or ModelRepository(path.parent).configs(), ps.volatile_db
    raise ConfigError(str(path), "", "expected an inference JSON (with 'inference') or a ps.json (with 'models')")


def _limit(tier: VolatileDbConfig) -> str:
    """What a memory tier that holds less than every row says about itself; empty where it holds them all."""
    if tier.type == "disabled":
        return "volatile_db is disabled, and tables take none"
    if tier.type == "redis_cluster":
        return "volatile_db is Redis, and tables take none here"
    if tier.capacity_rows is not None:
        return f"volatile_db.capacity_rows lets {tier.capacity_rows:,} in"
    if tier.capacity_bytes is not None:
        return f"volatile_db.capacity_bytes gives tables {_mib(tier.capacity_bytes)}"
    if tier.capacity_rows_per_table is not None:
        return f"volatile_db.capacity_rows_per_table limits {len(tier.capacity_rows_per_table):,} of the tables"
    return ""


def _check_dense(config: ModelConfig, options: argparse.Namespace) -> Quantization | None:
    """Open the dense network; layers and weights, unless an engine is asked for, on NumPy, which is always there."""
    if options.engine == "int8":
        with ParameterServer([MemoryStore()]) as server:
            server.load_model(config)
            lookup = LookupSession(server, config)
            measured = {"calibration": options.calibration, "tolerance": options.tolerance}
            return InferenceSession(config, 0, lookup, options.engine, **measured).quantization
    engine: Engine = options.engine or ("auto" if is_network_file(config.dense_file) else "numpy")
    open_dense(config.graph_file, config.dense_file, config.onnx_file, engine)
    return None


def _check_tables(config: ModelConfig) -> dict[str, str]:
    """Read every row, as loading would; say of narrow tables, by name, how far their rows are from the files'."""
    said = {}
    for table in config.tables:
        batches = table_source(config, table).model.batches(LOAD_BATCH_ROWS)
        error = rounding_error("memory", config.full_name(table), table.row_dtype, batches)
        if table.row_dtype != "fp32":
            said[table.name] = (
                f"  {table.row_dtype}, off by {error.mean:.2g} on average and {error.largest:.2g} at most"
                f" (mean magnitude {error.magnitude:.2g})"
            )
    return said


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.2f} MiB"
