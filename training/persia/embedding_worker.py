"""An embedding worker: it turns signs into pooled vectors, and gradients of vectors into gradients of rows.

A summed feature has one bag for each sample. A raw feature has one bag for each distinct sign. Its index [B,
sample_fixed_size] has 1 + the bag of each sign in a sample, and 0 where there is no sign.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import ArrayRows, BagLookup, array_gradients, keys_by_owner, look_up_bags
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
        starts: int64[servers + 1], where the keys of each server begin and end.
        places: where the keys of each feature are among ``keys``.
    """

    def __init__(self, features: Sequence[FeatureKeys], servers: int) -> None:
        """Take features of one D."""
        keys, _, places, _ = keys_by_owner(np.concatenate([bags.keys for bags in features]), 1)
        owners = servers_of(keys, servers)
        order = np.argsort(owners.astype(np.uint16), kind="stable")  # a radix sort
        moved = np.empty_like(order)
        moved[order] = np.arange(len(order))
        self.keys: Keys = keys[order]
        self.starts: Ints = np.concatenate([[0], np.bincount(owners, minlength=servers).cumsum()])
        ends = np.cumsum([len(bags.keys) for bags in features])
        parts = np.split(moved[places], ends[:-1])
        self.places: dict[str, Ints] = {bags.feature.name: part for bags, part in zip(features, parts, strict=True)}

    def of(self, server: int) -> slice:
        """Return where the keys of a server are."""
        return slice(self.starts[server], self.starts[server + 1])

    def moving(self, server: int, still: Collection[str]) -> slice | Ints:
        """Return where the keys of a server are, without the keys that only these features have."""
        if not still:
            return self.of(server)
        moves = np.zeros(len(self.keys), np.bool_)
        for name, places in self.places.items():
            if name not in still:
                moves[places] = True
        moving: Ints = self.starts[server] + np.flatnonzero(moves[self.of(server)])
        return moving


class Block:
    """The bags of the features with one D and one combiner, feature after feature. They are looked up together.

    Attributes:
        name: of its vectors float32[R, D], and of their gradients.
        dim: D.
        features: their names, and where the bags of each are.
        lookup: of all bags, once they are looked up.
    """

    def __init__(self, dim: int, combiner: str, features: Sequence[FeatureKeys], distinct: DistinctKeys) -> None:
        """Take features, and the distinct keys of this D."""
        self.name = f"{dim} {combiner}"
        self.dim = dim
        self.features: dict[str, slice] = {}
        self.lookup: BagLookup | None = None
        self._combiner = combiner
        self._places = [distinct.places[read.feature.name] for read in features]
        row_ptrs, keys, bags = [np.zeros(1, np.int64)], 0, 0
        for one in features:
            row_ptrs.append(one.row_ptrs[1:] + keys)
            self.features[one.feature.name] = slice(bags, bags + len(row_ptrs[-1]))
            keys, bags = keys + len(one.keys), bags + len(row_ptrs[-1])
        self._row_ptrs = np.concatenate(row_ptrs)

    def pool(self, rows: Floats) -> Floats:
        """Return the vectors of the bags, from the rows float32[U, D] of the distinct keys."""
        array, places = ArrayRows(rows, self.name), np.concatenate(self._places)
        [(self.lookup, vectors)] = look_up_bags(
            [array], [places], [self._row_ptrs], [self._combiner], [None], [1], [False]
        )
        return vectors

    def row_gradients(self, gradients: Floats) -> Floats:
        """Turn the gradients of the vectors into those of all distinct keys, float32[U, D]."""
        assert self.lookup is not None
        return array_gradients([self.lookup], [gradients])[0]


@dataclass(slots=True)
class SparseBatch:
    """A batch of signs on its way.

    Attributes:
        features: in the order of the data loader.
        distinct: by D.
        blocks: all bags.
    """

    features: list[FeatureKeys]
    distinct: dict[int, DistinctKeys]
    blocks: list[Block]

    @classmethod
    def of(cls, features: list[FeatureKeys], servers: int) -> "SparseBatch":
        """Find the distinct keys of features."""
        distinct, blocks = {}, []
        for dim in sorted({read.feature.dim for read in features}):
            of_dim = [read for read in features if read.feature.dim == dim]
            distinct[dim] = DistinctKeys(of_dim, servers)
            for combiner in ("sum", "sqrtn"):
                of_block = [read for read in of_dim if read.feature.has_sqrt_scaling == (combiner == "sqrtn")]
                if of_block:
                    blocks.append(Block(dim, combiner, of_block, distinct[dim]))
        return cls(features, distinct, blocks)


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
        batch = SparseBatch.of(features, len(self._servers))
        with self._lock:
            self._batches[message.facts["number"]] = batch
        return NOTHING

    def look_up(self, message: Message) -> Message:
        """Return the vectors of batch ``number`` by block, float32[R, D], and ``index <feature>`` of raw features.

        Facts: ``features`` in the order of the data loader, each with its block and where its vectors are there.
        """
        batch = self._batch(message)
        rows = self._rows(batch)
        arrays: dict[str, NDArray[Any]] = {block.name: block.pool(rows[block.dim]) for block in batch.blocks}
        at = {name: (block.name, bags) for block in batch.blocks for name, bags in block.features.items()}
        features = []
        for feature in batch.features:
            name, (block_name, bags) = feature.feature.name, at[feature.feature.name]
            features.append((name, block_name, bags.start, bags.stop))
            if feature.index is not None:
                arrays[f"index {name}"] = feature.index
        return Message(arrays, {"features": features})

    def _rows(self, batch: SparseBatch) -> dict[int, Floats]:
        """Get the distinct rows of a batch from the servers, float32[U, D] by D."""
        answers = [
            server.start(
                "look_up",
                {str(dim): distinct.keys[distinct.of(number)] for dim, distinct in batch.distinct.items()},
            )
            for number, server in enumerate(self._servers)
        ]
        parts = [answer.result().arrays for answer in answers]
        return {dim: np.concatenate([part[str(dim)] for part in parts]) for dim in batch.distinct}

    def update(self, message: Message) -> Message:
        """Send the gradients of batch ``number`` to the servers, and forget the batch.

        ``message`` has float32[R, D] by block. The rows of the features in the fact ``missing`` do not move, because
        these features have no gradient. Without any gradient, nothing is sent.
        """
        batch = self._batch(message)
        with self._lock:
            del self._batches[message.facts["number"]]
        if not message.arrays:
            return NOTHING
        to_servers: list[dict[str, NDArray[Any]]] = [{} for _ in self._servers]
        for dim, distinct in batch.distinct.items():
            blocks = [block for block in batch.blocks if block.dim == dim]
            gradients = [block.row_gradients(message.arrays[block.name]) for block in blocks]
            sums = gradients[0] if len(gradients) == 1 else np.add(*gradients)
            for number, arrays in enumerate(to_servers):
                moving = distinct.moving(number, message.facts["missing"])
                arrays[f"keys {dim}"], arrays[f"gradients {dim}"] = distinct.keys[moving], sums[moving]
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
