"""``hotrow replay``: answer logged requests again with other versions."""

import argparse
import json
from pathlib import Path
from typing import Any

from serving.cli.numbers import column_names


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        description="Replay the requests of `hotrow serve --log-requests` and compare the answers with the log.",
        epilog="Example: hotrow replay requests/clicks models/clicks/1 models/clicks/2 --labels outcomes.parquet "
        "--label clicked --plot replay.svg",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="the log's folder of one model, or one of its files")
    parser.add_argument(
        "models",
        type=Path,
        nargs="+",
        metavar="MODEL",
        help="a version's folder, or a model's folder for its newest version",
    )
    parser.add_argument(
        "--labels", type=Path, metavar="FILE", help="Parquet or CSV files with a label for each request or sample"
    )
    parser.add_argument(
        "--on",
        type=column_names,
        metavar="COLUMNS",
        help="the columns that the log and --labels are joined on, separated by commas (default: request_id)",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="COLUMN",
        help="the column of the label, as in training, in --labels or in the log; once for each label of the model",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the differences, to .svg, .png or .pdf")
    parser.set_defaults(run=_run, error_code=1)


def _run(options: argparse.Namespace) -> int:
    from hotrow.replay.document import replay_document  # reading files and models takes long to import
    from hotrow.replay.report import draw, report
    from serving.errors import OutputError
    from serving.model.atomic import atomic_write
    from serving.model.picture import check_picture

    if options.plot is not None:
        check_picture(options.plot)
    document = replay_document(options.log, options.models, options.label, labels_file=options.labels, on=options.on)
    print(*report(document), sep="\n")
    if options.json is not None:
        try:
            with atomic_write(options.json) as file:
                file.write(json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")
        except OSError as err:
            raise OutputError(f"{options.json}: cannot be written: {(err.strerror or str(err)).lower()}") from err
    if options.plot is not None:
        draw(document, options.plot)
        print(f"\npicture written to {options.plot}")
    return 0
