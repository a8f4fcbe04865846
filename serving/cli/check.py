"""``hotrow check``: is this configuration, model or repository right, and how much memory will it take."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.config import ModelConfig, memory_needed, read_inference_config, read_model_directory, read_ps_config
from serving.dense.network import open_network
from serving.errors import ConfigError
from serving.model.dense_file import read_dense
from serving.model.graph import read_graph
from serving.model.strict_json import read_json
from serving.repository import ModelRepository


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
    parser.set_defaults(run=check, error_code=1)


def check(options: argparse.Namespace) -> int:
    """Print what the configuration describes; the first thing wrong with it is a HotrowError."""
    models = models_of(options.config)
    total_bytes = 0
    for config in models:
        _check_dense(config)
        needed = memory_needed(config)
        print(f"model {config.name}" + (f" version {config.version}" if config.version else ""))
        for part, size_bytes in needed.items():
            print(f"  {part:<32} {_mib(size_bytes):>16}")
        total_bytes += sum(needed.values())
    print(f"total {'':<28} {_mib(total_bytes):>16}")
    return 0


def models_of(path: Path) -> Sequence[ModelConfig]:
    """The models that ``path`` describes, whichever of the four forms it has.

    Raises:
        ConfigError: it is none of them, or something is wrong with it.
        ModelFileError: a model's file is wrong.
    """
    if path.is_dir():
        is_model = (path / "graph.json").is_file() or any(path.glob("[1-9]*/graph.json"))
        return [read_model_directory(path)] if is_model else ModelRepository(path).configs()
    document = read_json(path)
    if isinstance(document, dict) and "inference" in document:
        return [read_inference_config(path, path.stem)]
    if isinstance(document, dict) and {"models", "volatile_db", "persistent_db"} & document.keys():
        return read_ps_config(path).models
    raise ConfigError(str(path), "", "expected an inference JSON (with 'inference') or a ps.json (with 'models')")


def _check_dense(config: ModelConfig) -> None:
    """Read the dense weights and build the network from them, as serving would."""
    graph = read_graph(config.graph_file)
    open_network(graph, read_dense(config.dense_file, graph), engine="numpy")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.2f} MiB"
