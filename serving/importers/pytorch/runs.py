"""Run a module on inputs of the example's form: on tagged keys, to see where they go, and on random requests."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.importers.pytorch.inputs import FeatureKeys, Inputs
from serving.importers.pytorch.tables import CONSTANT_KEYS, Slot, Tables

# What a module raises if it cannot take inputs of the example's form.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MOST_KEYS = 4  # of a random bag
_TRACED_SAMPLES = 11
# A tag is a key that says where it comes from: an offset, the feature, 8 bits of sample, 4 bits of position.
_FEATURE_BIT, _SAMPLE_BIT = 12, 4
_ZERO = np.zeros(1, np.int64)  # a key
_EDGE_RATIO = 0.1  # of random keys: the first and the last row are often special, for example padding

#: Returns the keys of a feature from its place and the number of keys of each sample.
_KeysOf = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


class Run(NamedTuple):
    """One run: the answer, the slots that each table looked up, the dense features [B, F], the keys of each feature."""

    answer: Tensor
    slots: dict[str, list[Slot]]
    dense: NDArray[np.float32]
    features: list[Slot]


class Sources(NamedTuple):
    """Where the keys of the tables come from.

    Attributes:
        slots: the input or the features that feed each slot, by table.
        keys: those of the smallest table that a feature reads, by the feature's place.
    """

    slots: dict[str, list[str]]
    keys: dict[int, NDArray[np.int64]]


class Runner:
    """Runs a module on made inputs.

    Attributes:
        source: names the module in messages.
        module: the module, in eval mode.
        tables: its tables.
        inputs: its inputs.
        slots: S by table, in the order of the calls.
    """

    def __init__(
        self, source: str, module: nn.Module, tables: Tables, inputs: Inputs, slots: Mapping[str, int]
    ) -> None:
        """Draw the same random numbers each time."""
        self.source, self.module, self.tables, self.inputs, self.slots = source, module, tables, inputs, slots
        self._random = np.random.default_rng(0)

    def trace(self) -> Sources:
        """Find what feeds each slot.

        Raises:
            ConfigError: forward computes keys, or its answer depends on keys otherwise than by their rows.
        """
        keys = {table: self.tables.keys(table) for table in self.slots}
        first_tag = max(map(len, keys.values()))  # so no tag is a row number, and a hash or a clamp changes every tag
        vectors = {
            table: torch.from_numpy(
                self._random.standard_normal((_TRACED_SAMPLES, count, self.tables.size(table)[1]), np.float32)
            )
            for table, count in self.slots.items()
        }
        run = self._run(_TRACED_SAMPLES, partial(_tags, first_tag), None, vectors)
        sources = Sources({}, {})
        for table, of_table in run.slots.items():
            for slot in of_table:
                places = self._places(table, slot, run.features, first_tag)
                sources.slots.setdefault(table, []).append(self._name(places))
                for place in places:
                    sources.keys[place] = min(keys[table], sources.keys.get(place, keys[table]), key=len)
        self._refuse_unused(sources.keys)
        other = self._run(_TRACED_SAMPLES, lambda place, counts: np.zeros(counts.sum(), np.int64), run.dense, vectors)
        if not torch.allclose(run.answer, other.answer, equal_nan=True):
            reason = (
                "with other keys and the same rows, forward gives another answer; expected keys to matter by their "
                "rows only: no padding mask, no lengths of bags, no random numbers, and dense features as float32"
            )
            raise ConfigError(self.source, "", reason)
        return sources

    def ask(self, samples: int, keys_of: Mapping[int, NDArray[np.int64]]) -> Run:
        """Run the module on a random request. Raise ConfigError if it fails."""

        def draw(place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
            known, total = keys_of.get(place, _ZERO), counts.sum()
            rows = self._random.integers(0, len(known), total)
            is_edge = self._random.random(total) < _EDGE_RATIO
            rows[is_edge] = self._random.choice([0, len(known) - 1], int(is_edge.sum()))
            keys: NDArray[np.int64] = known[rows]
            return keys

        return self._run(samples, draw)

    def _run(
        self,
        samples: int,
        keys_of: _KeysOf,
        dense: NDArray[np.float32] | None = None,
        vectors: Mapping[str, Tensor] | None = None,
    ) -> Run:
        """Run the module once. No ``dense``: random features. For ``vectors`` see ``Tables.watched``."""
        if dense is None:
            dense = self._random.standard_normal((samples, self.inputs.width), np.float32)
        keys = self._keys(samples, keys_of)
        arguments = self.inputs.arguments(torch.from_numpy(dense), keys)
        try:
            with self.tables.watched(vectors) as lookups:
                answer = self.module(*arguments.args, **arguments.kwargs)
        except _FAILURES as err:
            lines = str(err).splitlines() or [type(err).__name__]
            reason = f"forward fails on inputs of the example's form with B = {samples}: {lines[0]}"
            raise ConfigError(self.source, "", f"{reason}; expected any B, and keys that only tables read") from err
        slots = self.tables.slots(lookups, samples)
        counts = {table: len(of_table) for table, of_table in slots.items()}
        if list(counts.items()) != list(self.slots.items()):
            reason = f"expected forward to look up as many slots as with the example, {dict(self.slots)}"
            raise ConfigError(self.source, "", f"{reason}, got {counts} with B = {samples}")
        bags = [np.split(key.keys.numpy(), key.lengths.cumsum(0)[:-1].numpy()) for key in keys]
        return Run(self._checked(answer, samples), slots, dense, bags)

    def _keys(self, samples: int, keys_of: _KeysOf) -> list[FeatureKeys]:
        """Return keys of each feature, as many as it may have."""
        lengths: dict[str | None, NDArray[np.int64]] = {None: np.ones(samples, np.int64)}
        keys: list[FeatureKeys] = []
        for place, feature in enumerate(self.inputs.features):
            if feature.lengths not in lengths:
                lengths[feature.lengths] = self._random.integers(0, _MOST_KEYS, samples, endpoint=True)
            counts = lengths[feature.lengths]
            keys.append(FeatureKeys(torch.from_numpy(keys_of(place, counts)), torch.from_numpy(counts)))
        return keys

    def _places(self, table: str, slot: Slot, features: Sequence[Slot], first_tag: int) -> list[int]:
        """Return the features whose tagged keys are in a slot."""
        places = list(dict.fromkeys(((np.concatenate(slot) - first_tag) >> _FEATURE_BIT).tolist()))
        is_known = all(0 <= place < len(features) for place in places)
        for sample, bag in enumerate(slot):
            expected = [features[place][sample] for place in places] if is_known else []
            if not expected or not np.array_equal(bag, np.concatenate(expected)):
                reason = (
                    "forward computes keys of this table, but a request's keys go straight to the table; compute them "
                    f"before the module and pass them as an input; {CONSTANT_KEYS}"
                )
                raise ConfigError(self.source, table, reason)
        return places

    def _name(self, places: Sequence[int]) -> str:
        """Return the name of the input that consists of these features, or the names of the features."""
        features = self.inputs.features
        of_input = [place for place, feature in enumerate(features) if feature.input == features[places[0]].input]
        return features[places[0]].input if places == of_input else " ".join(features[place].name for place in places)

    def _refuse_unused(self, places: Collection[int]) -> None:
        reached = {self.inputs.features[place].input for place in places}
        for feature in self.inputs.features:
            if feature.input not in reached:
                reason = "its keys reach no table; if it is a dense feature, pass it as float32"
                raise ConfigError(self.source, feature.input, reason)

    def _checked(self, answer: Any, samples: int) -> Tensor:
        """Return the answer, or raise ConfigError if it has another form than float32[B] or float32[B, L]."""
        if isinstance(answer, Tensor):
            if answer.dtype == torch.float32 and answer.ndim in (1, 2) and answer.shape[0] == samples:
                return answer
            came = f"{str(answer.dtype).removeprefix('torch.')} {list(answer.shape)}"
        else:
            came = type(answer).__name__
        reason = f"expected forward to return one tensor, float32 [B] or [B, L] with B = {samples}, got {came}"
        raise ConfigError(self.source, "", reason)


def _tags(first: int, place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    samples = np.repeat(np.arange(counts.size), counts)
    positions = np.arange(samples.size) - np.repeat(counts.cumsum() - counts, counts)
    return first + (place << _FEATURE_BIT) + (samples << _SAMPLE_BIT) + positions
