"""Requests that say once what samples share, such as the features of a user whose candidates are ranked.

A column of a feature, or of a slot by name, has a row for each sample, a row for each user, or one row for all samples.
The bags of a user's slots are looked up once, and ``Batch.bags`` says which bag each sample has. If every column has a
row for each sample, the batch is that of ``read_features``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.host import split_by_table
from serving.arrays import flat_integers
from serving.batch import (
    KEYS,
    Batch,
    Ints,
    JoinedKeys,
    Places,
    TableKeys,
    check_keys,
    join_keys,
    ranges,
    read_dense,
    read_features,
    too_many_keys,
)
from serving.config import ModelConfig
from serving.errors import FeatureValueError, RequestError
from serving.features import Column, FeatureReader, Transformed, column_of, missing_column, rows_of, spread
from serving.model.names import CANDIDATES
from serving.model.slot_sizes import shift_keys

#: How many candidates a request may have, unless a model or an option says more or less.
MAX_CANDIDATES = 4096

Mask = NDArray[np.bool_]


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
    users = None if counts is None else _checked(counts, most)
    samples = next((size for size in sizes.values() if size != 1), 1) if users is None else int(users.sum())
    expected = sorted({samples} if users is None else {users.size, samples})
    for name, size in sizes.items():
        if size not in (1, *expected):
            raise FeatureValueError(name, None, f"expected {' or '.join(map(str, expected))} samples, got {size}")
    is_plain = bool(sizes) and set(sizes.values()) == {samples}
    if is_plain and (users is None or samples <= config.max_batchsize):
        return read_features(config, reader, reader.ordered(columns, samples), samples)
    if not 1 <= samples <= most:
        raise RequestError(f"{samples} candidates, but the model takes 1 to {most}")
    rows = {1: np.zeros(samples, np.int32)}
    if users is not None:
        rows[users.size] = np.repeat(np.arange(users.size, dtype=np.int32), users)
    rows.pop(samples, None)
    return _Shared(config, reader, columns, sizes, rows, samples).read()


def read_document(config: ModelConfig, reader: FeatureReader, document: Mapping[str, Any], most: int) -> Batch:
    """Return one user's candidates as a Batch: ``{"context": {...}, "candidates": [{...}, ...]}``.

    Raises:
        RequestError: see ``read_shared``, or the document has another form. The message begins with the JSON path.
    """
    context, candidates = _parts_of(document, most)
    names = dict.fromkeys(chain(context, *candidates))
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
        path = "context"
        if err.feature not in context:
            of_candidates = (at for at, candidate in enumerate(candidates) if err.feature in candidate)
            path = f"candidates[{next(of_candidates, 0) if err.sample is None else err.sample}]"
        raise RequestError(f"{path}.{err.feature[:64]}: {err.reason}") from err


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


class _Group(NamedTuple):
    """The slots whose columns have the same number of rows.

    Attributes:
        rows: the row of each sample; None: each sample has its own, in order.
        slots: bool[S], which slots they are.
        sent: the keys of these slots, of each table that has some.
        tables: the same with the keys of the table, in place of keys that begin at 0 in each slot.
        most_keys: the most keys of a row, of the same tables.
    """

    rows: Places | None
    slots: Mask
    sent: Mapping[int, TableKeys]
    tables: Mapping[int, TableKeys]
    most_keys: Mapping[int, int]


class _Shared:
    """A request in which some columns have fewer rows than there are samples.

    Each number of rows has a pass of its own through the features. A slot belongs to the most rows of the features that
    it is made of, so a cross of a user's and an item's feature has a bag for each sample.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: FeatureReader,
        columns: Mapping[str, Column],
        sizes: Mapping[str, int],
        rows: Mapping[int, Places],
        samples: int,
    ) -> None:
        self._config, self._reader, self._rows, self._samples = config, reader, rows, samples
        self._fewest = fewest = min(sizes.values(), default=1)
        self._columns = {
            feature.name: columns.get(feature.name) or missing_column(feature, fewest) for feature in reader.inputs
        }
        self._sizes = {name: sizes.get(name, fewest) for name in self._columns}
        self._of_slots = np.array([max(map(self._sizes.__getitem__, names)) for names in reader.inputs_of_slots])
        self._of_dense = np.array([self._sizes[name] for name in reader.dense_names], np.int64)
        self._begins = [0, *accumulate(table.slots for table in config.tables)]

    def read(self) -> Batch:
        config, reader = self._config, self._reader
        dense = np.empty((self._samples, config.dense_dim), np.float32)
        groups: list[_Group] = []
        counted: list[Transformed] = []
        for size in sorted(set(self._sizes.values())):
            of_dense = np.flatnonzero(self._of_dense == size)
            slots = self._of_slots == size
            of_slots = np.flatnonzero(slots).tolist()
            found = reader.transform_some(self._inputs(of_slots, size), size, of_slots, of_dense.tolist())
            rows = self._rows.get(size)
            if of_dense.size:
                dense[:, of_dense] = found.dense if rows is None else found.dense[rows]
            groups.append(self._group(found, slots, size))
            counted.append(found)
        dense = read_dense(dense, self._samples, config)
        bags = self._bags(groups)
        sent = given = _joined([group.sent for group in groups], len(bags))
        if config.slot_keys == "unshifted":
            given = _joined([group.tables for group in groups], len(bags))
        self._check_limits(groups, sent, bags)
        for found in counted:
            reader.count(found)
        return Batch(dense, given, sent if reader.has_keys else [*self._columns.values()], bags, self._rows)

    def _inputs(self, slots: Sequence[int], size: int) -> list[Column | None]:
        """Return the columns that slots of this number of rows need, with so many rows."""
        crossed = {name for slot in slots if len(names := self._reader.inputs_of_slots[slot]) > 1 for name in names}
        return [
            column if self._sizes[name] == size else self._spread(name, size) if name in crossed else None
            for name, column in self._columns.items()
        ]

    def _spread(self, name: str, size: int) -> Column:
        rows = self._rows[self._sizes[name]] if size == self._samples else np.zeros(size, np.int32)
        return spread(self._columns[name], rows)

    def _group(self, found: Transformed, slots: Mask, size: int) -> _Group:
        """Return the keys of the slots of this number of rows."""
        check_keys(found.keys, self._config.key_type, KEYS)
        counts = np.add.reduceat(slots, self._begins[:-1], dtype=np.int64)
        places = np.flatnonzero(counts).tolist()
        rows = self._rows.get(size)
        if not places:
            return _Group(rows, slots, {}, {}, {})
        of_tables = counts[places].tolist()
        split = split_by_table(found.keys, found.row_ptrs, of_tables)
        assert split is not None  # the transform made the offsets
        tables = JoinedKeys(split[0], split[1], [size * count + 1 for count in of_tables]).tables
        sent = dict(zip(places, tables, strict=True))
        given = sent
        if self._config.slot_keys == "unshifted":
            given = {place: self._shifted(place, of_table, slots) for place, of_table in sent.items()}
        return _Group(rows, slots, sent, given, dict(zip(places, split[3], strict=True)))

    def _shifted(self, place: int, of_table: TableKeys, slots: Mask) -> TableKeys:
        """Return the keys of the table, in place of keys that begin at 0 in each of its slots of a group."""
        offsets, sizes = ranges(self._config.tables[place].slot_ranges)
        chosen = slots[self._begins[place] : self._begins[place + 1]]
        keys = shift_keys(of_table.keys, np.diff(of_table.row_ptrs), (offsets[chosen], sizes[chosen]))
        return of_table._replace(keys=keys)

    def _bags(self, groups: Sequence[_Group]) -> list[Places | None]:
        """Return the bag of each slot of each sample by table; see ``Batch.bags``."""
        return [self._bags_of_table(place, groups) for place in range(len(self._config.tables))]

    def _bags_of_table(self, place: int, groups: Sequence[_Group]) -> Places | None:
        groups = [group for group in groups if place in group.sent]
        first, end = self._begins[place], self._begins[place + 1]
        if len(groups) == 1 and groups[0].rows is None:
            return None
        if end - first == 1:
            return groups[0].rows
        bags = np.zeros((self._samples, end - first), np.int32)
        of_first_row, begin = np.zeros(end - first, np.int32), 0
        for group in groups:
            slots = group.slots[first:end]
            of_first_row += slots * (np.cumsum(slots, dtype=np.int32) + np.int32(begin - 1))
            rows = np.arange(self._samples, dtype=np.int32) if group.rows is None else group.rows
            if rows[-1]:  # several rows, in ascending order
                bags += np.multiply.outer(rows, slots * np.int32(np.count_nonzero(slots)))
            begin += group.sent[place].row_ptrs.size - 1
        bags += of_first_row
        return bags.reshape(-1)

    def _check_limits(self, groups: Sequence[_Group], joined: JoinedKeys, bags: Sequence[Places | None]) -> None:
        """Refuse a sample with too many keys of a table."""
        for place, table in enumerate(self._config.tables):
            limit = table.max_keys_per_sample
            if limit is None or sum(group.most_keys.get(place, 0) for group in groups) <= limit:
                continue
            lengths, of_table = np.diff(joined.tables[place].row_ptrs), bags[place]
            counts = (lengths if of_table is None else lengths[of_table]).reshape(self._samples, -1).sum(axis=1)
            if counts.max() > limit:
                raise too_many_keys(table, limit, counts)


def _joined(groups: Sequence[Mapping[int, TableKeys]], tables: int) -> JoinedKeys:
    """Return the keys of all tables, each with the bags of one group after another."""
    by_table = [join_keys([group[place] for group in groups if place in group]) for place in range(tables)]
    keys, row_ptrs = zip(*by_table, strict=True)
    return JoinedKeys(np.concatenate(keys), np.concatenate(row_ptrs), [of_table.size for of_table in row_ptrs])
