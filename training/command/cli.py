"""``hotrow train``: train a model from a file or from generated samples, and write it for ``hotrow serve``."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from training.built_in import built_in_graphs
from training.model.losses import LOSS_OF_OPTION

_MOST_DIGITS = 32


def add_parser(commands: Any) -> None:
    """Add ``hotrow train`` to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        description="Train a CTR model and write it into a model repository.",
        epilog="Example: hotrow train --synthetic 200000 --output models && hotrow serve models",
    )
    parser.set_defaults(run=partial(_run, parser), error_code=1)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="Criteo data, tab-separated or CSV, plain or gzip; Parquet or CSV files with a column for each slot, or a "
        "folder of them; HugeCTR's Norm and Parquet files or a list of them; Raw files if the graph says so; or .npz "
        "with an array for each input of the graph",
    )
    source.add_argument("--describe", metavar="MODEL", help="print the arrays that a model reads, without training")
    source.add_argument("--synthetic", type=_whole(10), metavar="ROWS", help="generate samples with a known best AUC")
    parser.add_argument(
        "--eval-data", type=Path, metavar="FILE", help="evaluate on this file (default: on the last tenth of --data)"
    )
    parser.add_argument(
        "--columns",
        type=Path,
        metavar="FILE",
        help="a JSON file that names the columns of each input in Parquet or CSV data",
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FILE",
        help="a features.json or a .keras archive: it defines the raw features of Parquet or CSV data",
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="COLUMN",
        help="a label column of raw data; once for each label. Without --features, features are proposed from the "
        "columns and written to a file",
    )
    parser.add_argument(
        "--loss",
        action="append",
        choices=tuple(LOSS_OF_OPTION),
        help="log: learn the probability of a label that is 0 or 1; mse: a regression, so learn a label that is any "
        "number. Once for all labels, or once for each. Default: the graph's loss, which is log in built-in networks; "
        "with --label and without --features, the loss that fits each label's values",
    )
    parser.add_argument(
        "--weight",
        metavar="COLUMN",
        help="a column of Parquet or CSV data with the weight of each row, for training and evaluation",
    )
    parser.add_argument(
        "--embedding-dim",
        type=_whole(1, 65_536),
        metavar="D",
        help="with raw data, the row size of a built-in model (default: 16)",
    )
    parser.add_argument(
        "--hidden",
        type=_widths,
        default=(),
        metavar="N,N",
        help="with raw data, the widths of the deep network of a built-in model, such as 256,128 (default: its own)",
    )
    parser.add_argument("--key-type", choices=("I32", "I64"), default="I64", help="keys of Norm files (default: I64)")
    built_in = ", ".join(built_in_graphs())
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="MODEL",
        help="continue training from a version's folder, or a model's folder for its newest version; new values of the "
        "data are appended to its vocabularies",
    )
    parser.add_argument(
        "--model",
        help=f"a built-in model ({built_in}; default: dcn); auto: a dcn whose row size follows the raw data; "
        "or the JSON file of a HugeCTR training graph",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="the model repository")
    parser.add_argument("--name", help="the model's name in the repository (default: the graph file's name)")
    parser.add_argument("--epochs", type=_whole(1), default=1, metavar="N", help="passes over the data (default: 1)")
    parser.add_argument(
        "--batch-size", type=_whole(1), default=512, metavar="N", help="samples per step (default: 512)"
    )
    parser.add_argument(
        "--window",
        type=_whole(1),
        default=1_000_000,
        metavar="ROWS",
        help="data with more rows is read again in every epoch and shuffled within windows of this size (default: "
        "1000000)",
    )
    parser.add_argument(
        "--seed", type=_whole(0), default=0, metavar="N", help="the seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--learning-rate", type=_rate, metavar="X", help="override the graph's learning rate after warm-up"
    )
    parser.add_argument(
        "--metrics", type=Path, metavar="FILE", help="write the results of every epoch to this JSON file"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the loss, the AUC or RMSE, and the calibration of every epoch, to .svg, .png or .pdf",
    )
    parser.add_argument(
        "--patience",
        type=_whole(1),
        metavar="N",
        help="stop after N epochs without a better log loss or RMSE (default: never). The best epoch's model is "
        "written",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="write checkpoints into this folder")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of --checkpoint")
    parser.add_argument(
        "--checkpoint-steps",
        type=_whole(1),
        default=10_000,
        metavar="N",
        help="write a checkpoint every N steps and after every epoch (default: 10000)",
    )
    parser.add_argument(
        "--publish",
        metavar="URL",
        help="publish changed rows to this update log; needs --checkpoint. See docs/updates.md",
    )
    parser.add_argument(
        "--publish-steps",
        type=_whole(1),
        default=100,
        metavar="N",
        help="publish every N steps, and before every checkpoint (default: 100)",
    )
    parser.add_argument(
        "--publish-format",
        choices=("hotrow", "hps"),
        default="hotrow",
        help="the format of the messages (default: hotrow)",
    )
    parser.add_argument(
        "--publish-rows",
        choices=("float32", "float16", "int8"),
        default="float32",
        help="the type of the rows in the messages; hps has float32 (default: float32)",
    )
    parser.add_argument(
        "--publish-settings",
        type=Path,
        metavar="FILE",
        help="a JSON file with more settings of the log, such as a password",
    )
    parser.add_argument(
        "--sharding",
        choices=("key", "table"),
        default="key",
        help="under torchrun, spread rows over the processes by key, or whole tables (default: key)",
    )
    parser.add_argument(
        "--threads",
        type=_whole(1, 64),
        default=1,
        metavar="N",
        help="threads of one step, at most 64 (default: 1; with 1, the same seed gives the same model)",
    )


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if fault := _why_unfit(options):
        parser.error(fault)
    try:
        from training.command.run import run  # PyTorch takes a second to import, which --help does not need
    except ModuleNotFoundError as err:
        if err.name not in ("torch", "tqdm"):
            raise
        from serving.errors import MissingExtraError

        raise MissingExtraError(err.name, "train", "training") from err
    for line in run(options):
        print(line, flush=True)
    return 0


