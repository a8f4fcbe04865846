"""The outputs of an imported network: their names and their kinds."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from serving.errors import ConfigError, did_you_mean
from serving.model.inputs import output_fault
from serving.model.names import ANSWER
from serving.model.records import Output, OutputKind

#: Kinds by the names of outputs.
Kinds = Mapping[str, OutputKind]

#: The outputs of a network with one output, if nobody names it.
ONE_ANSWER: Kinds = {ANSWER: "probability"}

#: What to do about answers that are no probabilities.
ADVICE = (
    "if they are logits, use --logits (logits=True), which adds a Sigmoid; "
    "if they are scores or vectors, use --output NAME=score or NAME=vector (outputs={...})"
)


def check_kinds(source: str, kinds: Any) -> None:
    """Raise ConfigError if these are not kinds by the names of outputs."""
    if not isinstance(kinds, Mapping) or not kinds:
        raise ConfigError(source, "outputs", f"expected a dictionary of names and kinds, got {kinds!r}")
    names = list(kinds)
    for at, (name, kind) in enumerate(kinds.items()):
        if not isinstance(name, str) or not name:
            raise ConfigError(source, "outputs", f"expected a name, got {name!r}")
        if fault := output_fault(names[: at + 1]):
            raise ConfigError(source, "outputs", fault)
        if kind not in get_args(OutputKind):
            expected = ", ".join(get_args(OutputKind))
            close = did_you_mean(kind, get_args(OutputKind))
            raise ConfigError(source, "outputs", f"{name!r}: expected one of {expected}, got {kind!r}{close}")


def kinds_of(source: str, names: Sequence[str], kinds: Kinds | None) -> Kinds:
    """Return the kinds of the outputs to keep, in order.

    Args:
        source: the network in messages.
        names: of all its outputs.
        kinds: those to keep; None: all, as probabilities.

    Raises:
        ConfigError: the network has no such output, or a name cannot be used.
    """
    chosen: Kinds = dict.fromkeys(names, "probability") if kinds is None else kinds
    check_kinds(source, chosen)
    for name in chosen:
        if name not in names:
            reason = f"it has no output {name!r}{did_you_mean(name, names)}; it has {', '.join(map(repr, names))}"
            raise ConfigError(source, "outputs", reason)
    return chosen


def kinds_of_answer(source: str, answer: Any, kinds: Kinds | None) -> Kinds:
    """Return the kinds of the outputs of a module or a Keras model.

    Args:
        source: the model in messages.
        answer: its outputs: a dictionary by name, a list, or one tensor.
        kinds: those to keep; None: all, as probabilities. An only tensor is then called ``OUTPUT0``.

    Raises:
        ConfigError: there are other outputs, or several outputs need names.
    """
    if kinds is not None:
        check_kinds(source, kinds)
    if isinstance(answer, Mapping):
        return kinds_of(source, list(answer), kinds)
    if kinds is None and isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        example = {f"name{number}": "probability" for number in range(1, len(answer) + 1)}
        reason = f"returns {len(answer)} values without names; name them in order: outputs={example}"
        raise ConfigError(source, "", reason)
    return ONE_ANSWER if kinds is None else kinds


def outputs_of_widths(kinds: Kinds, widths: Sequence[int]) -> tuple[Output, ...]:
    """Return the outputs, one after another in the columns of the answer."""
    return tuple(
        Output(name, kind, width, sum(widths[:at]))
        for at, ((name, kind), width) in enumerate(zip(kinds.items(), widths, strict=True))
    )


def strange_answers(values: Any, outputs: Sequence[Output]) -> str:
    """Return a message about answers that are not of the kind of their output, or an empty text.

    Args:
        values: [B, W] numbers, the columns of all outputs.
        outputs: the outputs.
    """
    for output in outputs:
        answers = values[:, output.columns]
        is_probability = output.kind == "probability"
        strange = answers[~((answers >= 0) & (answers <= 1)) if is_probability else ~np.isfinite(answers)]
        if len(strange):
            shown = [float(f"{value:.6g}") for value in strange[:3].tolist()]
            name = "" if output.name == ANSWER else f"{output.name!r}: "
            return f"{name}answers such as {shown} are not {'probabilities' if is_probability else 'finite'}"
    return ""
