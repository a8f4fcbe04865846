"""Many embedding tables as one module of PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from training.embedding.config import EmbeddingBagConfig
from training.embedding.exchange import OwnedTable, Sharding, SharedLookups
from training.embedding.gradients import PooledBags, TableParameter
from training.embedding.inputs import FeatureBags, read_feature
from training.embedding.lookups import LocalLookups, Lookups
from training.embedding.table import EmbeddingTable, TableRows
from training.embedding.table_folders import write_tables
from training.processes import Processes
from training.samples import Bags


class EmbeddingBagCollection(torch.nn.Module):  # type: ignore[misc]
    """Embedding tables that look up bags of keys and combine each bag into one vector.

    One native call looks up the bags of all tables, and one updates their rows. Tables are in RAM; keys, weights and
    vectors may be on any device. An optimizer of ``training.optimizers`` must update the tables: it keeps its states in
    their rows, so ``state_dict()`` of the collection has them too.

        tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(16), "tags": EmbeddingBagConfig(16, "mean")})
        optimizer = training.optimizers.Adam(tables.parameters(), lr=0.01)
        vectors = tables({"user": users, "tags": (tags, offsets)})

    With a ``process_group``, every process calls ``forward``, and ``backward`` for its answer, the same number of times
    and with the same set of features. A row gets the mean of its gradients in all processes, as
    ``DistributedDataParallel`` does for the other parameters. Each process saves its own rows.

    In training mode with gradients enabled, ``forward`` adds rows for new keys. Evaluation changes nothing.

    Attributes:
        tables: the tables by name.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingBagConfig],
        *,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        sharding: Sharding = "key",
    ) -> None:
        """Make the tables.

        Args:
            tables: what each table is like, by name.
            seed: of the first weights. The tables draw different weights.
            process_group: the processes over which rows are spread. Its backend sends tensors of the CPU: "gloo", or
                "cpu:gloo,cuda:nccl". None: this process has all rows.
            sharding: ``"key"``: process ``key % processes`` has the row of a key. ``"table"``: each process has whole
                tables, one after the other.

        Raises:
            ValueError: a value is out of range, or two tables have a feature of the same name.
        """
        if sharding not in get_args(Sharding):
            raise ValueError(f"sharding: expected 'key' or 'table', got {sharding!r}")
        super().__init__()
        self._seed = seed
        self._sharding = sharding
        self._processes = Processes(process_group)
        self.tables: dict[str, EmbeddingTable] = {}
        for number, (name, config) in enumerate(tables.items()):
            shard = (self._processes.rank, self._processes.size)
            if sharding == "table":
                owns = number % self._processes.size == self._processes.rank
                config, shard = config if owns else replace(config, rows=None), (0, 1)
            self.tables[name] = EmbeddingTable(name, config, seed=seed + number, shard=shard)
        self._table_of: dict[str, str] = {}
        for name, config in tables.items():
            for feature in config.features or (name,):
                if feature in self._table_of:
                    both = f"{self._table_of[feature]!r} and {name!r}"
                    raise ValueError(f"feature {feature!r}: expected one table that reads it, got {both}")
                self._table_of[feature] = name
        for number, table in enumerate(self.tables.values()):  # a table's name may have dots, a parameter's may not
            self.register_parameter(f"table_{number}", TableParameter(table))
        self._parameter_of = dict(zip(self.tables, self.parameters(), strict=True))

    def extra_repr(self) -> str:
        """Return a line per table: PyTorch puts it into the module's repr."""
        lines = []
        for name, table in self.tables.items():
            features = ", ".join(feature for feature, read in self._table_of.items() if read == name)
            lines.append(f"({name}): {len(table):,} rows of {table.config.dim}, {table.config.combiner} of {features}")
        return "\n".join(lines)

    def forward(self, features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Look up and combine bags.

        Args:
            features: the bags of each feature, R of them, in one of these forms:

                - keys [R], one per bag, or keys [R, n], where -1 is padding;
                - ``(keys, offsets)`` or ``(keys, offsets, weights)``: keys [N], and R + 1 offsets from 0 to N, such
                  that bag r has the keys ``offsets[r]`` to ``offsets[r + 1]``;
                - a jagged tensor of ``torch.nested`` or of TorchRec;
                - ``training.samples.Bags``.

                A feature may be missing.

        Returns:
            float32[R, D] of each feature, on the device of its keys; [B, S, D] for ``Bags``.

        Raises:
            KeyError: no table reads a feature.
            TypeError: a feature, or one of its tensors, is of another type.
            ValueError: a tensor has another shape; or the distinct keys are more than ``max_rows``.
            IndexError: a key is none of a table's fixed rows.
            ReservedKeyError: a key is one of the four reserved values.
        """
        for feature in features:
            if feature not in self._table_of:
                raise KeyError(f"no table reads the feature {feature!r}; the features are {', '.join(self._table_of)}")
        if not features:
            return {}
        trains = self.training and torch.is_grad_enabled()
        # in the order of the tables, because the processes may pass the features in any order
        bags = {name: read_feature(name, features[name]) for name in self._table_of if name in features}
        parameters = [self._parameter_of[self._table_of[feature]] for feature in bags]
        lookups = self._look_up([parameter.table for parameter in parameters], list(bags.values()), trains)
        shapes = [(*one.shape, lookup.shape[1]) for one, lookup in zip(bags.values(), lookups.pooled, strict=True)]
        devices = [one.device for one in bags.values()]
        if trains:
            for parameter in parameters:
                parameter.drop()
        weights = [one.weights for one in bags.values()]
        updated = parameters if trains else [None] * len(parameters)
        pooled = PooledBags.apply(lookups, lookups.pooled, devices, *updated, *weights)
        of_bags = {feature: one.reshape(shape) for feature, one, shape in zip(bags, pooled, shapes, strict=True)}
        return {feature: of_bags[feature] for feature in features}

    def write_tables(self, folder: str | Path) -> None:
        """Write the rows of every table in HugeCTR's directory format, for ``hotrow import --checkpoint``.

        Every process calls this, and the first one writes. A table without rows gets no folder.

        Args:
            folder: ``<folder>/<table>`` has the rows. It is complete or absent, and replaces an earlier one.

        Raises:
            OutputError: a table's name cannot be a file's, ``folder`` has other files, or the file system refuses.
        """
        write_tables(self._processes, folder, {name: table.served_rows() for name, table in self.tables.items()})

    def owner_of(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the process that has the row of each key, int64[N]."""
        if self._sharding == "key":
            return keys % self._processes.size
        return np.full(keys.size, list(self.tables).index(table) % self._processes.size)

    def _owns(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        owns: NDArray[np.bool_] = self.owner_of(table, keys) == self._processes.rank
        return owns

    def _look_up(self, tables: Sequence[EmbeddingTable], bags: Sequence[FeatureBags], trains: bool) -> Lookups:
        if self._processes.size == 1:
            return LocalLookups(tables, bags, trains)
        names = list(self.tables)
        owners = [names.index(table.name) % self._processes.size for table in tables]
        owned = [
            OwnedTable(table, owner if self._sharding == "table" else None)
            for table, owner in zip(tables, owners, strict=True)
        ]
        return SharedLookups(self._processes, owned, bags, trains, divisor=self._processes.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingBagCollection":
        """Copy the tables with all rows. Gradients are not copied."""
        copied = type(self)(
            {name: table.config for name, table in self.tables.items()},
            seed=self._seed,
            process_group=self._processes.group,
            sharding=self._sharding,
        )
        copied.set_extra_state(self.get_extra_state())
        copied.train(self.training)
        return copied

    def get_extra_state(self) -> dict[str, Any]:
        """Return all rows with their states, for ``state_dict``."""
        return {
            "shard": [self._processes.rank, self._processes.size, self._sharding],
            "tables": {name: _table_state(table) for name, table in self.tables.items()},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Undo ``get_extra_state``. Rows that are not in ``state`` are removed.

        A state of one process can be loaded by any number of processes; each takes its own rows.

        Raises:
            ValueError: the state has other tables or rows of another shape, or is another process's share.
        """
        tables, shard = state["tables"], [self._processes.rank, self._processes.size, self._sharding]
        if set(tables) != set(self.tables):
            raise ValueError(f"expected the rows of {', '.join(self.tables)}, got those of {', '.join(tables)}")
        if state["shard"] != shard and state["shard"][1] != 1:
            raise ValueError(f"expected the rows of process {_shown(shard)}, got those of {_shown(state['shard'])}")
        for name, table in self.tables.items():
            _check_table_state(table, tables[name])
        for name, table in self.tables.items():
            mine = {part: self._owns(name, tables[name][part].numpy()) for part in ("keys", "sighted_keys")}
            _load_table_state(table, tables[name], mine["keys"], mine["sighted_keys"])


def pool(tables: Sequence[EmbeddingTable], features: Mapping[str, Bags]) -> dict[str, torch.Tensor]:
    """Look up and combine the bags of each feature in its own table, float32[B, S, D]. Nothing changes."""
    bags = [read_feature(feature, value) for feature, value in features.items()]
    pooled = LocalLookups(tables, bags, trains=False).pooled
    return {
        feature: torch.from_numpy(one).reshape(*of_feature.shape, one.shape[1])
        for feature, of_feature, one in zip(features, bags, pooled, strict=True)
    }


def _table_state(table: EmbeddingTable) -> dict[str, Any]:
    rows = TableRows(*table.native.read(table.native.changed_rows()))
    keys, counts = table.native.sightings()
    return {
        "rule": table.rule,
        "initial_states": list(table.initial_states),
        "keys": torch.from_numpy(rows.keys),
        "parts": torch.from_numpy(rows.parts),
        "last_steps": torch.from_numpy(rows.last_steps),
        "slot_ids": torch.from_numpy(rows.slot_ids.astype(np.int64)),
        "sighted_keys": torch.from_numpy(keys),
        "sightings": torch.from_numpy(counts),
    }


def _check_table_state(table: EmbeddingTable, state: dict[str, Any]) -> None:
    """Refuse rows of another shape, before a table is cleared for them."""
    parts, most = state["parts"], table.config.max_rows
    shape = (1 + len(state["initial_states"]), table.config.dim)
    if parts.shape[1:] != shape:
        raise ValueError(f"table {table.name!r}: expected rows {list(shape)}, got {list(parts.shape[1:])}")
    if most is not None and len(parts) > most:
        raise ValueError(f"table {table.name!r}: expected at most {most} rows, got {len(parts)}")


def _load_table_state(
    table: EmbeddingTable, state: dict[str, Any], mine: NDArray[np.bool_], sighted_mine: NDArray[np.bool_]
) -> None:
    table.clear()
    table.use_states(state["rule"], state["initial_states"])
    names = ("keys", "parts", "last_steps", "slot_ids", "sighted_keys", "sightings")
    keys, parts, last_steps, slot_ids, sighted, counts = (state[name].numpy() for name in names)
    table.load(TableRows(keys, parts, last_steps, slot_ids.astype(np.uint64))[mine])
    table.native.write_sightings(sighted[sighted_mine], counts[sighted_mine])


def _shown(shard: Sequence[Any]) -> str:
    rank, size, sharding = shard
    return f"{rank} of {size}, by {sharding}"
