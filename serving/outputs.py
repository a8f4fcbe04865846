"""Parts of a model's answers by name: what a request asks for, and what it gets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch, Top
from serving.config import ModelConfig
from serving.errors import RequestError, did_you_mean
from serving.features import FeatureReader, slots_of
from serving.model.records import Output, default_outputs

Floats = NDArray[np.float32]


class Asked(NamedTuple):
    """What a request asks for, in its own words.

    Attributes:
        outputs: the names of outputs; empty: it names none.
        top_k: how many of the best candidates of each user it asks for; None: it does not.
        top_output: the name of the output that ranks them; empty: the model has only one.
    """

    outputs: Sequence[str] = ()
    top_k: int | None = None
    top_output: str = ""


#: What a request asks for that names nothing.
NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best candidates of each user.

    Attributes:
        index: int32[U, k], the numbers of the candidates among those of the user, the best first.
        score: float32[U, k], their values.
    """

    index: NDArray[np.int32]
    score: Floats


def asking(batch: Batch, outputs: Sequence[Output], asked: Asked) -> Batch:
    """Return a batch that asks for outputs and for the best candidates.

    Args:
        batch: the samples.
        outputs: of the model.
        asked: what the request asks for.

    Raises:
        RequestError: the model has no such output, or not so many candidates can be ranked.
    """
    wanted = wanted_outputs(outputs, asked)
    if wanted is None:
        return batch
    if asked.top_k is None:
        return replace(batch, wanted=wanted)
    return replace(batch, wanted=wanted, top=Top(_top_k(asked.top_k, batch), wanted[-1]))


def wanted_outputs(outputs: Sequence[Output], asked: Asked) -> tuple[Output, ...] | None:
    """Return the outputs that a request needs, at the end the output that ranks; None: it asks for nothing by name.

    Raises:
        RequestError: the model has no such output.
    """
    if asked.top_k is None:
        if asked.top_output:
            raise RequestError("top_output: needs top_k")
        if not asked.outputs or asked.outputs == [output.name for output in default_outputs(outputs)]:
            return None  # most requests
        return named_outputs(outputs, asked.outputs)
    named = named_outputs(outputs, asked.outputs)
    by = _ranking_output(outputs, asked.top_output)
    return (*(output for output in named if output != by), by)


def named_outputs(outputs: Sequence[Output], names: Any) -> tuple[Output, ...]:
    """Return the outputs with these names.

    Raises:
        RequestError: the names are no list of names of outputs, or a name comes twice.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Sequence):
        raise RequestError("outputs: expected a list of names")
    known = {output.name: output for output in outputs}
    for at, name in enumerate(names):
        if not isinstance(name, str):
            raise RequestError(f"outputs[{at}]: expected the name of an output, got {type(name).__name__}")
        if name not in known:
            it_has = f"it has {', '.join(map(repr, known))}{did_you_mean(name, known)}"
            reason = f"the model has no output {name[:64]!r}; {it_has}"
            raise RequestError(f"outputs[{at}]: {reason}")
        if name in names[:at]:
            raise RequestError(f"outputs[{at}]: output {name!r} is requested twice")
    return tuple(known[name] for name in names)


def checked_top_k(top_k: Any) -> int:
    """Return the number of candidates that a request asks for.

    Raises:
        RequestError: it is no whole number, or less than 1.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1:
        raise RequestError(f"top_k: expected a whole number from 1, got {top_k!r}")
    return int(top_k)


def _top_k(given: Any, batch: Batch) -> int:
    """Return how many candidates of each user are asked for. Each user must have so many."""
    top_k = checked_top_k(given)
    counts = batch.counts_of_users
    fewest = int(counts.argmin())
    if top_k > counts[fewest]:
        owner = f" of user {fewest}" if counts.size > 1 else ""
        raise RequestError(f"top_k: expected at most {counts[fewest]}, the number of candidates{owner}, got {top_k}")
    return top_k


