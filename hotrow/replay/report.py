"""The figures of a replay as lines of text, and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.model.picture import picture
from training.command.plot import draw_calibration
from training.model.losses import LOSSES, figure_text

_SHOWN = 5  # of the largest differences, and of the values of features
_LONGEST = 40

Document = dict[str, Any]


def report(document: Document) -> Iterator[str]:
    """Yield lines about a log and its replays."""
    log, models = document["log"], document["models"]
    versions = ", ".join(f"version {version} ({count:,})" for version, count in log["versions"].items())
    answered = f", answered by {versions}" if versions else ""
    times = f", from {log['from']} to {log['to']}" if log["from"] else ""
    yield f"{log['path']}: {log['requests']:,} requests with {log['samples']:,} samples{times}{answered}"
    if "labels" in document:
        of = document["labels"]
        more = f"; {of['ambiguous']:,} rows of the log have an ambiguous key" * bool(of["ambiguous"])
        yield f"{of['path']}: labels of {of['samples']:,} samples{more}"
    yield ""
    yield from text_table([("", "log", *(model["model"] for model in models)), *_figures(document)])
    for model in models:
        yield from _notes(model)
    for model in models:
        yield from _details(model)


def _figures(document: Document) -> Iterator[Sequence[str]]:
    models: Sequence[Document] = document["models"]
    changes = [model["differences"] for model in models]

    def row(name: str, log: str, cells: Iterator[str]) -> Sequence[str]:
        return name, log, *cells

    yield from _of_outputs(document)
    yield row("largest", "", (figure_text(change.get("largest_absolute")) for change in changes))
    unit = " std" if any(of != 1 for change in changes for of in change.get("units", ())) else ""
    for size in (0.01, 0.1):
        shares = (share(change.get("share_above", {}).get(str(size))) for change in changes)
        yield row(f"larger than {size}{unit}", "", shares)
    asked = ((model["keys"]["defaulted"], model["keys"]["looked_up"]) for model in models)
    yield row("unknown keys", "", (share(unknown / max(keys, 1)) for unknown, keys in asked))
    for name in dict.fromkeys(name for model in models for name in model["unknown_values"]):
        yield row(f"unknown {name}", "", (_unknown(model["unknown_values"].get(name)) for model in models))
    for part in ("p50", "p99"):
        yield row(f"{part} ms", "", (figure_text(model["milliseconds"].get(part)) for model in models))
    for label, of_log in document.get("quality", {}).items():
        for name, key in (names for loss in LOSSES for names in loss.shown):
            found = [model["quality"][label].get(key) for model in models]
            if key in of_log or any(value is not None for value in found):
                yield row(f"{name} {label}", figure_text(of_log.get(key)), map(figure_text, found))


def _of_outputs(document: Document) -> Iterator[Sequence[str]]:
    """Yield the rows of each of several outputs, or of an only output."""
    by_version = [
        model["outputs"] or {"": {**model, **model["differences"], "logged": document["log"]["mean_prediction"]}}
        for model in document["models"]
    ]
    for output in dict.fromkeys(chain.from_iterable(by_version)):
        own, of = [version.get(output, {}) for version in by_version], f" {output}" if output else ""
        logged = next(comparison["logged"] for comparison in own if comparison)
        yield (
            f"mean prediction{of}",
            figure_text(logged),
            *(figure_text(comparison.get("mean_prediction")) for comparison in own),
        )
        for name, key in (("mean difference", "mean"), ("mean size", "mean_absolute")):
            yield f"{name}{of}", "", *(figure_text(comparison.get(key)) for comparison in own)


def _unknown(counts: Mapping[str, int] | None) -> str:
    return "" if counts is None else share(counts["unknown"] / max(sum(counts.values()), 1))


def _notes(model: Document) -> Iterator[str]:
    refused = model["refused"]
    if refused["requests"]:
        yield f"{model['model']} refused {refused['requests']:,} requests; the first is {refused['first']}"
    if model["other_kind"]:
        yield (
            f"note: {model['model']} and the log answer with different kinds of numbers, such as prices and "
            "probabilities, so their differences mean nothing"
        )
    if model["absent_features"]:
        yield f"{model['model']}: the log has no {', '.join(model['absent_features'])}, so replay treats it as missing"


def _details(model: Document) -> Iterator[str]:
    found = model["differences"]
    groups = sorted(found.get("by_feature", ()), key=lambda group: -abs(group["mean_difference"]))[:_SHOWN]
    if groups:
        yield f"\n{model['model']}: mean difference by feature"
        rows = [
            (
                f"  {entry['feature']} {_value(entry['value'])}",
                f"{entry['mean_difference']:+.4f}",
                f"{entry['samples']:,} samples",
            )
            for entry in groups
        ]
        yield from text_table(rows)
    if found.get("largest"):
        yield f"\n{model['model']}: largest differences"
        for one in found["largest"][:_SHOWN]:
            before, after = (", ".join(map(figure_text, one[key])) for key in ("logged", "predicted"))
            yield f"  request {one[REQUEST_ID]} sample {one[REQUEST_SAMPLE]}: {before} in the log, {after} now"


def _value(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def share(value: float | None) -> str:
    """Return a share as a percentage."""
    return "" if value is None else f"{value:.1%}"


def text_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines, with the first column on the left and the others on the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def draw(document: Document, file: Path) -> None:
    """Draw the differences, the features that they are in and, with labels, the calibration.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    models, labels = document["models"], list(document.get("quality", {}))
    with picture(file, (6.0 * (2 + bool(labels)), 4.5)) as figure:
        histogram, features, *rest = figure.subplots(1, 2 + bool(labels))
        for model in models:
            counted = model["differences"].get("histogram")
            if counted:
                histogram.stairs(counted["counts"], counted["edges"], label=model["model"])
            groups = model["differences"].get("by_feature", ())
            shown = sorted(groups, key=lambda group: -abs(group["mean_difference"]))[: 2 * _SHOWN]
            names = [f"{group['feature']} {_value(group['value'])}" for group in shown]
            features.barh(names, [group["mean_difference"] for group in shown], alpha=0.6, label=model["model"])
        histogram.set(title="differences of predictions", xlabel="now - log", ylabel="samples", yscale="symlog")
        features.set(title="mean difference by feature", xlabel="now - log")
        for calibration in rest:
            sides = [("log", document), *((model["model"], model) for model in models)]
            found = {
                f"{name}, {label}": of["quality"][label].get("calibration") for label in labels for name, of in sides
            }
            draw_calibration(calibration, "calibration", {name: groups for name, groups in found.items() if groups})
        for axes in (histogram, features, *rest):
            axes.grid(visible=True, alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
