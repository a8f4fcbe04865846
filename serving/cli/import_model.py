"""``hotrow import``: write a model that was not trained with HugeCTR into a model repository."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from kernels.errors import HotrowError
from serving.cli.numbers import ratio, whole_number
from serving.config import read_repository
from serving.errors import ConfigError, told
from serving.importers.outputs import KINDS, Kind
from serving.model.records import Combiner
from serving.model.version_writer import check_target
from serving.parameter_server.preflight import check_tiers

T = TypeVar("T")
_TOLERANCE = 1e-5
COMBINERS: tuple[Combiner, ...] = get_args(Combiner)

_DESCRIPTION = """\
Write a model version from a dense network (ONNX) and the embedding tables that feed it.

Each input of the network has the name of a table and takes its pooled vectors, [B, S, D] or
[B, S * D]. The input 'dense', or what --dense names, takes the dense features, [B, F].
Outputs are [B, L] or [B].
"""
_EPILOG = """\
forms of SOURCE in --table NAME=SOURCE:
  FILE.safetensors  FILE.pt  FILE.pth   the tensor with the table's name, or FILE#TENSOR for another.
                                        float32, float16, bfloat16 [V, D]; row numbers are the keys
  FILE.npy                              float32 or float16 [V, D]; row numbers are the keys
  FILE.npz                              the arrays 'keys' and 'vectors', or its only array
  KEYS,VECTORS                          two files: .npy, or int64 and --row-dtype, little-endian, no header
  FOLDER                                with 'key' and 'emb_vector' (HugeCTR), or a dump of DynamicEmb,
                                        SparseOperationKit, TFRA, RecIS or TorchEasyRec
  PREFIX  FOLDER                        a checkpoint or a SavedModel of TensorFlow, or PREFIX#VARIABLE

examples:
  hotrow import --network dense.onnx --checkpoint model.pt --combiner sum --repository models --name ctr
  hotrow import --network dense.onnx --table ads=ads.npy --table users=dump_folder \\
    --combiner mean --combiner users=sum --repository models --name ctr --dry-run
