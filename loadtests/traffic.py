"""Requests for one model, with keys of the model's own tables."""

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.errors import ServingError
from serving.features import slots_of
from serving.model.sparse_file import open_sparse

#: Spreads the most frequent keys over a table's file. A prime above every number of rows, so no row comes twice.
STEP = 2_654_435_761
#: Number of different unknown keys per table.
UNKNOWN_KEYS = 4096
_BATCH_ROWS = 1 << 20


class TableKeys:
    """The keys of one table, drawn with Zipf's law, and some keys that the table does not have."""

    def __init__(self, known: np.ndarray, largest: int, rng: np.random.Generator) -> None:
        """Keep the keys that the table has. No key is above ``largest``."""
        self._known = known
        self._unknown = np.setdiff1d(rng.integers(0, largest - 1, UNKNOWN_KEYS), self._known)
        rng.shuffle(self._unknown)

    @classmethod
    def of_slots(cls, config: ModelConfig, table: TableConfig, rng: np.random.Generator) -> list["TableKeys"]:
        """Read all keys of the table's file, 8 bytes each, and return the keys of each of its slots.

        Raises:
            ModelFileError: the file is missing or is not such a model.
        """
        model = open_sparse(table.file, table.dim, config.key_type, table.row_layout)
        known = np.concatenate(list(model.key_batches(_BATCH_ROWS)))
        largest = np.iinfo(np.int64 if config.key_type == "I64" else np.uint32).max
        if not table.slot_ranges:
            return [cls(known, largest, rng)] * table.slots
        of_slots = [known[(known >= begin) & (known < begin + size)] - begin for begin, size in table.slot_ranges]
        return [cls(of_slot if of_slot.size else np.zeros(1, np.int64), largest, rng) for of_slot in of_slots]

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], skew: float, unknown: float) -> np.ndarray:
        """Draw int64 keys. The key of rank r comes with a frequency of about ``r ** -skew``."""
        rows = self._known.size
        uniform = rng.random(shape)
        if skew == 1:
            ranks = (rows + 1) ** uniform
        else:
            ranks = (((rows + 1) ** (1 - skew) - 1) * uniform + 1) ** (1 / (1 - skew))
        rank = np.minimum(ranks.astype(np.int64), rows)
        keys = self._known[rank * STEP % rows]
        return np.where(rng.random(shape) < unknown, rng.choice(self._unknown, shape), keys)


class Traffic:
    """Random requests for one model: one key per slot."""

    def __init__(
        self, config: ModelConfig, samples: int, skew: float, unknown: float, has_candidates: bool = False
    ) -> None:
        """Read the keys of all tables.

        Args:
            config: the model.
            samples: samples per request; never more than the model's ``max_batchsize``, except candidates.
            skew: exponent of Zipf's law; 0 draws all keys equally often.
            unknown: share of keys that no table has, 0 to 1.
            has_candidates: the samples of a request are candidates of one user, who has three quarters of the slots
                and all dense features.

        Raises:
            ModelFileError: a table's file is missing or is not such a model.
            ServingError: there are candidates, but the model's inputs have no names.
        """
        self._rng = np.random.default_rng(0)
        self._samples = samples if has_candidates else min(samples, config.max_batchsize)
        self._names = _names(config) if has_candidates else ()
        self._dense_dim = config.dense_dim
        self._key_dtype = np.int64 if config.key_type == "I64" else np.uint32
        self._skew, self._unknown = skew, unknown
        self._slots = [slot for table in config.tables for slot in TableKeys.of_slots(config, table, self._rng)]

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors of a new request by name."""
        if self._names:
            return self._candidates()
        keys = np.hstack([slot.draw(self._rng, (self._samples, 1), self._skew, self._unknown) for slot in self._slots])
        arrays = {
            "CATCOLUMN": keys.astype(self._key_dtype),
            "ROWINDEX": np.arange(keys.size + 1, dtype=np.int32),
        }
        if self._dense_dim:
            arrays["DES"] = self._rng.random((self._samples, self._dense_dim), dtype=np.float32)
        return arrays

    def _candidates(self) -> dict[str, np.ndarray]:
        rows = [1 if place < len(self._slots) * 3 // 4 else self._samples for place in range(len(self._slots))]
        keys = [
            slot.draw(self._rng, (count, 1), self._skew, self._unknown)[:, 0]
            for slot, count in zip(self._slots, rows, strict=True)
        ]
        dense = self._rng.random((self._dense_dim, 1), dtype=np.float32)
        return dict(zip(self._names, [*keys, *dense], strict=True))


def _names(config: ModelConfig) -> tuple[str, ...]:
    """The names of the slots and of the dense features."""
    slots = tuple(slot.own_name for slot in slots_of(config))
    if not all(slots) or len(set(slots)) < len(slots) or len(config.dense_names) < config.dense_dim:
        raise ServingError(f"candidates need names of slots and dense features, but {config.name!r} has none")
    return slots + config.dense_names
