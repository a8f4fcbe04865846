"""Run a module on inputs of the example's form: on tagged keys, to see where they go, and on random requests."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.importers.pytorch.answers import Answers
from serving.importers.pytorch.inputs import FeatureKeys, Inputs, Padding
from serving.importers.pytorch.lines import KeyUses, at_line, line_of_error
from serving.importers.pytorch.pooling import NO_KEY
from serving.importers.pytorch.tables import CONSTANT_KEYS, Lookup, Slot, Tables
from serving.model.records import Output

# What a module raises if it cannot take inputs of the example's form.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MOST_KEYS = 4  # of a random bag
_TRACED_SAMPLES = 11
_ZERO = np.zeros(1, np.int64)  # a key
_EDGE_RATIO = 0.1  # of random keys: the first and the last row are often special, for example padding

#: Returns the keys of a feature from its place and the number of keys of each sample.
_KeysOf = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


class Run(NamedTuple):
    """One run.

    Attributes:
        answer: float32[B, W], the columns of all outputs.
        outputs: the outputs.
        slots: what each table looked up: of a sequence one slot for each position.
        calls: the call that looked up each of these slots.
        dense: float32[B, F], the dense features.
        features: the keys of each feature, without padding.
        lengths: how many keys each sample has of the features with such lengths.
        uses: the first line that computes something from keys; an empty text if there is none.
        constants: integers that forward computes with.
    """

    answer: Tensor
    outputs: tuple[Output, ...]
    slots: dict[str, list[Slot]]
    calls: dict[str, list[Lookup]]
    dense: NDArray[np.float32]
    features: list[Slot]
    lengths: dict[str | None, NDArray[np.int64]]
    uses: str
    constants: list[int]


class Source(NamedTuple):
    """Where the keys of a slot of a request come from.

    Attributes:
        name: the input or the features that feed it.
        places: those of the features.
        first: the place of its first position among the slots that the table looked up.
        padding: of a sequence; None: the slot is pooled.
        shift: forward adds this to each key.
        has_one_key: a sample has one key.
        no_key: this key of the table stands for no key; None: no key does.
        row_key: of the row at positions of a sequence without a key; None: there are zeros.
    """

    name: str
    places: list[int]
    first: int
    padding: Padding | None
    shift: int
    has_one_key: bool
    no_key: int | None
    row_key: int | None = None

    def bag(self, run: Run, table: str, sample: int) -> NDArray[np.int64]:
        """Return the keys of a sample in a run."""
        return run.slots[table][self.first][sample] if self.padding is None else run.features[self.places[0]][sample]


class Sources(NamedTuple):
    """Where the keys of the tables come from.

    Attributes:
        slots: of each slot of a request, by table.
        keys: those of the smallest table that a feature reads, by the feature's place.
    """

    slots: dict[str, list[Source]]
    keys: dict[int, NDArray[np.int64]]

    def has_empty(self, run: Run, samples: int) -> NDArray[np.bool_]:
        """Return which samples of a run have an empty sequence, bool[B]."""
        places = [slot.places[0] for of_table in self.slots.values() for slot in of_table if slot.padding is not None]
        return np.array([any(not run.features[place][sample].size for place in places) for sample in range(samples)])


class Runner:
    """Runs a module on made inputs.

    Attributes:
        source: names the module in messages.
        module: the module, in eval mode.
        tables: its tables.
        inputs: its inputs.
        slots: S by table, in the order of the calls.
        answers: its answers.
    """

    def __init__(
        self,
        source: str,
        module: nn.Module,
        tables: Tables,
        inputs: Inputs,
        slots: Mapping[str, int],
        answers: Answers,
    ) -> None:
        """Draw the same random numbers each time."""
        self.source, self.module, self.tables, self.inputs, self.slots = source, module, tables, inputs, slots
        self.answers = answers
        self._random = np.random.default_rng(0)

    def trace(self) -> Sources:
        """Find what feeds each slot.

        Raises:
            ConfigError: forward computes keys, or its answer depends on keys otherwise than by their rows.
        """
        keys = {table: self.tables.keys(table) for table in self.slots}
        tagging = _Tagging(
            first=max(map(len, keys.values())),  # so no tag is a row number, and a hash or a clamp changes every tag
            features=len(self.inputs.features),
            most_keys=max([_MOST_KEYS, *(feature.padding.most for feature in self.inputs.features if feature.padding)]),
        )
        vectors = self._vectors(_TRACED_SAMPLES)
        of_zeros = self._run(_TRACED_SAMPLES, self._filler, None, vectors)
        run = self._run(_TRACED_SAMPLES, tagging.tags, None, vectors)
        sources = Sources({table: self._sources(table, run, of_zeros, tagging) for table in run.slots}, {})
        for table, of_table in sources.slots.items():
            shifts = {source.shift for source in of_table}
            for source in of_table:
                end = min((shift for shift in shifts if shift > source.shift), default=None)
                of_range = (
                    keys[table][(keys[table] >= source.shift) & (end is None or keys[table] < end)] - source.shift
                )
                for place in source.places:
                    own = of_range if source.padding is None else of_range[of_range != source.no_key]
                    sources.keys[place] = min(own, sources.keys.get(place, own), key=len)
        self._refuse_unused(sources.keys)
        rows = [source for of_table in sources.slots.values() for source in of_table if source.padding is not None]
        groups = {self.inputs.features[source.places[0]].lengths for source in rows}
        # The lengths of sequences may matter, and those of bags may not.
        lengths = {name: of if name in groups else np.roll(of, 1) for name, of in run.lengths.items()}
        other = self._run(_TRACED_SAMPLES, self._filler, run.dense, vectors, lengths)
        if not torch.allclose(run.answer, other.answer, equal_nan=True):
            reason = (
                "with other keys and the same rows, forward gives another answer; expected keys to matter only through "
                "their rows: no padding mask, no lengths of bags, no random numbers, and dense features as float32"
            )
            of_inputs = [feature.input for feature in self.inputs.features if feature.padding is None]
            if several := next((name for name in of_inputs if of_inputs.count(name) > 1), ""):
                reason += f"; if {several!r} is padded with 0, use sequences={{{several!r}: 0}}"
            no_padding = max([1, *(key + 1 for key in self._paddings)])
            again = self._run(
                _TRACED_SAMPLES, lambda _, counts: np.full(counts.sum(), no_padding), run.dense, vectors, lengths
            )
            if rows and torch.allclose(run.answer, again.answer, equal_nan=True):
                reason = "an input that is not a sequence changes the answer if its key is a padding key"
                reason += "; expected masks that are made from sequences alone"
            raise ConfigError(self.source, "", f"{reason}{at_line(run.uses)}")
        self._refuse_special_keys(sources, run.constants)
        return sources

    def _refuse_special_keys(self, sources: Sources, constants: Sequence[int]) -> None:
        """Raise ConfigError if some keys, or equal keys of several inputs, matter otherwise than by their rows.

        All features share a small pool of keys. First all keys of a sample are equal, then half of them are.
        """
        ends = [key for of_place in sources.keys.values() for key in (*of_place[:4].tolist(), *of_place[-2:].tolist())]
        near = [constant + step for constant in constants for step in (0, -1, 1)]
        pool = [
            key
            for key in dict.fromkeys([*ends, *self._paddings, *self.inputs.keys_of_example, *near, NO_KEY])
            if -1 <= key < 1 << 31  # an input may be int32
        ]
        samples = 3 * len(pool)

        def draw(place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
            own = np.repeat(np.resize(pool, samples), counts)
            is_other = (self._random.random(own.size) < 0.5) & (np.repeat(np.arange(samples), counts) >= len(pool))
            own[is_other] = self._random.choice(pool, int(is_other.sum()))
            if (padding := self.inputs.features[place].padding) is not None:
                # A mask may be seen > 0: a sequence gets no key -1.
                own[np.isin(own, [NO_KEY, padding.key if padding.key is not None else NO_KEY])] = padding.filler
            return own.astype(np.int64)

        vectors = self._vectors(samples)
        lengths = self._lengths(samples)
        for name, of in lengths.items():
            lengths[name] = np.where(np.arange(samples) < len(pool), np.maximum(of, 1), of)
        of_fillers = self._run(samples, self._filler, None, vectors, lengths)
        run = self._run(samples, draw, of_fillers.dense, vectors, lengths)
        self._check_slots(run, sources)
        is_same = torch.isclose(run.answer, of_fillers.answer, equal_nan=True).all(dim=1).tolist()
        if all(is_same):
            return
        special = [key for key, same in zip(pool, is_same, strict=False) if not same]
        if 0 < len(special) <= len(pool) // 2:
            shown = ", ".join(map(str, special[:4]))
            reason = f"with keys such as {shown} and the same rows, forward gives another answer"
        else:
            reason = "if two inputs have the same key, forward gives another answer with the same rows"
        reason += "; expected keys to matter only through their rows, and masks that are made from padding alone"
        raise ConfigError(self.source, "", f"{reason}{at_line(run.uses)}")

    def _vectors(self, samples: int) -> dict[str, list[Tensor]]:
        """Return random answers of the tables; see ``Tables.watched``."""
        return {
            table: [
                torch.from_numpy(self._random.standard_normal((samples, count, self.tables.size(table)[1]), np.float32))
            ]
            for table, count in self.slots.items()
        }

    def ask(self, samples: int, sources: Sources) -> Run:
        """Run the module on a random request. Raise ConfigError if it fails, or if it looks up other keys."""

        def draw(place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
            known, total = sources.keys.get(place, _ZERO), counts.sum()
            rows = self._random.integers(0, len(known), total)
            is_edge = self._random.random(total) < _EDGE_RATIO
            paddings = np.flatnonzero(np.isin(known, self._paddings))
            rows[is_edge] = self._random.choice([0, len(known) - 1, *paddings], int(is_edge.sum()))
            keys: NDArray[np.int64] = known[rows]
            return keys

        run = self._run(samples, draw)
        self._check_slots(run, sources)
        return run

    def _check_slots(self, run: Run, sources: Sources) -> None:
        """Check that the slots of a run have the keys of their features."""
        for table, of_table in sources.slots.items():
            for source in of_table:
                if source.padding is not None:
                    self._check_positions(table, run, source.first, source.places[0])
                else:
                    self._check_bags(table, run, source.first, source.places, source.shift)

    @property
    def _paddings(self) -> list[int]:
        """The keys that are padding in some input or table."""
        of_inputs = [feature.padding.key for feature in self.inputs.features if feature.padding is not None]
        of_tables = [self.tables.padding_idx(table) for table in self.slots]
        return [key for key in (*of_inputs, *of_tables) if key is not None]

    def _run(
        self,
        samples: int,
        keys_of: _KeysOf,
        dense: NDArray[np.float32] | None = None,
        vectors: Mapping[str, Sequence[Tensor]] | None = None,
        lengths: dict[str | None, NDArray[np.int64]] | None = None,
    ) -> Run:
        """Run the module once. No ``dense``: random features. For ``vectors`` see ``Tables.watched``.

        For ``lengths`` see ``Run``; None: random lengths.
        """
        if dense is None:
            dense = self._random.standard_normal((samples, self.inputs.width), np.float32)
            dense = np.where(self.inputs.is_dense_positive, np.abs(dense), dense) if self.inputs.width else dense
        lengths = lengths or self._lengths(samples)
        keys = self._keys(keys_of, lengths)
        arguments = self.inputs.arguments(torch.from_numpy(dense), keys)
        uses = KeyUses(self.inputs.keys_in(arguments))
        try:
            with self.tables.watched(vectors) as lookups, uses:
                answer = self.module(*arguments.args, **arguments.kwargs)
        except _FAILURES as err:
            lines = str(err).splitlines() or [type(err).__name__]
            reason = f"forward fails on inputs of the example's form with B = {samples}: {lines[0]}"
            reason = (
                f"{reason}; expected any B, and keys that only tables read{at_line(line_of_error(err.__traceback__))}"
            )
            raise ConfigError(self.source, "", reason) from err
        slots, calls = self.tables.slots(lookups, samples)
        counts = {table: len(of_table) for table, of_table in slots.items()}
        if list(counts.items()) != list(self.slots.items()):
            reason = f"expected forward to look up as many slots as with the example, {dict(self.slots)}"
            raise ConfigError(self.source, "", f"{reason}, got {counts} with B = {samples}")
        bags = [np.split(key.keys.numpy(), key.lengths.cumsum(0)[:-1].numpy()) for key in keys]
        return Run(
            *self.answers.joined(answer, samples), slots, calls, dense, bags, lengths, uses.line, sorted(uses.constants)
        )

    def _lengths(self, samples: int) -> dict[str | None, NDArray[np.int64]]:
        """Return how many keys each sample has of the features with such lengths. Some sequences are full or empty."""
        lengths: dict[str | None, NDArray[np.int64]] = {None: np.ones(samples, np.int64)}
        most: dict[str, int] = {}
        for feature in self.inputs.features:
            if feature.padding is not None and feature.lengths is not None:
                most[feature.lengths] = min(feature.padding.most, most.get(feature.lengths, feature.padding.most))
        for name in dict.fromkeys(feature.lengths for feature in self.inputs.features):
            if name is not None:
                lengths[name] = self._random.integers(0, most.get(name, _MOST_KEYS), samples, endpoint=True)
            if name in most:
                lengths[name][:2] = [most[name], 0][:samples]
        return lengths

    def _keys(self, keys_of: _KeysOf, lengths: Mapping[str | None, NDArray[np.int64]]) -> list[FeatureKeys]:
        """Return keys of each feature."""
        counts = [lengths[feature.lengths] for feature in self.inputs.features]
        return [
            FeatureKeys(torch.from_numpy(keys_of(place, of_feature)), torch.from_numpy(of_feature))
            for place, of_feature in enumerate(counts)
        ]

    def _shift(self, tags: NDArray[np.int64], of_fillers: NDArray[np.int64], tagging: "_Tagging") -> int:
        """Return the constant that is added to the keys of a slot, of which one run has tags and one has fillers."""
        found = set(of_fillers.tolist())
        for filler in (0, 1):
            shift = min(found, default=0) - filler
            places = tagging.places(tags - shift) if len(found) == 1 and shift >= 0 else []
            features = [self.inputs.features[place] for place in places if 0 <= place < len(self.inputs.features)]
            if features and all((feature.padding.filler if feature.padding else 0) == filler for feature in features):
                return shift
        return 0

    def _filler(self, place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return keys that are all the same, and no padding."""
        padding = self.inputs.features[place].padding
        return np.full(counts.sum(), 0 if padding is None else padding.filler, np.int64)

    def _sources(self, table: str, run: Run, of_zeros: Run, tagging: "_Tagging") -> list[Source]:
        """Return where the tagged keys of a table's slots come from; ``of_zeros`` is a run whose keys are all 0."""
        sources: list[Source] = []
        slots, at = run.slots[table], 0
        while at < len(slots):
            tags = np.concatenate(slots[at])
            shift = self._shift(tags, np.concatenate(of_zeros.slots[table][at]), tagging)
            places = tagging.places(tags - shift)
            if not places or min(places) < 0 or max(places) >= len(run.features):
                raise self._computed(table, run, at)
            padding = self.inputs.features[places[0]].padding if len(places) == 1 else None
            row_key = None
            if padding is not None and not run.calls[table][at].is_pooled:
                row_key = self._check_positions(table, run, at, places[0])
            else:
                padding = None
                self._check_bags(table, run, at, places, shift)
            call = run.calls[table][at]
            is_row, no_key = padding is None and not call.is_pooled, self.tables.padding_key(call)
            if is_row and no_key is not None:
                names = {self.inputs.features[place].input: no_key for place in places}
                reason = f"the network pools, and a key may be padding_idx={no_key}; use sequences={names}"
                raise ConfigError(self.source, table, f"{reason}{at_line(call.line)}")
            if padding is not None and padding.key is not None:
                no_key = padding.key
            shift = 0 if padding is not None else shift
            sources.append(Source(self._name(places), places, at, padding, shift, is_row, no_key, row_key))
            at += 1 if padding is None else padding.most
        return sources

    def _check_positions(self, table: str, run: Run, first: int, place: int) -> int | None:
        """Check that the slots from ``first`` on are the positions of a sequence.

        Return the key that forward looks up at positions without a key; None if the table does not see them.
        """
        feature = self.inputs.features[place]
        assert feature.padding is not None
        slots = run.slots[table][first : first + feature.padding.most]
        lengths = np.array([bag.size for bag in run.features[place]])
        keys = FeatureKeys(torch.from_numpy(np.concatenate(run.features[place])), torch.from_numpy(lengths))
        padding_key = NO_KEY if feature.padding.key is None else feature.padding.key
        expected = feature.padding.matrix(keys, padding_key).numpy()
        found = np.stack(slots)[..., 0].T
        row_key = None
        if feature.padding.key is not None and found.shape == expected.shape:  # forward may clamp a padding of -1
            row_key = int(found[expected == padding_key].max(initial=0))
            expected = np.where(expected == padding_key, row_key, expected)
        if not np.array_equal(found, expected):
            reason = (
                f"expected the rows of all {feature.padding.most} positions of {feature.name!r}, in order; look up all "
                "of them, then select rows"
            )
            raise ConfigError(self.source, table, f"{reason}{at_line(run.calls[table][first].line)}")
        return row_key

    def _check_bags(self, table: str, run: Run, at: int, places: Sequence[int], shift: int) -> None:
        """Check that a slot has the keys of features."""
        paddings = [
            feature.padding.key
            for feature in self.inputs.features
            if feature.padding and feature.padding.key is not None
        ]
        for sample, bag in enumerate(bag - shift for bag in run.slots[table][at]):
            expected = np.concatenate([run.features[place][sample] for place in places])
            left_out = self.tables.padding_key(run.calls[table][at])
            if run.calls[table][at].is_pooled and left_out is not None:
                expected = expected[expected + shift != left_out]
            if np.array_equal(bag, expected):
                continue
            if np.array_equal(bag[~np.isin(bag, paddings)], expected):
                names = " ".join(self.inputs.features[place].name for place in places)
                reason = f"the padding of {names!r} is pooled too; use padding_idx, or pool the rows with a mask"
                raise ConfigError(self.source, table, f"{reason}{at_line(run.calls[table][at].line)}")
            raise self._computed(table, run, at)

    def _computed(self, table: str, run: Run, at: int) -> ConfigError:
        reason = (
            "forward computes keys of this table, but a request's keys go directly to the table; compute them "
            f"before the module and pass them as an input; {CONSTANT_KEYS}"
        )
        return ConfigError(self.source, table, f"{reason}{at_line(run.uses or run.calls[table][at].line)}")

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


