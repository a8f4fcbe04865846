"""The outputs of an imported network: their names and their kinds."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from serving.errors import ConfigError, did_you_mean
from serving.model.inputs import output_fault
from serving.model.names import ANSWER
from serving.model.records import Output, OutputKind

#: The kind of an output, or ``"omit"`` for an output that is left out.
Kind: TypeAlias = OutputKind | Literal["omit"]
KINDS: tuple[Kind, ...] = (*get_args(OutputKind), "omit")
#: Kinds by the names of outputs.
Kinds = Mapping[str, OutputKind]

#: The outputs of a network with one output, if nobody names it.
ONE_ANSWER: Kinds = {ANSWER: "probability"}

#: What to do about answers that are no probabilities.
ADVICE = (
    "if they are logits, use --logits (logits=True), which adds a Sigmoid; "
    "if they are scores or vectors, use --output NAME=score or NAME=vector (outputs={...}); "
    "to leave an output out, use NAME=omit"
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
        if kind not in KINDS:
            close = did_you_mean(kind, KINDS)
            raise ConfigError(source, "outputs", f"{name!r}: expected one of {', '.join(KINDS)}, got {kind!r}{close}")


def kinds_of(source: str, names: Sequence[str], kinds: Mapping[str, Kind] | None) -> Kinds:
    """Return the kinds of the outputs to keep: first those that have a kind, then the others as probabilities.

    Args:
        source: the network in messages.
        names: of all its outputs.
        kinds: of some of them.

    Raises:
        ConfigError: the network has no such output, no output is kept, or a name cannot be used.
    """
    if kinds is not None:
        check_kinds(source, kinds)
    stated = kinds or {}
    for name in stated:
        if name not in names:
            reason = f"it has no output {name!r}{did_you_mean(name, names)}; it has {', '.join(map(repr, names))}"
            raise ConfigError(source, "outputs", reason)
    chosen: dict[str, Kind] = {**stated, **{name: "probability" for name in names if name not in stated}}
    check_kinds(source, chosen)
    kept: Kinds = {name: kind for name, kind in chosen.items() if kind != "omit"}
    if not kept:
        raise ConfigError(source, "outputs", "expected an output that is not left out")
    return kept


def kinds_of_answer(source: str, answer: Any, kinds: Mapping[str, Kind] | None) -> Kinds:
    """Return the kinds of the outputs of a module or a Keras model.

    Args:
        source: the model in messages.
        answer: its outputs: a dictionary by name, see ``named_in_order``, or one tensor.
        kinds: see ``kinds_of``. An only tensor without a kind is called ``OUTPUT0``.

    Raises:
        ConfigError: there are other outputs.
    """
    if isinstance(answer, Mapping):
        return kinds_of(source, list(answer), kinds)
    if kinds is None:
        return ONE_ANSWER
    if len(kinds) > 1:
        raise ConfigError(source, "outputs", f"returns one value, expected one for each of {', '.join(kinds)}")
    return kinds_of(source, list(kinds), kinds)


def named_in_order(source: str, answer: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a list of outputs by the names that they get in order.

    Raises:
        ConfigError: there is no name for each.
    """
    if not names:
        example = {f"name{number}": "probability" for number in range(1, len(answer) + 1)}
        reason = f"returns {len(answer)} values without names; name them in order: outputs={example}"
        raise ConfigError(source, "", reason)
    if len(answer) != len(names):
        raise ConfigError(source, "", f"returns {len(answer)} values, expected one for each of {', '.join(names)}")
    return dict(zip(names, answer, strict=True))


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
