"""``hotrow export-onnx``: write the dense network of a model as an ONNX file, for other runtimes."""

import argparse
from pathlib import Path
from typing import Any

from serving.config import read_repository
from serving.dense.files import read_onnx
from serving.dense.onnx_file import signature
from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_write
from serving.model.graph import is_network_file
from serving.model.manifest import MANIFEST_NAME


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export-onnx",
        description="Write the dense network of a model as ONNX. It takes dense features [B, F] and pooled embeddings "
        "[B, S, D] and returns probabilities [B, L]. Inputs have the names of the model's JSON. Embedding tables are "
        "not written.",
    )
    parser.add_argument(
        "config",
        type=Path,
        metavar="MODEL",
        help="a model directory, or a v3.0 inference JSON, ps.json or repository of one model",
    )
    parser.add_argument("file", type=Path, metavar="FILE.onnx", help="an existing file is replaced")
    parser.set_defaults(run=export_onnx, error_code=1)


def export_onnx(options: argparse.Namespace) -> int:
    """Write the file and print its inputs and output."""
    if not is_network_file(options.file):
        raise OutputError(f"{options.file}: expected a name that ends in .onnx")
    if (options.file.parent / MANIFEST_NAME).exists():
        reason = f"its folder is a model's version, which takes no file that {MANIFEST_NAME} does not name"
        raise OutputError(f"{options.file}: {reason}; write it elsewhere")
    models = read_repository(options.config).models
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise ConfigError(
            str(options.config), "", f"has {len(models)} models ({names}); give the directory of one model"
        )
    (config,) = models
    content = read_onnx(*config.network_files())
    try:
        with atomic_write(options.file) as file:
            file.write(content)
    except OSError as err:
        raise OutputError(f"{options.file}: cannot be written: {err.strerror}") from err
    print(f"model {config.name} written to {options.file}")
    inputs, outputs = signature(content)
    for name, shape in inputs.items():
        print(f"  input  {name} float32{shape}")
    for name, shape in outputs.items():
        print(f"  output {name} float32{shape}")
    return 0
