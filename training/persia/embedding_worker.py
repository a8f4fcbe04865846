"""An embedding worker: it turns signs into pooled vectors, and gradients of vectors into gradients of rows.

A summed feature has one bag for each sample. A raw feature has one bag for each distinct sign. Its index [B,
sample_fixed_size] has 1 + the bag of each sign in a sample, and 0 where there is no sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import ArrayRows, BagLookup, keys_by_owner, look_up_bags, sum_row_gradients
from training.errors import DataError, SessionError
from training.persia.config import EmbeddingConfig, Feature
from training.persia.signs import Keys, Signs, servers_of, table_keys
from training.persia.wire import NOTHING, Message, Peer

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FeatureKeys:
    """The keys of one feature, in R bags.

    Attributes:
        feature: how they are read.
        keys: int64[N].
        row_ptrs: int64[R + 1].
        index: of a raw feature, int64[B, sample_fixed_size]: 1 + the bag of each sign; 0: none.
    """

    feature: Feature
    keys: Keys
    row_ptrs: Ints
    index: Ints | None

    @classmethod
    def read(cls, feature: Feature, signs: Signs, row_ptrs: Ints) -> "FeatureKeys":
        """Read the signs uint64[N] of B samples, whose offsets are int64[B + 1]."""
        index = None
        if not feature.is_summed:
            distinct, places = np.unique(signs, return_inverse=True)
            index = _padded(1 + places, row_ptrs, feature.sample_fixed_size)
            signs, row_ptrs = distinct, np.arange(len(distinct) + 1)
        return cls(feature, table_keys(feature, signs), row_ptrs * feature.rows_per_sign, index)


def _padded(numbers: Ints, row_ptrs: Ints, columns: int) -> Ints:
    """Return the first numbers of each bag, int64[R, columns]. The rest is 0."""
    counts = np.diff(row_ptrs)
    bags = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(numbers)) - row_ptrs[bags]
    is_kept = places < columns
    padded = np.zeros((len(counts), columns), np.int64)
    padded[bags[is_kept], places[is_kept]] = numbers[is_kept]
    return padded


class DistinctKeys:
    """The distinct keys of the features with one D, in the order of their servers.

    Attributes:
        keys: int64[U].
        ends: int64[servers], where the keys of each server end.
        places: for each feature, where its keys are among ``keys``.
    """

    def __init__(self, features: Sequence[FeatureKeys], servers: int) -> None:
        """Take features of one D."""
        keys, _, places, _ = keys_by_owner(np.concatenate([bags.keys for bags in features]), 1)
        owners = servers_of(keys, servers)
        order = np.argsort(owners, kind="stable")
        moved = np.empty_like(order)
        moved[order] = np.arange(len(order))
        self.keys: Keys = keys[order]
        self.ends: Ints = np.bincount(owners, minlength=servers).cumsum()
        ends = np.cumsum([len(bags.keys) for bags in features])
        self.places: list[Ints] = np.split(moved[places], ends[:-1])

    def by_server(self, places: Ints, rows: Floats) -> list[tuple[Keys, Floats]]:
        """Return the keys at some places and their rows, for each server."""
        servers = np.searchsorted(self.ends, places, side="right")
        order = np.argsort(servers, kind="stable")
        ends = np.searchsorted(servers[order], np.arange(len(self.ends)), side="right")
        keys, rows = self.keys[places[order]], rows[order]
        return [(keys[begin:end], rows[begin:end]) for begin, end in pairwise((0, *ends))]


@dataclass(slots=True)
class SparseBatch:
    """A batch of signs on its way.

    Attributes:
        features: in the order of the data loader.
        distinct: by D.
        lookups: of the features, once they are looked up.
    """

    features: list[FeatureKeys]
    distinct: dict[int, DistinctKeys]
    lookups: dict[str, BagLookup] = field(default_factory=dict)

    def of(self, dim: int) -> list[FeatureKeys]:
        """Return the features with this D."""
        return [bags for bags in self.features if bags.feature.dim == dim]


class EmbeddingWorker:
    """Turns signs into vectors, and gradients of vectors into gradients of rows. Methods may run in any thread."""

    def __init__(self, config: EmbeddingConfig, servers: Sequence[Peer]) -> None:
        """Take the features, and the embedding servers in the order of their numbers."""
        self._config = config
        self._servers = servers
        self._batches: dict[int, SparseBatch] = {}
        self._lock = Lock()  # of the batches

    def put(self, message: Message) -> Message:
        """Take the signs of a batch.

        Facts: ``number`` of the batch, ``features`` in order. For each feature the arrays ``signs <feature>`` and
        ``row_ptrs <feature>``.
        """
        names = message.facts["features"]
        known = self._config.features
        for name in names:
            if name not in known:
                raise DataError("add_sparse", f"expected features of slots_config, got {name!r}")
        missing = [name for name in known if name not in names]
        if missing:
            raise DataError("add_sparse", f"expected every feature of slots_config, {', '.join(missing)} missing")
        features = [
            FeatureKeys.read(known[name], message.arrays[f"signs {name}"], message.arrays[f"row_ptrs {name}"])
            for name in names
        ]
        batch = SparseBatch(features, {})
        for dim in self._config.dims:
            batch.distinct[dim] = DistinctKeys(batch.of(dim), len(self._servers))
        with self._lock:
            self._batches[message.facts["number"]] = batch
        return NOTHING

    def look_up(self, message: Message) -> Message:
        """Return the vectors of batch ``number``, float32[R, D] by feature, and ``index <feature>`` of raw features."""
        batch = self._batch(message)
        rows = self._rows(batch)
        bags, places, tables = [], [], []
        for dim, distinct in batch.distinct.items():
            array = ArrayRows(rows[dim], f"dim {dim}")
            bags += batch.of(dim)
            places += distinct.places
            tables += [array] * len(distinct.places)
        answers = look_up_bags(
            tables,
            places,
            [one.row_ptrs for one in bags],
            ["sqrtn" if one.feature.has_sqrt_scaling else "sum" for one in bags],
            [None] * len(bags),
            [1] * len(bags),
            [False] * len(bags),
        )
        arrays: dict[str, NDArray[Any]] = {}
        for one, (lookup, pooled) in zip(bags, answers, strict=True):
            batch.lookups[one.feature.name] = lookup
            arrays[one.feature.name] = pooled
            if one.index is not None:
                arrays[f"index {one.feature.name}"] = one.index
        return Message(arrays, {"features": [one.feature.name for one in batch.features]})

    def _rows(self, batch: SparseBatch) -> dict[int, Floats]:
        """Get the distinct rows of a batch from the servers, float32[U, D] by D."""
        starts = {dim: [0, *distinct.ends] for dim, distinct in batch.distinct.items()}
        answers = [
            server.start(
                "look_up",
                {
                    str(dim): distinct.keys[starts[dim][number] : starts[dim][number + 1]]
                    for dim, distinct in batch.distinct.items()
                },
            )
            for number, server in enumerate(self._servers)
        ]
        parts = [answer.result().arrays for answer in answers]
        return {dim: np.concatenate([part[str(dim)] for part in parts]) for dim in batch.distinct}

    def update(self, message: Message) -> Message:
        """Send the gradients of batch ``number`` to the servers, and forget the batch.

        ``message`` has float32[R, D] by feature. The rows of features without a gradient do not move. Without any
        gradient, nothing is sent.
        """
        batch = self._batch(message)
        with self._lock:
            del self._batches[message.facts["number"]]
        if not message.arrays:
            return NOTHING
        to_servers: list[dict[str, NDArray[Any]]] = [{} for _ in self._servers]
        for dim, distinct in batch.distinct.items():
            places, sums = _row_gradients(batch, dim, message.arrays)
            for arrays, (keys, gradients) in zip(to_servers, distinct.by_server(places, sums), strict=True):
                arrays[f"keys {dim}"], arrays[f"gradients {dim}"] = keys, gradients
        answers = [server.start("update", arrays) for server, arrays in zip(self._servers, to_servers, strict=True)]
        for answer in answers:
            answer.result()
        return NOTHING

    def _batch(self, message: Message) -> SparseBatch:
        number = message.facts["number"]
        with self._lock:
            batch = self._batches.get(number)
        if batch is None:
            raise SessionError(f"expected a batch that waits here, got number {number}")
        return batch


def _row_gradients(batch: SparseBatch, dim: int, gradients: Mapping[str, NDArray[Any]]) -> tuple[Ints, Floats]:
    """Return places among the distinct keys of one D, and the gradients of the rows there."""
    names = [one.feature.name for one in batch.of(dim) if one.feature.name in gradients]
    if not names:
        return np.empty(0, np.int64), np.empty((0, dim), np.float32)
    sums = sum_row_gradients([batch.lookups[name] for name in names], [gradients[name] for name in names])
    places, rows = zip(*sums, strict=True)
    return np.concatenate(places), np.concatenate(rows)
