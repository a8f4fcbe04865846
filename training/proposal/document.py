"""What is proposed, as a table for people and as a ``features.json``."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from serving.errors import ConfigError
from serving.model.atomic import atomic_write
from training.model.losses import LogLoss


class Proposal(NamedTuple):
    """A proposed feature, a label, or a column that is left out.

    Attributes:
        column: the column's name.
        kind: its type in the file.
        distinct: how many values it has.
        missing_ratio: the share of rows without a value.
        feature: the feature for ``features.json``; None: the column is left out.
        why: a remark on the feature, or why the column is left out, or what is learned of a label.
        loss: the loss of a label, by its name for ``--loss``; empty: the column is not a label.
    """

    column: str
    kind: str
    distinct: int
    missing_ratio: float
    feature: dict[str, Any] | None
    why: str
    loss: str = ""


def shown(proposals: Sequence[Proposal]) -> Iterator[str]:
    """Return the lines of a table for people."""
    rows = [("column", "type", "values", "missing", "feature")]
    for proposal in proposals:
        rows.append(
            (
                proposal.column,
                proposal.kind,
                f"{proposal.distinct:,}",
                f"{proposal.missing_ratio:.1%}",
                text_of(proposal),
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    for column, kind, distinct, missing, text in rows:
        cells = (column.ljust(widths[0]), kind.ljust(widths[1]), distinct.rjust(widths[2]), missing.rjust(widths[3]))
        yield "  ".join((*cells, text))


def write_proposal(proposals: Sequence[Proposal], stem: str) -> tuple[Path, str]:
    """Write the proposed features into a new file, unless a file has them. Other files are kept.

    Args:
        proposals: the features.
        stem: how the file's name begins.

    Returns:
        the file, and a line for the user.

    Raises:
        ConfigError: the file cannot be written.
    """
    features = [proposal.feature for proposal in proposals if proposal.feature is not None]
    lines = ",\n".join(f"    {json.dumps(feature, ensure_ascii=False)}" for feature in features)
    text = f'{{\n  "format": 1,\n  "features": [\n{lines}\n  ]\n}}\n'
    first = Path(f"{stem}.features.json")
    path, others = first, count(2)
    try:
        while path.exists() and path.read_bytes() != text.encode():
            path = Path(f"{stem}-{next(others)}.features.json")
        if not path.exists():
            with atomic_write(path) as file:
                file.write(text.encode())
    except OSError as err:
        raise ConfigError(str(path), "", f"cannot be written: {(err.strerror or str(err)).lower()}") from err
    because = "" if path == first else f", because {first} has others"
    losses = [proposal.loss for proposal in proposals if proposal.loss]
    options = "".join(f" --loss {loss}" for loss in losses) if {*losses} != {LogLoss.option} else ""
    how = f"change the file if you like, and train with --features {path}{options}"
    return path, f"features written to {path}{because}: {how}"


def text_of(proposal: Proposal) -> str:
    """Return the last cell of a proposal's row."""
    return proposal.why if proposal.feature is None else _described(proposal.feature, proposal.why)


def _described(feature: dict[str, Any], why: str) -> str:
    options = [f"buckets {feature['buckets']:,}"] if "buckets" in feature else []
    options += ["log1p"] if "log1p" in feature else []
    if "list" in feature:
        options.append(f"lists of at most {feature['list']['most']}")
    return f"{feature['kind']}{''.join(f', {option}' for option in options)}{f': {why}' if why else ''}"
