"""``hotrow compare``: how two versions were trained, side by side."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.model.losses import LOSSES, figure_text


def add_parser(commands: Any) -> None:
    """Add ``hotrow compare`` to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        description="Compare the metrics and the training of two versions.",
        epilog="Example: hotrow compare models/clicks/1 models/clicks/2 --plot compare.svg",
    )
    parser.set_defaults(run=_compare, error_code=1)
    for name in ("first", "second"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="a version's folder, or a model's folder for its newest version"
        )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures and the calibration of both, to .svg, .png or .pdf"
    )


def _compare(options: argparse.Namespace) -> int:
    from training.command.record import TrainingRecord

    first, second = TrainingRecord(options.first), TrainingRecord(options.second)
    names = [first.name, second.name]
    if names[0] == names[1]:
        names = [str(first.folder), str(second.folder)]
    rows = [("", *names), *_figures(first, second), *_differences(first, second)]
    widths = [max(len(row[place]) for row in rows) for place in range(2)]
    for what, one, other in rows:
        print(f"{what:<{widths[0]}}  {one:<{widths[1]}}  {other}".rstrip())
    if options.plot is not None:
        from training.command.plot import draw

        draw(options.plot, dict(zip(names, (first.epochs, second.epochs), strict=True)))
        print(f"picture written to {options.plot}")
    return 0


def _figures(first: Any, second: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the figures of each label, of the epochs whose models were written."""
    for shown, figure in (names for loss in LOSSES for names in loss.shown):
        ours, theirs = (record.result.get(figure, {}) for record in (first, second))
        for label in dict.fromkeys((*ours, *theirs)):
            yield f"{shown} {label}", figure_text(ours.get(label)), figure_text(theirs.get(label))
    yield "epoch", f"{first.epoch} of {len(first.epochs)}", f"{second.epoch} of {len(second.epochs)}"
    seconds = [sum(epoch["seconds"] for epoch in record.epochs) for record in (first, second)]
    yield "seconds", f"{seconds[0]:.1f}", f"{seconds[1]:.1f}"


def _differences(first: Any, second: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what differs of the arguments, the data and the versions of packages."""
    for what in ("arguments", "data", "versions"):
        ours, theirs = (_flat(getattr(record, what)) for record in (first, second))
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name):
                option = "from" if name == "start" else name.replace("_", "-")
                shown = f"--{option}" if what == "arguments" else name
                yield shown, _shown(ours.get(name)), _shown(theirs.get(name))


def _flat(members: dict[str, Any]) -> dict[str, Any]:
    flat = dict[str, Any]()
    for name, value in members.items():
        flat |= {f"{name} of {inner}": it for inner, it in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
