"""The options of commands that open a dense network."""

import argparse
from pathlib import Path
from typing import get_args

from serving.cli.numbers import one_of, ratio
from serving.errors import ConfigError
from serving.option_values import DEFAULT_TOLERANCE, Engine, refuse_idle_calibration


def add_engine_options(parser: argparse.ArgumentParser, default: Engine | None, meaning: str) -> None:
    """Add ``--engine`` and the options of the engine int8.

    Args:
        parser: the parser of the command.
        default: the engine without ``--engine``.
        meaning: the help text of ``--engine``.
    """
    engines = get_args(Engine)
    parser.add_argument(
        "--engine", type=one_of(*engines), default=default, metavar=f"{{{','.join(engines)}}}", help=meaning
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.npz",
        help="with --engine int8: a request (DES, CATCOLUMN, ROWINDEX) to measure the error of one model on "
        "(default: calibration.npz next to the model's graph)",
    )
    parser.add_argument(
        "--tolerance",
        type=ratio,
        metavar="P",
        help=f"with --engine int8: maximum error of a probability on these samples (default: {DEFAULT_TOLERANCE})",
    )


def checked_tolerance(options: argparse.Namespace) -> float:
    """Return the ``--tolerance`` of a command line, or the default.

    Raises:
        ConfigError: ``--tolerance`` or ``--calibration`` is given without the engine int8.
    """
    refuse_idle_calibration(options.calibration, options.engine)
    if options.tolerance is None:
        return DEFAULT_TOLERANCE
    if options.engine != "int8":
        chosen = f"the engine is {options.engine}" if options.engine else "no engine was chosen"
        raise ConfigError("--tolerance", "", f"needs the engine int8, but {chosen}")
    return float(options.tolerance)
