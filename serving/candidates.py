"""Requests that state once what their samples share, such as the features of a user whose candidates are ranked.

A column of a feature, or of a slot by name, has a row for each sample, a row for each user, or one row for all samples.
The bags of a user's slots are looked up once, and ``Batch.bags`` says which bag each sample has. If every column has a
row for each sample, the batch is that of ``read_columns``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from serving.arrays import flat_integers
from serving.batch import Batch, Ints
from serving.config import ModelConfig
from serving.errors import FeatureValueError, RequestError
from serving.features import Column, FeatureReader, column_of, rows_of
from serving.model.names import CANDIDATES
from serving.reading import read_columns, transform_columns

#: The member of a candidate that the best candidates return, even if the model has no such feature.
ID = "id"


def read_shared(
    config: ModelConfig, reader: FeatureReader, columns: Mapping[str, Column], counts: Any, most: int
) -> Batch:
    """Return a request of raw features as a Batch.

    Args:
        config: the model the request is for.
        reader: of the model's features.
        columns: by feature. A column has a row for each sample, one row for all samples, or a row for each user.
        counts: how many candidates each user has, integers; None: the request has one user.
        most: the most samples of a request with counts, or in which samples share rows.

    Raises:
        RequestError: a value cannot be transformed, or the columns and the counts do not fit the model or each other.
    """
    sizes = {name: rows_of(column) for name, column in columns.items()}
    ordered = reader.ordered(columns, fewest_rows(sizes))
    return read_ordered(config, reader, ordered, sizes, counts, most)


def fewest_rows(sizes: Mapping[str, int]) -> int:
    """Return the rows of absent features."""
    return min(sizes.values(), default=1)


def read_ordered(
    config: ModelConfig,
    reader: FeatureReader,
    columns: Sequence[Column],
    sizes: Mapping[str, int],
    counts: Any,
    most: int,
) -> Batch:
    """Return a request of raw features as a Batch; see ``read_shared``.

    Args:
        config: the model the request is for.
        reader: of the model's features.
        columns: by ``reader.inputs``; absent features have the fewest rows.
        sizes: the rows of the features that are not absent, by name.
        counts: how many candidates each user has.
        most: the most samples.
    """
    users = None if counts is None else _checked(counts, most)
    if empty := next((name for name, size in sizes.items() if not size), ""):
        raise FeatureValueError(empty, None, "expected a value for each sample, got none")
    samples = next((size for size in sizes.values() if size != 1), 1) if users is None else int(users.sum())
    expected = sorted({samples} if users is None else {users.size, samples})
    found = set(sizes.values())
    if not found <= {1, *expected}:
        name, size = next((name, size) for name, size in sizes.items() if size not in (1, *expected))
        why = "" if users is None else f"; {CANDIDATES} adds up to {samples}"
        raise FeatureValueError(name, None, f"expected {' or '.join(map(str, expected))} samples, got {size}{why}")
    is_plain = found == {samples}
    if is_plain and (users is None or samples <= config.max_batchsize):
        return _of_users(read_columns(config, reader, columns, samples), users)
    if not 1 <= samples <= most:
        raise RequestError(f"{samples} candidates, but the model takes 1 to {most}")
    rows = {1: np.zeros(samples, np.int32)}
    if users is not None:
        rows[users.size] = np.repeat(np.arange(users.size, dtype=np.int32), users)
    rows.pop(samples, None)
    try:
        return _of_users(transform_columns(config, reader, columns, samples, rows), users)
    except FeatureValueError as err:
        if err.sample is None or users is None or sizes.get(err.feature, 1) not in {*rows} - {1}:
            raise
        raise RequestError(f"{err.feature} of user {err.sample}: {err.reason}") from err


def _of_users(batch: Batch, counts: Ints | None) -> Batch:
    return batch if counts is None else replace(batch, counts=counts)


def read_document(config: ModelConfig, reader: FeatureReader, document: Mapping[str, Any], most: int) -> Batch:
    """Return one user's candidates as a Batch: ``{"context": {...}, "candidates": [{...}, ...]}``.

    Raises:
        RequestError: see ``read_shared``, or the document has another form. The message begins with the JSON path.
    """
    context, candidates = _parts_of(document, most)
    names = dict.fromkeys(chain(context, *candidates))
    if ID not in reader.names and any(ID in candidate for candidate in candidates):
        del names[ID]  # the answer returns it
    columns: dict[str, Column] = {}
    try:
        reader.check_names(names)
        for feature in reader.inputs:
            name = feature.name
            if name in context:
                columns[name] = column_of(feature, [context[name]], 1)
            elif name in names:
                columns[name] = column_of(feature, [candidate.get(name) for candidate in candidates], len(candidates))
        return read_shared(config, reader, columns, [len(candidates)], most)
    except FeatureValueError as err:
        of_candidates = [at for at, candidate in enumerate(candidates) if err.feature in candidate]
        path = "context." if err.feature in context else ""
        if of_candidates:
            path = f"candidates[{of_candidates[0] if err.sample is None else err.sample}]."
        raise RequestError(f"{path}{err.feature[:64]}: {err.reason}") from err


def _parts_of(document: Mapping[str, Any], most: int) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the context and the candidates of a document, after checking their form."""
    context, candidates = document.get("context"), document.get("candidates")
    if other := next((name for name in document if name not in ("context", "candidates")), None):
        raise RequestError(f"{other[:64]}: expected context and candidates, and nothing else")
    if not isinstance(context, Mapping):
        raise RequestError("context: expected the features that all candidates share, by name")
    if not isinstance(candidates, Sequence) or isinstance(candidates, str | bytes):
        raise RequestError("candidates: expected a list with the features of each candidate")
    if not 1 <= len(candidates) <= most:
        raise RequestError(f"candidates: {len(candidates)} candidates, but the model takes 1 to {most}")
    for at, candidate in enumerate(candidates):
        if not isinstance(candidate, Mapping):
            raise RequestError(f"candidates[{at}]: expected the features of a candidate by name")
        if both := next((name for name in candidate if name in context), None):
            raise RequestError(f"candidates[{at}].{both[:64]}: is in context, too")
    return context, candidates


def _checked(counts: Any, most: int) -> Ints:
    """Return the candidates of each user; the counts are checked before anything of their size is made."""
    users = flat_integers(counts, CANDIDATES)
    if not users.size:
        raise RequestError(f"{CANDIDATES}: expected a count for each user, got none")
    if users.min() < 1 or users.max() > most:
        at = int(np.argmax((users < 1) | (users > most)))
        raise RequestError(f"{CANDIDATES}: expected counts of 1 to {most}, got {users[at]} at position {at}")
    if users.sum() > most:
        raise RequestError(f"{CANDIDATES}: {users.sum()} candidates, but the model takes at most {most}")
    return users
