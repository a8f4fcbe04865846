"""Parts of a model's answers by name: what a request asks for, and what it gets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import RequestError, did_you_mean
from serving.model.records import Output, default_outputs

Floats = NDArray[np.float32]


def wanted_outputs(outputs: Sequence[Output], names: Any) -> tuple[Output, ...] | None:
    """Return the outputs that a request names, in its order; None: those of requests that name none.

    Args:
        outputs: of the model.
        names: the request's; None or empty: it names none.

    Raises:
        RequestError: the names are no list of names of outputs, or a name comes twice.
    """
    if names is None:
        return None
    if isinstance(names, str | bytes) or not isinstance(names, Sequence):
        raise RequestError("outputs: expected a list of names")
    known = {output.name: output for output in outputs}
    for at, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            what = repr(name[:64]) if isinstance(name, str) else type(name).__name__
            reason = f"the model has no output {what}; it has {', '.join(map(repr, known))}{did_you_mean(name, known)}"
            raise RequestError(f"outputs[{at}]: {reason}")
        if name in names[:at]:
            raise RequestError(f"outputs[{at}]: output {name!r} is asked for twice")
    if not names or tuple(names) == tuple(output.name for output in default_outputs(outputs)):
        return None
    return tuple(known[name] for name in names)


def answers_of(values: Floats, outputs: Sequence[Output]) -> dict[str, Floats]:
    """Return float32[B, D] of each output, C-contiguous, from the columns of an answer."""
    return {output.name: np.ascontiguousarray(values[:, output.columns]) for output in outputs}


def columns_of(values: Floats, outputs: Sequence[Output]) -> Floats:
    """Return the columns of an answer, with NaN in those of other outputs."""
    if sum(output.width for output in outputs) == values.shape[1]:
        return values
    found = np.full_like(values, np.nan)
    for output in outputs:
        found[:, output.columns] = values[:, output.columns]
    return found


def refuse_not_finite(values: Floats, outputs: Sequence[Output]) -> None:
    """Raise RequestError if an output has a NaN or an infinity. Other columns of the answer are not looked at."""
    for output in outputs:
        answers = values[:, output.columns]
        if np.isfinite(answers.sum()):  # one pass: a NaN or an infinity reaches the sum
            continue
        is_finite = np.isfinite(answers).all(axis=1)
        if is_finite.all():  # a sum of large scores is infinite
            continue
        sample = int(np.argmin(is_finite))
        what = "the network's answer" if output.begin == 0 and output.width == values.shape[1] else repr(output.name)
        raise RequestError(
            f"sample {sample}: {what} is {_shown(answers[sample])}, not a finite number: "
            "its dense features are too large, or a row or a weight of the model is not finite"
        )


def _shown(answer: Floats) -> str:
    """Return an answer for a message, which a long vector would fill."""
    first = ", ".join(map(str, answer[:8].tolist()))
    return f"[{first}{', ...' if answer.size > 8 else ''}]"