def _ranking_output(outputs: Sequence[Output], name: Any) -> Output:
    """Return the output that ranks candidates: it has one number for each sample."""
    numbers = [output for output in outputs if output.width == 1 and output.kind != "vector"]
    expected = " or ".join(repr(output.name) for output in numbers)
    if not expected:
        raise RequestError("top_k: the model has no output with one number for each candidate")
    if name == "":
        if len(numbers) > 1:
            raise RequestError(f"top_output: required; expected {expected}")
        return numbers[0]
    for output in outputs:
        if output.name == name and output in numbers:
            return output
        if output.name == name:
            raise RequestError(f"top_output: {name!r} is {_described(output)}; expected {expected}")
    close = did_you_mean(name, [output.name for output in numbers])
    raise RequestError(f"top_output: the model has no output {str(name)[:64]!r}; expected {expected}{close}")


def _described(output: Output) -> str:
    return f"a vector of {output.width}" if output.kind == "vector" else f"{output.width} numbers for each candidate"


def ranking(values: Floats, batch: Batch, top: Top) -> Ranking:
    """Return the best candidates of each user. Candidates with equal values stay in their order.

    Args:
        values: the answer, float32[B, L].
        batch: what it answers.
        top: what is asked for.
    """
    scores, counts = values[:, top.output.begin], batch.counts_of_users
    begins = np.cumsum(counts) - counts
    users = np.repeat(np.arange(counts.size), counts)
    order = np.lexsort((-scores, users))  # stable
    best = order[begins[:, None] + np.arange(top.k)]
    return Ranking((best - begins[:, None]).astype(np.int32), scores[best])


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


def refuse_not_finite(
    values: Floats, outputs: Sequence[Output], batch: Batch, config: ModelConfig, features: FeatureReader | None
) -> None:
    """Raise RequestError if an output has a NaN or an infinity. Other columns of the answer are not looked at.

    Args:
        values: the answer.
        outputs: those that were asked for.
        batch: what it answers.
        config: the model.
        features: what reads its raw features or its inputs by name; None: it has neither.
    """
    for output in outputs:
        answers = values[:, output.columns]
        if isfinite(answers.sum()):  # one pass: a NaN or an infinity reaches the sum
            continue
        is_finite = np.isfinite(answers).all(axis=1)
        if is_finite.all():  # a sum of large scores is infinite
            continue
        sample = int(np.argmin(is_finite))
        what = "the network's answer" if output.begin == 0 and output.width == values.shape[1] else repr(output.name)
        reason = f"sample {sample}: {what} is {_shown(answers[sample])}, not a finite number: "
        names = [slot.name for slot in slots_of(config)] if features is None else features.of_slots
        has_key = dict.fromkeys(names, False)  # a list may have several slots
        for name, keys in zip(names, _keys_of_slots(batch, config, sample), strict=True):
            has_key[name] |= keys > 0
        if empty := [repr(name) for name, is_given in has_key.items() if not is_given]:
            reason += f"the sample has no key in {', '.join(empty)}, and the network may divide by zero; or "
        raise RequestError(f"{reason}its dense features are too large, or a row or a weight of the model is not finite")


def _keys_of_slots(batch: Batch, config: ModelConfig, sample: int) -> list[int]:
    """Return how many keys each slot of a sample has."""
    counts: list[int] = []
    bags = batch.bags or [None] * len(config.tables)
    for table, (_, row_ptrs), of_table in zip(config.tables, batch.tables, bags, strict=True):
        widths = [1] * table.slots if table.sequences is None else table.sequences.widths
        begin = sample * sum(widths)
        places = np.arange(begin, begin + sum(widths)) if of_table is None else of_table[begin : begin + sum(widths)]
        begins = np.cumsum([0, *widths[:-1]])
        counts += np.add.reduceat(np.diff(row_ptrs)[places], begins).tolist()
    return counts


def _shown(answer: Floats) -> str:
    """Return an answer for a message, which a long vector would fill."""
    first = ", ".join(map(str, answer[:8].tolist()))
    return f"[{first}{', ...' if answer.size > 8 else ''}]"
