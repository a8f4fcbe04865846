"""``hotrow publish``: send the rows of a folder to servers that follow an update log."""

import argparse
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from serving.errors import ConfigError, ModelFileError
from serving.model.names import MODEL_NAME, NAME_EXPECTED
from serving.sources import open_checkpoint
from serving.sources.rows import BareRows, TableRows
from serving.stream import MessageEncoder, open_sink, read_settings

_BATCH_ROWS = 65_536
_FILES = (".parquet", ".index")  # that hold nothing but tables, as folders do
_KEY_BYTES = {"I32": 4, "I64": 8}


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "publish",
        description="Publish the rows of a folder to an update log. The folder has a subfolder with key and emb_vector "
        "for each table, as export_delta and sok.incremental_dump write it. It may also be a float32 dump of "
        "SparseOperationKit, DynamicEmb or TFRA, a checkpoint of TensorFlow or RecIS, or a delta of TorchEasyRec. All "
        "rows are checked before any is sent. Publishing a folder twice does no harm.",
    )
    parser.add_argument("delta", type=Path, metavar="DELTA", help="the folder")
    parser.add_argument("url", metavar="URL", help="the log: a folder, kafka://... or redis://...; see docs/updates.md")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name on the servers")
    parser.add_argument(
        "--format", choices=("hotrow", "hps"), default="hotrow", help="the format of the messages (default: hotrow)"
    )
    parser.add_argument(
        "--rows",
        choices=("float32", "float16", "int8"),
        default="float32",
        help="the type of the rows in the messages; hps has float32 (default: float32)",
    )
    parser.add_argument(
        "--key-type", choices=_KEY_BYTES, default="I64", help="the type of the keys in HPS's messages (default: I64)"
    )
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="a JSON file with more settings of the log, such as a password"
    )
    parser.set_defaults(run=publish, error_code=1, parser=parser)


def publish(options: argparse.Namespace) -> int:
    """Send the rows and print how many each table has."""
    if options.format == "hps" and options.rows != "float32":
        options.parser.error("--format hps has rows of float32")
    if not MODEL_NAME.fullmatch(options.model):
        raise ConfigError("hotrow publish", "--model", f"{NAME_EXPECTED}, got {options.model!r}")
    settings = None if options.settings is None else read_settings(options.settings)
    tables = _tables(options.delta)
    encoder = MessageEncoder(options.model, options.format, options.rows, _KEY_BYTES[options.key_type])
    with closing(open_sink(options.url, settings)) as sink:
        for is_sent in (False, True):
            for name, table in tables.items():
                for keys, rows in table.batches(_BATCH_ROWS):
                    for message in encoder.upserts(name, keys, rows, time_ms=time.time_ns() // 1_000_000):
                        if is_sent:
                            sink.send(message.payload, message.key_group, message.topic)
        sink.flush()
    for name, table in tables.items():
        print(f"{name}: published {table.rows:,} rows")
    return 0


def _tables(delta: Path) -> dict[str, TableRows]:
    """Open the tables of a source by the last part of their names.

    Raises:
        ModelFileError: there are no tables, two have the same name, or one cannot be read or has a key twice.
    """
    if delta.is_file() and delta.suffix not in _FILES:
        raise ModelFileError(delta, "expected a folder of tables")
    checkpoint = open_checkpoint(delta)
    tables: dict[str, TableRows] = {}
    for name in checkpoint.tables():
        short, rows = name.rpartition("/")[2], checkpoint.rows(name)
        if short in tables:
            raise ModelFileError(delta, f"expected tables of different names, found {short!r} in {name!r} again")
        tables[short] = rows.as_dtype("fp32") if isinstance(rows, BareRows) else rows
        tables[short].check_keys()
    return tables
