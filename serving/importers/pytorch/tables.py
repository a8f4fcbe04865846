"""The embedding tables of a module: find them, and see or replace their lookups while the module runs."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, count
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serving.errors import ConfigError, did_you_mean
from serving.importers.pytorch.jagged import JaggedRows, padded
from serving.importers.pytorch.lines import at_line, line_of_call
from serving.importers.pytorch.pooling import NO_KEY, lengths_of_bags, matrix_positions, ragged_positions
from serving.model.records import Combiner
from serving.sources.rows import TableRows
from serving.sources.torch_file import rows_of_tensor

# the last part of a table's path in TorchRec's EmbeddingBagCollection is the table's own name
_TORCHREC = re.compile(r"(?:^|.*\.)embedding_bags\.([^.]+)")

#: Advice for keys that come with no request.
CONSTANT_KEYS = "for constant keys, index the table's weight instead"
#: The keys of one slot, one array per sample.
Slot = list[NDArray[np.int64]]
_MOST_POSITIONS = 1 << 16  # of a sequence


class Lookup(NamedTuple):
    """One call of a table.

    Attributes:
        table: its name.
        keys: the keys.
        offsets: where each bag begins; None: it was called without offsets.
        with_last_offset: whether the offsets end with N.
        line: of the module's code.
        feature: the feature of a collection without pooling; empty for other calls.
        most: L, the positions to which the rows of this feature or of each bag were padded.
        is_pooled: the network gets one vector; False: it gets the row of each key.
        weights: of the keys of bags; None: they have none.
    """

    table: str
    keys: Tensor
    offsets: Tensor | None
    with_last_offset: bool
    line: str
    feature: str = ""
    most: int = 0
    is_pooled: bool = True
    weights: Tensor | None = None


class _Unpooled(NamedTuple):
    """A collection whose rows are not pooled: the feature and the table of each answer."""

    module: nn.Module
    answers: dict[str, tuple[str, str]]


class Tables:
    """The tables in a module, by the names that they get as tables of a model.

    They are ``nn.EmbeddingBag``, ``nn.Embedding``, and the tables in collections of TorchRec and of Hotrow.
    """

    def __init__(self, source: str, module: nn.Module, most_keys: Mapping[str, int]) -> None:
        """Find them.

        Args:
            source: names the module in messages.
            module: the module.
            most_keys: by table, the most keys of a bag whose rows the network pools.

        Raises:
            ConfigError: there is no such table, or a number is wrong.
        """
        self._source, self._most = source, most_keys
        self._modules: dict[str, nn.Module] = {}
        self._collections: list[tuple[nn.Module, dict[str, str]]] = []  # and the names of its tables
        self._trained: dict[str, Any] = {}  # tables of collections
        self._unpooled: list[_Unpooled] = []
        self._of_unpooled: set[str] = set()  # tables of PyTorch in such collections
        trained = sys.modules.get("training.embedding")  # without it, no module has a collection
        for path, part in module.named_modules():
            taken = {**self._modules, **self._trained}
            if isinstance(part, nn.EmbeddingBag | nn.Embedding):
                if not any(part is table for table in self._modules.values()):
                    self._modules[_free_name(path or type(part).__name__, taken)] = part
            elif trained is not None and isinstance(part, trained.EmbeddingBagCollection):
                names = {name: _free_name(name, taken) for name in part.tables}
                self._trained.update({names[name]: table for name, table in part.tables.items()})
                if isinstance(part, trained.EmbeddingCollection):
                    features = {
                        feature: names[name]
                        for name, table in part.tables.items()
                        for feature in table.config.features or (name,)
                    }
                    self._unpooled.append(_Unpooled(part, {one: (one, table) for one, table in features.items()}))
                else:
                    self._collections.append((part, names))
            elif _is_embedding_collection(part):
                names = {}
                for name, table in part.embeddings.items():
                    names[name] = _free_name(name, {**taken, **self._modules})
                    self._modules[names[name]] = table
                self._of_unpooled |= set(names.values())
                self._unpooled.append(_Unpooled(part, _answers_of(part, names)))
        self._check_most({**self._modules, **self._trained})

    def _check_most(self, tables: Mapping[str, Any]) -> None:
        if not isinstance(self._most, Mapping):
            reason = f"expected {{table: most keys of a bag}}, got {self._most!r}"
            raise ConfigError(self._source, "most_keys", reason)
        for name, most in self._most.items():
            if name not in tables:
                close = did_you_mean(str(name), tables)
                raise ConfigError(
                    self._source, "most_keys", f"there is no table {name!r}{close}; it has {', '.join(tables)}"
                )
            if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= _MOST_POSITIONS:
                reason = f"expected 1 to {_MOST_POSITIONS} keys of {name!r}, got {most!r}"
                raise ConfigError(self._source, "most_keys", reason)

    def refuse_idle_most(self, lookups: Sequence[Lookup]) -> None:
        """Raise ConfigError if ``most_keys`` names a table whose rows the network does not pool."""
        needed = {lookup.table for lookup in lookups if lookup.most}
        if idle := next((name for name in self._most if name not in needed), None):
            reason = f"{idle!r} needs no number: it has no bags with offsets and mode='max' or weights"
            raise ConfigError(self._source, "most_keys", reason)

    def padding_idx(self, table: str) -> int | None:
        """Return the ``padding_idx`` of a table of PyTorch."""
        key: int | None = getattr(self._modules.get(table), "padding_idx", None)
        return key

    def padding_key(self, lookup: Lookup) -> int | None:
        """Return the key that the bags of a lookup leave out."""
        if lookup.table in self._trained:
            return NO_KEY if lookup.offsets is None else None
        is_bag = isinstance(self._modules[lookup.table], nn.EmbeddingBag)
        return self.padding_idx(lookup.table) if is_bag else None

    def size(self, table: str) -> tuple[int, int]:
        """Return V and D of a table."""
        if table in self._trained:
            return len(self._trained[table]), self._trained[table].config.dim
        rows, dim = self._modules[table].weight.shape
        return rows, dim

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table's rows."""
        if table in self._trained:
            keys: NDArray[np.int64] = self._trained[table].rows()[0]
            if not keys.size:
                raise ConfigError(self._source, table, "expected a table with rows, got one that was not trained")
            return keys
        return np.arange(self.size(table)[0])

    def rows(self, table: str) -> TableRows:
        """Return a table's rows. Raise an error if it cannot be served."""
        source = f"{self._source}.{table}"
        if table not in self._trained:
            return rows_of_tensor(source, self._modules[table].weight.detach())
        trained, (rows, dim) = self._trained[table], self.size(table)
        keys, vectors = (np.concatenate(parts) for parts in zip(*trained.served_rows(), strict=True))
        return TableRows(source, rows, dim, keys, lambda begin, end: vectors[begin:end], pooling=trained.config.pooling)

    def row(self, table: str, key: int) -> Tensor:
        """Return a row of an ``nn.Embedding``, float32[D]."""
        row: Tensor = self._modules[table].weight[key]
        return row

    def combiner(self, table: str) -> Combiner:
        """Return how a table pools."""
        if table in self._trained:
            combiner: Combiner = self._trained[table].config.combiner
            return combiner
        return "mean" if getattr(self._modules[table], "mode", "sum") == "mean" else "sum"

    @contextmanager
    def watched(self, vectors: Mapping[str, Sequence[Tensor]] | None = None) -> Iterator[list[Lookup]]:
        """Record the lookups of a run of the module into the list that this returns.

        Args:
            vectors: by table, parts [B, S, D] with the answers to its next slots. None: the tables answer themselves.
        """
        lookups: list[Lookup] = []
        replaced: list[nn.Module] = []
        answers = None if vectors is None else _Answers(self._source, vectors)
        try:
            for name, table in self._modules.items():
                if name in self._of_unpooled:
                    continue
                if "forward" in vars(table):
                    raise ConfigError(self._source, name, "its forward was replaced; expected PyTorch's own")
                table.forward = partial(self._look_up, name, table.forward, lookups, answers)
                replaced.append(table)
            for collection, names in self._collections:
                collection.forward = partial(self._look_up_features, collection, names, lookups, answers)
                replaced.append(collection)
            for part in self._unpooled:
                part.module.forward = partial(self._look_up_rows, part, lookups, answers)
                replaced.append(part.module)
            trained = [part for part, _ in self._collections] + [part.module for part in self._unpooled]
            with _without_parameters([part for part in trained if hasattr(part, "tables")]):
                yield lookups
        finally:
            for table in replaced:
                del table.forward

    def slots(self, lookups: Sequence[Lookup], samples: int) -> tuple[dict[str, list[Slot]], dict[str, list[Lookup]]]:
        """Return the slots of each table in order of the calls, and the call of each.

        Raises:
            ConfigError: a call had another number of samples.
        """
        slots: dict[str, list[Slot]] = {}
        calls: dict[str, list[Lookup]] = {}
        for lookup in lookups:
            of_call = self._slots(lookup, samples)
            slots.setdefault(lookup.table, []).extend(of_call)
            calls.setdefault(lookup.table, []).extend([lookup] * len(of_call))
        return slots, calls

    def _look_up(
        self,
        name: str,
        original: Any,
        lookups: list[Lookup],
        answers: "_Answers | None",
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Any:
        """Record a lookup and answer it. This stands in for ``forward`` of a table."""
        table, line = self._modules[name], line_of_call()
        # The network pools the rows of a fixed number of keys in any way, because it gets each row.
        in_network = getattr(table, "mode", "") == "max" or per_sample_weights is not None
        if refusal := _refusal(table):
            raise ConfigError(self._source, name, f"{refusal}{at_line(line)}")
        is_pooled = not isinstance(table, nn.Embedding) and not in_network
        with_last = getattr(table, "include_last_offset", False)
        lookup = Lookup(name, input, offsets, with_last, line, is_pooled=is_pooled, weights=per_sample_weights)
        if in_network and offsets is not None:
            how = "pools with mode='max'" if per_sample_weights is None else "is called with per_sample_weights"
            lookup = self._with_most(lookup, how, is_concrete=answers is None)
        lookups.append(lookup)
        if answers is None:
            return original(input, *(() if isinstance(table, nn.Embedding) else (offsets, per_sample_weights)))
        if lookup.most:
            return answers.pool(lookup)
        rows = answers.take(name, None if is_pooled else input.shape[1:])
        return rows if not in_network else matrix_positions(input, table.padding_idx, per_sample_weights).pool(rows)

    def _with_most(self, lookup: Lookup, how: str, *, is_concrete: bool) -> Lookup:
        """Return a lookup of bags whose rows the network pools.

        Raises:
            ConfigError: ``most_keys`` does not have the table, or a bag has more keys.
        """
        name, most = lookup.table, self._most.get(lookup.table)
        if most is None:
            reason = f"{how} and offsets, so the network pools; expected most_keys={{{name!r}: 50}}"
            reason = f"{reason}, the most keys of a bag, or keys [B, n]"
            raise ConfigError(self._source, name, f"{reason}{at_line(lookup.line)}")
        assert lookup.offsets is not None
        if is_concrete:
            longest = int(lengths_of_bags(lookup.keys, lookup.offsets, lookup.with_last_offset).max())
            if longest > most:
                reason = (
                    f"expected at most {most} keys in a bag, as most_keys says, got {longest}{at_line(lookup.line)}"
                )
                raise ConfigError(self._source, name, reason)
        return lookup._replace(most=most)

    def _look_up_features(
        self,
        collection: Any,
        names: Mapping[str, str],
        lookups: list[Lookup],
        answers: "_Answers | None",
        features: Any,
    ) -> Any:
        """Record the lookups of a collection and answer them. This stands in for its ``forward``."""
        if hasattr(features, "to_dict"):
            features = features.to_dict()
        answered = {}
        for feature, value in features.items():
            name = names[collection.table_of(feature)]
            keys, offsets, weights = (*(value if isinstance(value, tuple) else _keys_and_offsets(value)), None)[:3]
            lookup = Lookup(name, keys, offsets, True, line_of_call(), weights=weights)
            if weights is not None:
                if self.combiner(name) != "sum":
                    reason = f"expected the combiner sum for keys with weights, got {self.combiner(name)}"
                    raise ConfigError(self._source, name, f"{reason}{at_line(lookup.line)}")
                how = "is called with weights"
                lookup = self._with_most(lookup._replace(is_pooled=False), how, is_concrete=answers is None)
            lookups.append(lookup)
            if answers is not None:
                answered[feature] = answers.pool(lookup) if lookup.most else answers.take(name, None)
        return type(collection).forward(collection, features) if answers is None else answered

    def _look_up_rows(
        self, part: _Unpooled, lookups: list[Lookup], answers: "_Answers | None", features: Any
    ) -> dict[str, JaggedRows]:
        """Stand in for ``forward`` of a collection whose rows are not pooled. Padding an answer is a lookup."""
        own = type(part.module).forward(part.module, features) if answers is None else {}
        features = features.to_dict() if hasattr(features, "to_dict") else features
        found = {}
        for answer, (feature, table) in part.answers.items():
            if feature not in features:
                continue
            value = features[feature]
            if isinstance(value, Tensor):
                reason = f"{feature!r}: expected keys with offsets{at_line(line_of_call())}"
                raise ConfigError(self._source, table, reason)
            if isinstance(value, tuple) and not hasattr(value, "lengths"):
                keys, offsets, *_ = value
                lengths = offsets.diff()
            else:  # TorchRec's own offsets are made by an operator that cannot be exported
                keys, lengths = value.values(), value.lengths()
                offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            lookup = Lookup(table, keys, offsets, True, "", feature, is_pooled=False)
            pad = partial(self._pad, lookup, lengths, lookups, answers, own.get(answer))
            found[answer] = JaggedRows(f"{self._source}: {table}", lengths, pad)
        return found

    def _pad(
        self,
        lookup: Lookup,
        lengths: Tensor,
        lookups: list[Lookup],
        answers: "_Answers | None",
        own: Any,
        most: int,
        padding: float,
    ) -> Tensor:
        """Return the rows of a feature, float32[B, L, D]; ``own`` are those that the collection returned."""
        lookups.append(lookup._replace(line=line_of_call(), most=most))
        if answers is None:
            rows: Tensor = own.to_padded_dense(most, padding)
            return rows
        rows = answers.take(lookup.table, (most,))
        is_key = torch.arange(most) < lengths[:, None]
        return torch.where(is_key[..., None], rows, padding) if padding else rows

    def _slots(self, lookup: Lookup, samples: int) -> list[Slot]:
        table = self._modules.get(lookup.table)
        keys = lookup.keys.numpy().astype(np.int64)
        if lookup.most and lookup.offsets is not None:
            lengths = lengths_of_bags(lookup.keys, lookup.offsets, lookup.with_last_offset)
            of_positions = padded(keys, lengths.numpy(), lookup.most, NO_KEY).T
            return [[key[None] for key in column] for column in of_positions]
        if lookup.offsets is not None:
            begins = lookup.offsets.tolist()
            ends = begins[1:] if lookup.with_last_offset else [*begins[1:], len(keys)]
            bags = [keys[begin:end] for begin, end in zip(begins, ends, strict=False)]
        else:
            bags = list(keys)
        if table is None:
            bags = [bag.reshape(-1) for bag in bags]
        if len(bags) != samples:
            expected, came = "keys [B] or [B, n]", f"{list(keys.shape)}"
            advice = f"for a list of keys per sample, pad it and use sequences={{...}}; {CONSTANT_KEYS}"
            if isinstance(table, nn.EmbeddingBag):
                expected, came, advice = "a bag for each sample", f"{len(bags)} bags", CONSTANT_KEYS
            reason = f"expected {expected} with B = {samples}, got {came}; {advice}{at_line(lookup.line)}"
            raise ConfigError(self._source, lookup.table, reason)
        if not lookup.is_pooled:
            return [[key[None] for key in column] for column in keys.reshape(samples, -1).T]
        if (left_out := self.padding_key(lookup)) is not None:
            bags = [bag[bag != left_out] for bag in bags]
        return [bags]


class _Answers:
    """Vectors for the lookups of one run."""

    def __init__(self, source: str, vectors: Mapping[str, Sequence[Tensor]]) -> None:
        self._source = source
        self._vectors = vectors
        self._used = dict.fromkeys(vectors, 0)

    def take(self, table: str, sizes: Sequence[int] | None) -> Tensor:
        """Return the next vectors: [B, D] of one bag per sample, or [B, *sizes, D] of single keys."""
        if table not in self._vectors:
            reason = f"is called, but was not called with the example{at_line(line_of_call())}"
            raise ConfigError(self._source, table, reason)
        vectors, first = self._vectors[table], self._used[table]
        end = self._used[table] = first + (1 if sizes is None else prod(sizes))
        if end > (slots := sum(part.shape[1] for part in vectors)):
            reason = f"looks up more slots than the {slots} of the example{at_line(line_of_call())}"
            raise ConfigError(self._source, table, reason)
        begins = accumulate((part.shape[1] for part in vectors), initial=0)
        parts = [
            part[:, max(first - begin, 0) : end - begin]
            for part, begin in zip(vectors, begins, strict=False)
            if begin < end and first < begin + part.shape[1]
        ]
        taken = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return taken[:, 0] if sizes is None else taken.reshape(-1, *sizes, vectors[0].shape[2])

    def pool(self, lookup: Lookup) -> Tensor:
        """Return the rows of the next bags, pooled as their table does it, float32[B, D]."""
        assert lookup.offsets is not None
        rows = self.take(lookup.table, (lookup.most,))
        keys, offsets, weights = lookup.keys, lookup.offsets, lookup.weights
        return ragged_positions(keys, offsets, lookup.with_last_offset, weights, rows.shape[0], lookup.most).pool(rows)


def _keys_and_offsets(value: Any) -> tuple[Any, ...]:
    """Return the keys of one feature of a collection, their offsets, and weights of TorchRec's ``JaggedTensor``."""
    if isinstance(value, Tensor):
        return value, None
    return value.values(), value.offsets(), value.weights_or_none()


@contextmanager
def _without_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the parameters of modules. PyTorch cannot trace them, because they have no elements."""
    kept = [dict(module._parameters) for module in modules]
    for module in modules:
        module._parameters.clear()
    try:
        yield
    finally:
        for module, parameters in zip(modules, kept, strict=True):
            module._parameters.update(parameters)


def _is_embedding_collection(part: nn.Module) -> bool:
    """Whether a module is TorchRec's ``EmbeddingCollection``."""
    methods = ("embedding_configs", "embedding_names_by_table")
    return isinstance(getattr(part, "embeddings", None), nn.ModuleDict) and all(hasattr(part, name) for name in methods)


def _answers_of(collection: Any, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the feature and the table of each answer of TorchRec's collection, whose tables have ``names``."""
    configs, answers = collection.embedding_configs(), collection.embedding_names_by_table()
    return {
        answer: (feature, names[config.name])
        for config, of_table in zip(configs, answers, strict=True)
        for answer, feature in zip(of_table, config.feature_names, strict=True)
    }


def _refusal(table: nn.Module) -> str:
    """Return why a table cannot be imported, or an empty text."""
    if type(table).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return f"{type(table).__name__} has its own forward; expected nn.EmbeddingBag or nn.Embedding"
    if table.max_norm is not None:
        return f"has max_norm={table.max_norm}, which changes rows on each call; scale the rows once and set it to None"
    return ""


def _free_name(path: str, taken: Mapping[str, nn.Module]) -> str:
    """Return a table's name: its path, or TorchRec's own name."""
    in_torchrec = _TORCHREC.fullmatch(path)
    names = [in_torchrec[1], path] if in_torchrec else [path]
    names = [re.sub(r"[^A-Za-z0-9_.-]", "_", name) for name in names]
    more = (f"{names[-1]}_{number}" for number in count(2))
    return next(name for name in chain(names, more) if name not in taken)