class _Tagging(NamedTuple):
    """Tags are keys that say where they come from: the feature, the sample and the position.

    They ascend in every second sample and descend in the others, so sorting keys changes their order.

    Attributes:
        first: the smallest tag.
        features: how many features there are.
        most_keys: of a sample in one feature.
    """

    first: int
    features: int
    most_keys: int

    def tags(self, place: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tags of the feature at a place; ``counts`` are those of each sample."""
        samples = np.repeat(np.arange(counts.size), counts)
        positions = np.arange(samples.size) - np.repeat(counts.cumsum() - counts, counts)
        origins = (place * _TRACED_SAMPLES + samples) * self.most_keys + positions
        descends = samples % 2
        return self.first + 2 * np.where(descends, self._origins - 1 - origins, origins) + descends

    def places(self, tags: NDArray[np.int64]) -> list[int]:
        """Return the places of the features that keys come from. Keys that are no tags come from none."""
        halves, descends = np.divmod(tags[tags >= self.first] - self.first, 2)
        origins = np.where(descends, self._origins - 1 - halves, halves)
        return list(dict.fromkeys((origins // (_TRACED_SAMPLES * self.most_keys)).tolist()))

    @property
    def _origins(self) -> int:
        return self.features * _TRACED_SAMPLES * self.most_keys