def _why_unfit(options: argparse.Namespace) -> str:
    """Say which options do not go together; empty if all do."""
    is_raw = options.features is not None or options.label is not None
    faults = {
        "the following arguments are required: --output": options.describe is None and options.output is None,
        "--resume needs --checkpoint": options.resume and options.checkpoint is None,
        "--publish needs --checkpoint, where its outbox is": options.publish is not None and options.checkpoint is None,
        "--publish-format hps has rows of float32": options.publish_format == "hps"
        and options.publish_rows != "float32",
        "--embedding-dim needs --features or --label": options.embedding_dim is not None and not is_raw,
        "--hidden needs --features or --label": bool(options.hidden) and not is_raw,
        "--model auto needs --features or --label": options.model == "auto" and not is_raw,
        "--from needs --data": options.start is not None and options.data is None,
        "--from keeps the version's network, features and loss; leave out --model, "
        "--embedding-dim, --hidden and --loss": options.start is not None
        and any((options.model, options.features, options.embedding_dim, options.hidden, options.loss)),
        "--loss: expected one for all labels, or one for each --label": options.label is not None
        and options.loss is not None
        and len(options.loss) not in (1, len(options.label)),
        "--label: a column is named twice": len(options.label or ()) != len({*(options.label or ())}),
        "--weight: the column is a label": options.weight is not None and options.weight in (options.label or ()),
        "--weight needs --data": options.weight is not None and options.data is None,
        "--features and --label need --data": is_raw and options.data is None,
        "--columns does not go with --features or --label": is_raw and options.columns is not None,
        "--eval-data needs --data; generated samples are evaluated on their last tenth": options.eval_data
        and not options.data,
    }
    return next((fault for fault, is_there in faults.items() if is_there), "")


def _whole(least: int, largest: int = 2**63 - 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or not least <= int(text) <= largest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {largest}, got {text[:32]!r}")
        return int(text)

    return number


def _widths(text: str) -> tuple[int, ...]:
    width = _whole(1, 65_536)
    return tuple(width(part) for part in text.split(","))


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text[:32]!r}")
    return rate