"""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``hotrow``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "import",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--network", type=Path, required=True, metavar="FILE", help="the dense network, ONNX")
    parser.add_argument(
        "--table", action="append", type=_pair, default=[], metavar="NAME=SOURCE", help="the rows of one table"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="the file with every other table, by name")
    parser.add_argument(
        "--combiner",
        action="append",
        type=_combiner,
        required=True,
        metavar="[NAME=]HOW",
        help="how the rows of one slot are pooled: sum, mean or sqrtn, for all tables or for one",
    )
    parser.add_argument(
        "--dense",
        metavar="NAME",
        help="the input that takes the dense features (default: the input 'dense', if it has no table)",
    )
    parser.add_argument(
        "--row-dtype",
        choices=("fp32", "fp16", "bf16"),
        help="the type of vectors in files without a header (default: fp32, unless half precision fits too)",
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FILE",
        help="a features.json, or a .keras archive with preprocessing layers, so that requests may have raw features",
    )
    parser.add_argument("--logits", action="store_true", help="the network answers with logits; add a Sigmoid")
    parser.add_argument(
        "--output",
        action="append",
        type=_output,
        default=[],
        metavar="NAME=KIND",
        help="the kind of an output: probability (default), score or vector; omit leaves it out",
    )
    parser.add_argument(
        "--sequence",
        action="append",
        type=_sequence,
        default=[],
        metavar="NAME=MOST[,MOST...][,start]",
        help="the maximum keys of each slot of a table whose rows are not pooled; 0: a pooled slot; start: positions "
        "without a key come first",
    )
    parser.add_argument("--repository", type=Path, required=True, metavar="DIR", help="the model repository")
    parser.add_argument("--name", required=True, help="the model's name in the repository")
    parser.add_argument(
        "--version", type=whole_number(1, 2**31 - 1), metavar="N", help="default: one more than the newest version"
    )
    parser.add_argument(
        "--max-batchsize",
        type=whole_number(1, 2**31 - 1),
        default=1024,
        metavar="N",
        help="maximum samples per request (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="FILE.npz",
        help="compare the model's answers with those in this file: arrays DES, CATCOLUMN, ROWINDEX, and OUTPUT0 or "
        "the names of the outputs",
    )
    parser.add_argument(
        "--verify-tolerance",
        type=ratio,
        metavar="X",
        help=f"largest absolute difference that --verify accepts (default: {_TOLERANCE:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and describe the model, but write nothing")
    parser.set_defaults(run=import_model, error_code=1)


def import_model(options: argparse.Namespace) -> int:
    """Describe the model, write it, and verify it if asked."""
    from serving import importers  # the other commands do not need it

    check_target(options.repository, options.name, options.version)
    verify = _verifier(options)
    combiner, combiners = _combiners(options.combiner)
    plan = importers.plan_import(
        options.network,
        combiner,
        _by_name("--table", options.table),
        options.checkpoint,
        combiners,
        logits=options.logits,
        max_batchsize=options.max_batchsize,
        dense=options.dense,
        row_dtype=options.row_dtype,
        features=options.features,
        outputs=_by_name("--output", options.output) or None,
        sequences=_by_name("--sequence", options.sequence),
    )
    for line in plan.describe():
        print(line, flush=True)
    if not options.dry_run:
        progress = _show_progress if sys.stderr.isatty() else None
        path = importers.write_model(plan, options.repository, options.name, options.version, progress, verify)
        print(f"model written to {path}")
        _say_whether_served(options.repository)
    return 0


def _verifier(options: argparse.Namespace) -> Callable[[Path], None] | None:
    """Read the file of ``--verify``, and return a function that compares the written model with it."""
    from serving.importers import read_expected_answers

    if options.verify is None:
        if options.verify_tolerance is not None:
            raise ConfigError("--verify-tolerance", "", "has no effect without --verify")
        return None
    if options.dry_run:
        raise ConfigError("--verify", "", "cannot be used with --dry-run, which writes no model to verify")
    tolerance = _TOLERANCE if options.verify_tolerance is None else options.verify_tolerance
    expected = read_expected_answers(options.verify)

    def verify(folder: Path) -> None:
        found = expected.compare(folder, options.name, tolerance)
        samples = f"{found.samples} sample{'s' * (found.samples > 1)}"
        unknown = f"; keys in no table: {found.defaulted_keys}" if found.defaulted_keys else ""
        print(f"verified with {samples}: largest difference {found.difference:.3g}, tolerance {tolerance:g}{unknown}")

    return verify


def _say_whether_served(repository: Path) -> None:
    """Say how to serve the repository, or warn on standard error why ``hotrow serve`` would refuse it."""
    faults: list[HotrowError] = []
    try:
        check_tiers(read_repository(repository, faults), faults)
    except HotrowError as err:
        faults.append(err)
    for fault in faults:
        print(f"hotrow import: warning: hotrow serve will refuse it: {told(fault)}", file=sys.stderr)
    if not faults:
        print(f"serve it: hotrow serve {repository}")


def _show_progress(table: str, written: int, rows: int) -> None:
    """Rewrite one line of the terminal."""
    print(f"\r{table}: {written / rows:.0%}", end="\n" if written == rows else "", file=sys.stderr, flush=True)


def _pair(text: str) -> tuple[str, str]:
    name, mark, source = text.partition("=")
    if not (name and mark and source):
        raise argparse.ArgumentTypeError(f"expected NAME=SOURCE, got {text[:64]!r}")
    return name, source


def _output(text: str) -> tuple[str, Kind]:
    name, _, named = text.rpartition("=")
    kind = next((kind for kind in KINDS if kind == named), None)
    if kind is None or not name:
        expected = "NAME=probability, NAME=score, NAME=vector or NAME=omit"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text[:64]!r}")
    return name, kind


def _sequence(text: str) -> tuple[str, list[int | str]]:
    name, _, most = text.rpartition("=")
    if not name or re.fullmatch(r"\d{1,5}(,\d{1,5})*(,start)?", most) is None:
        expected = "NAME=MOST or NAME=MOST,MOST and so on, with ,start if padding comes first"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text[:64]!r}")
    return name, [part if part == "start" else int(part) for part in most.split(",")]


def _combiner(text: str) -> tuple[str, Combiner]:
    name, _, how = text.rpartition("=")
    combiner = next((combiner for combiner in COMBINERS if combiner == how), None)
    if combiner is None:
        raise argparse.ArgumentTypeError(f"expected sum, mean, sqrtn or NAME=sum and so on, got {text[:64]!r}")
    return name, combiner


def _combiners(pairs: Sequence[tuple[str, Combiner]]) -> tuple[Combiner, dict[str, Combiner]]:
    """Return the combiner of all tables, and the combiners of single tables."""
    combiners = _by_name("--combiner", pairs)
    if "" not in combiners:
        raise ConfigError("--combiner", "", "expected sum, mean or sqrtn for all tables too, not just single tables")
    return combiners.pop(""), combiners


def _by_name(option: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(option, name, "given twice")
    return dict(pairs)
