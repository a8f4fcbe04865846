"""Many embedding tables as one module of PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from training.embedding.eager import eager
from training.embedding.exchange import OwnedTable, Sharding, SharedLookups
from training.embedding.gradients import PooledBags
from training.embedding.inputs import NO_BAGS, FeatureBags, by_feature, read_feature
from training.embedding.joining import is_of_collection, join_shares, shares_of
from training.embedding.lookups import LocalLookups, LookedUpRows, Lookups
from training.embedding.parameter import TableParameter, sinks_of, which_make_rows
from training.embedding.table_folders import write_tables
from training.processes import Processes
from training.samples import Bags
from training.tables.config import EmbeddingBagConfig
from training.tables.table import EmbeddingTable


class EmbeddingBagCollection(torch.nn.Module):  # type: ignore[misc]
    """Embedding tables that look up bags of keys and combine each bag into one vector.

    One native call looks up the bags of all tables, and one updates their rows. Tables are in RAM; keys, weights and
    vectors may be on any device. An optimizer of ``training.optimizers`` must update the tables: it keeps its states in
    their rows, so ``state_dict()`` of the collection has them too.

        tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(16), "tags": EmbeddingBagConfig(16, "mean")})
        optimizer = training.optimizers.Adam(tables.parameters(), lr=0.01)
        vectors = tables({"user": users, "tags": (tags, offsets)})

    With a ``process_group``, every process calls ``forward`` and the optimizer's ``step`` and ``zero_grad`` in the same
    order, and reads ``grad`` if another one does. Features and losses may differ. A row gets the mean of its gradients
    in all processes, as ``DistributedDataParallel`` does for the other parameters. Each process saves its own rows.

    In training mode with gradients enabled, ``forward`` adds rows for new keys to tables that require gradients.
    Evaluation adds none. As for any parameter, gradients do not depend on the mode. ``docs/embedding-tables.md`` says
    what PyTorch's functions do with the parameters.

    Attributes:
        tables: the tables by name.
        processes: those that have the rows.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingBagConfig],
        *,
        seed: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        sharding: Sharding = "key",
    ) -> None:
        """Make the tables.

        Args:
            tables: what each table is like, by name.
            seed: of the first weights. The tables draw different weights. None: the generator of PyTorch draws a seed,
                so ``torch.manual_seed`` decides.
            process_group: the processes over which rows are spread. Its backend sends tensors of the CPU: "gloo", or
                "cpu:gloo,cuda:nccl". None: this process has all rows.
            sharding: ``"key"``: process ``key % processes`` has the row of a key. ``"table"``: each process has whole
                tables, one after the other.

        Raises:
            TypeError: ``tables`` is not a dictionary, or has something other than an ``EmbeddingBagConfig``.
            ValueError: a value is out of range, or two tables have a feature of the same name.
        """
        _check_arguments(tables, seed, sharding)
        super().__init__()
        self._sharding = sharding
        self.processes = Processes(process_group)
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        self._configs = dict(tables)
        self.tables: dict[str, EmbeddingTable] = {}
        for number, (name, config) in enumerate(tables.items()):
            shard = (self.processes.rank, self.processes.size)
            if sharding == "table":
                owns = number % self.processes.size == self.processes.rank
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
            owner = number % self.processes.size if sharding == "table" else None
            self.register_parameter(f"table_{number}", TableParameter(table, self.processes, owner))
        self._parameter_of = dict(zip(self.tables, self.parameters(), strict=True))
        # A state has the rows, so it needs no parameters without elements.
        self.register_state_dict_post_hook(_drop_parameters)
        self.register_load_state_dict_pre_hook(_ignore_parameters)
        self.register_load_state_dict_post_hook(_miss_no_parameters)

    def extra_repr(self) -> str:
        """Return a line per table: PyTorch puts it into the module's repr."""
        lines = []
        for name, table in self.tables.items():
            features = ", ".join(feature for feature, read in self._table_of.items() if read == name)
            lines.append(f"({name}): {table.shown}, {table.config.combiner} of {features}")
        return "\n".join(lines)

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``."""
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script cannot have the rows, which are outside PyTorch; "
            "hotrow.from_torch exports a module with them"
        )

    @eager
    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Look up and combine bags.

        Args:
            features: TorchRec's ``KeyedJaggedTensor``, or a dictionary with the bags of each feature, R of them, in one
                of these forms:

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
            RuntimeError: there are several processes without a ``process_group``; another process does something else,
                or has ended; ``torch.utils.checkpoint`` would not make rows; a parameter was replaced; or PyTorch
                exports, traces or transforms the call.
        """
        features = by_feature(features)
        for feature in features:
            self.table_of(feature)
        for number, (name, own) in enumerate(self._parameter_of.items()):
            registered = self._parameters.get(f"table_{number}", own)
            if registered is not own or own.table is not self.tables[name]:
                expected = "its own parameter, because another one has other rows or none"
                raise RuntimeError(f"table {name!r}: expected {expected}, got {type(registered).__name__}")
        # In the order of the tables, because the processes may pass the features in any order. A feature that is not
        # here may be in another process.
        bags = {
            name: read_feature(name, features[name]) if name in features else NO_BAGS
            for name in self._table_of
            if name in features or self.processes.size > 1
        }
        if not bags:
            return {}
        parameters = [self._parameter_of[self._table_of[feature]] for feature in bags]
        makes_rows = which_make_rows(parameters, list(bags.values()), self.training)
        if any(makes_rows):
            group = "process_group=torch.distributed.group.WORLD or a group of this process alone"
            self.processes.require_joined("EmbeddingBagCollection", group)
        lookups = self._look_up([parameter.table for parameter in parameters], list(bags.values()), makes_rows)
        shapes = [(*one.shape, lookup.shape[1]) for one, lookup in zip(bags.values(), lookups.pooled, strict=True)]
        devices = [bag.device for bag in bags.values()]
        weights = [bag.weights for bag in bags.values()]
        pooled = PooledBags.apply(lookups, sinks_of(parameters, lookups), devices, *parameters, *weights)
        of_bags = {feature: one.reshape(shape) for feature, one, shape in zip(bags, pooled, shapes, strict=True)}
        return {feature: of_bags[feature] for feature in features}

    def table_of(self, feature: str) -> str:
        """Return the name of the table that reads a feature.

        Raises:
            KeyError: no table reads it.
        """
        if feature not in self._table_of:
            raise KeyError(f"no table reads the feature {feature!r}; the features are {', '.join(self._table_of)}")
        return self._table_of[feature]

    def parameter_of(self, table: str) -> TableParameter:
        """Return the parameter of a table, for a parameter group with a learning rate of its own.

        Raises:
            KeyError: there is no such table.
        """
        if table not in self._parameter_of:
            raise KeyError(f"no table {table!r}; the tables are {', '.join(self._parameter_of)}")
        parameter: TableParameter = self._parameter_of[table]
        return parameter

    def write_tables(self, folder: str | Path) -> None:
        """Write the rows of every table in HugeCTR's directory format, for ``hotrow import --checkpoint``.

        The files also have the combiners, and the ``default_value`` of unknown keys.

        Every process calls this, and the first one writes. A table without rows gets no folder.

        Args:
            folder: ``<folder>/<table>`` has the rows. It is complete or absent, and replaces an earlier one.

        Raises:
            OutputError: a table's name cannot be a file's, ``folder`` has other files, or the file system refuses.
        """
        rows = {name: table.served_rows() for name, table in self.tables.items()}
        write_tables(self.processes, folder, rows, {name: config.pooling for name, config in self._configs.items()})

    def owner_of(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the process that has the row of each key, int64[N]."""
        if self._sharding == "key":
            return keys % self.processes.size
        return np.full(keys.size, list(self.tables).index(table) % self.processes.size)

    def _owns(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        owns: NDArray[np.bool_] = self.owner_of(table, keys) == self.processes.rank
        return owns

    def _look_up(
        self, tables: Sequence[EmbeddingTable], bags: Sequence[FeatureBags], trains: Sequence[bool]
    ) -> Lookups:
        if self.processes.size == 1:
            return LocalLookups(tables, bags, trains)
        # the config of every process, so that all refuse the same keys
        shared = [LookedUpRows(table.name, self._configs[table.name], table.native) for table in tables]
        owners = [self._parameter_of[table.name].owner for table in tables]
        owned = list(map(OwnedTable, shared, owners))
        return SharedLookups(self.processes, owned, bags, trains, divisor=self.processes.size)

    def get_extra_state(self) -> dict[str, Any]:
        """Return all rows of this process with their states, for ``state_dict``."""
        rank, size = self.processes.rank, self.processes.size
        share = {
            "shard": [rank, size, self._sharding],
            "tables": {name: _as_tensors(table.state()) for name, table in self.tables.items()},
        }
        return share if size == 1 else {f"process {rank} of {size}": share}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Undo ``get_extra_state``. Rows that are not in ``state`` are removed.

        Any number of processes can load the state of one process; each takes its own rows. As many processes can load
        the states of several processes. ``join_state_dicts`` makes them the state of one process, and so does
        ``dcp_to_torch`` of PyTorch from a folder of ``torch.distributed.checkpoint``.

        Raises:
            ValueError: the state has other tables or rows of another shape, is another process's share, or has the
                states of another optimizer.
        """
        shard = [self.processes.rank, self.processes.size, self._sharding]
        if not is_of_collection(state):
            raise ValueError(f"expected the state of an EmbeddingBagCollection, got {type(state).__name__}")
        shares = shares_of(state)
        own = [share for share in shares if share["shard"] == shard]
        [state] = own or (shares if len(shares) == 1 else [join_shares("this collection", shares)])
        tables = state["tables"]
        if set(tables) != set(self.tables):
            raise ValueError(f"expected the rows of {', '.join(self.tables)}, got those of {', '.join(tables)}")
        if state["shard"] != shard and state["shard"][1] != 1:
            reason = f"expected the rows of process {_shown(shard)}, got those of {_shown(state['shard'])}"
            raise ValueError(f"{reason}; join the states of all processes with training.join_state_dicts")
        for name, table in self.tables.items():
            table.check_state(tables[name], partial(self._owns, name))
        for name, table in self.tables.items():
            table.load_state(tables[name], partial(self._owns, name))


def pool(tables: Sequence[EmbeddingTable], features: Mapping[str, Bags]) -> dict[str, torch.Tensor]:
    """Look up and combine the bags of each feature in its own table, float32[B, S, D]. Nothing changes."""
    bags = [read_feature(feature, value) for feature, value in features.items()]
    pooled = LocalLookups(tables, bags, [False] * len(bags)).pooled
    return {
        feature: torch.from_numpy(one).reshape(*of_feature.shape, one.shape[1])
        for feature, of_feature, one in zip(features, bags, pooled, strict=True)
    }


def _check_arguments(tables: Any, seed: Any, sharding: Any) -> None:
    if sharding not in get_args(Sharding):
        raise ValueError(f"sharding: expected 'key' or 'table', got {sharding!r}")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ValueError(f"seed: expected an int from 0 to {2**63 - 1}, got {seed!r}")
    expected = "tables: expected a dictionary with an EmbeddingBagConfig for each table's name"
    if not isinstance(tables, Mapping):
        raise TypeError(f"{expected}, got {type(tables).__name__}")
    for name, config in tables.items():
        if not isinstance(name, str) or not isinstance(config, EmbeddingBagConfig):
            raise TypeError(f"{expected}, got {name!r}: {type(config).__name__}")


def _shown(shard: Sequence[Any]) -> str:
    rank, size, sharding = shard
    return f"{rank} of {size}, by {sharding}"


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's state with tensors, which ``torch.load`` reads without running code."""
    arrays = {name: torch.from_numpy(value) for name, value in state.items() if isinstance(value, np.ndarray)}
    return {**state, **arrays}


def _drop_parameters(module: EmbeddingBagCollection, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, _ in module.named_parameters():
        state.pop(prefix + name, None)


def _ignore_parameters(module: EmbeddingBagCollection, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Ignore the parameters in a state of an earlier version."""
    module.names_in_state = {prefix + name for name, _ in module.named_parameters()}
    for name in module.names_in_state:
        state.pop(name, None)


def _miss_no_parameters(module: EmbeddingBagCollection, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in module.names_in_state]
