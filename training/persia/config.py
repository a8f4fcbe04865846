"""Persia's two configuration files, ``embedding_config.yml`` and ``global_config.yml``. Unknown keys are errors."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from serving.errors import ConfigError
from serving.model.pooling import Pooling
from serving.model.regular_file import read_regular
from serving.model.strict_json import Fields, parse_json

_LARGEST_CAPACITY = 3_500_000_000  # rows of a table
_LARGEST_DIM = 65_536
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of ``slots_config``.

    Attributes:
        name: the feature's name.
        group: features of one group share their rows.
        dim: D.
        is_summed: the rows of a sample are added up. Otherwise the feature is raw: a sample has a row per sign.
        sample_fixed_size: how many signs of a sample a raw feature keeps.
        has_sqrt_scaling: the sum is divided by the square root of the number of rows.
        hash_stack_rounds: a sign has so many rows in a table of buckets; 0: it has its own row.
        hash_stack_size: buckets per round.
        prefix: the high bits of the group's signs.
        spacing: signs without prefix are taken modulo this number.
    """

    name: str
    group: str
    dim: int
    is_summed: bool
    sample_fixed_size: int
    has_sqrt_scaling: bool
    hash_stack_rounds: int
    hash_stack_size: int
    prefix: int
    spacing: int

    @property
    def pooling(self) -> Pooling:
        """How the rows of a slot become one vector; not known for a raw feature whose slots have at most one row."""
        if not self.is_summed and self.rows_per_sign == 1:
            return Pooling()
        return Pooling("sqrtn" if self.has_sqrt_scaling else "sum")

    @property
    def rows_per_sign(self) -> int:
        """How many rows a sign has."""
        return max(1, self.hash_stack_rounds)


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The features. The sign of a row is ``sign % spacing + prefix``, as in Persia.

    The last of the 2^bits - 1 prefixes is not used, because it could lead to a key that tables reserve.

    Attributes:
        features: by name.
    """

    features: dict[str, Feature]

    @property
    def dims(self) -> list[int]:
        """The different D of the features, ascending. A server has one table for each."""
        return sorted({feature.dim for feature in self.features.values()})

    @property
    def groups(self) -> dict[str, Feature]:
        """One feature of each group, by the group's name."""
        return {feature.group: feature for feature in self.features.values()}


def read_embedding_config(path: str | Path) -> EmbeddingConfig:
    """Read ``embedding_config.yml``.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is not known. The message says where.
    """
    fields = _read(path, ("feature_index_prefix_bit", "slots_config", "feature_groups"))
    bits = fields.integer("feature_index_prefix_bit", 8, minimum=2, maximum=32)
    slots = fields.object("slots_config")
    if not list(slots):
        raise fields.error("expected at least one feature, got none", "slots_config")
    groups = _groups(fields, list(slots))
    if "" in groups:
        raise fields.error("expected a name for each feature and each group, got an empty one")
    if len(groups) > 2**bits - 2:
        raise fields.error(f"expected at most {2**bits - 2} groups, got {len(groups)}", "feature_index_prefix_bit")
    group_of = {name: group for group, names in groups.items() for name in names}
    features = {}
    for name in slots:
        prefix = list(groups).index(group_of[name]) + 1 << 64 - bits
        features[name] = _feature(slots, name, group_of[name], prefix, (1 << 64 - bits) - 1)
    for group, names in groups.items():
        dims = {name: features[name].dim for name in names}
        if len(set(dims.values())) > 1:
            raise fields.error(f"expected one dim in the group, because its features share rows, got {dims}", group)
    return EmbeddingConfig(features)


def _groups(fields: Fields, slots: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the features of each group. A feature that is in no group is a group of its own."""
    groups: dict[str, tuple[str, ...]] = {}
    given = fields.object("feature_groups") if fields.value("feature_groups", None) else None
    for group in given or ():
        assert given is not None
        groups[group] = given.texts(group)
        for name in groups[group]:
            if name not in slots:
                raise given.error(f"expected features of slots_config, got {name!r}", group)
    grouped = [name for names in groups.values() for name in names]
    for name in slots:
        if grouped.count(name) > 1:
            raise fields.error(f"expected feature {name!r} in one group, got it in several", "feature_groups")
        if name in groups and name not in grouped:
            raise fields.error(f"{name!r} is a group and a feature outside groups; rename one", "feature_groups")
    return {**groups, **{name: (name,) for name in slots if name not in grouped}}


def _feature(slots: Fields, name: str, group: str, prefix: int, spacing: int) -> Feature:
    known = ("dim", "sample_fixed_size", "embedding_summation", "sqrt_scaling", "hash_stack_config")
    fields = slots.object(name, known)
    rounds = size = 0
    if "hash_stack_config" in fields:
        stack = fields.object("hash_stack_config", ("hash_stack_rounds", "embedding_size"))
        rounds = stack.integer("hash_stack_rounds", minimum=0, maximum=64)
        size = stack.integer("embedding_size", minimum=min(rounds, 1))
        if rounds * size > spacing:
            raise stack.error(f"expected at most {spacing} buckets in all rounds, got {rounds * size}")
    return Feature(
        name,
        group,
        fields.integer("dim", maximum=_LARGEST_DIM),
        fields.boolean("embedding_summation", True),
        fields.integer("sample_fixed_size", 10),
        fields.boolean("sqrt_scaling", False),
        rounds,
        size,
        prefix,
        spacing,
    )


def read_global_config(path: str | Path) -> int:
    """Read ``global_config.yml``, and return the capacity of a server: the most rows of each of its tables.

    Raises:
        ConfigError: the file cannot be read, a key or a value is not known, or asks for what is absent here.
    """
    fields = _read(path, ("common_config", "embedding_worker_config", "embedding_parameter_server_config"))
    common = _section(
        fields,
        "common_config",
        ("metrics_config", "job_type", "infer_config", "checkpointing_config", "num_embedding_io_workers"),
    )
    common.choice("job_type", {"Train": None}, "Train")
    metrics = _section(common, "metrics_config", ("enable_metrics", "job_name", "push_interval_seconds"))
    metrics.choice("enable_metrics", {False: None}, False)
    _section(fields, "embedding_worker_config", ("forward_buffer_size", "buffered_data_expired_sec"))
    servers = _section(
        fields,
        "embedding_parameter_server_config",
        (
            "capacity",
            "num_hashmap_internal_shards",
            "enable_incremental_update",
            "incremental_buffer_size",
            "incremental_dir",
            "incremental_channel_capacity",
        ),
    )
    servers.choice("enable_incremental_update", {False: None}, False)
    return servers.integer("capacity", 1_000_000_000, maximum=_LARGEST_CAPACITY)


def _section(fields: Fields, key: str, known: tuple[str, ...]) -> Fields:
    """Return an object that may be missing."""
    if key in fields:
        return fields.object(key, known)
    return Fields({}, fields.source, key, known)


def _read(path: str | Path, known: tuple[str, ...]) -> Fields:
    source = str(path)
    try:
        document = yaml.safe_load(read_regular(path, _MOST_BYTES).decode("utf-8"))
        text = json.dumps({} if document is None else document)
    except OSError as err:
        raise ConfigError(source, "", f"cannot be read: {(err.strerror or str(err)).lower()}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(source, "", f"not UTF-8: byte {err.start} is 0x{err.object[err.start]:02x}") from err
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        place = f"line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(source, place, getattr(err, "problem", None) or str(err)) from err
    except (TypeError, ValueError) as err:  # YAML has dates, for example
        raise ConfigError(source, "", f"expected values that JSON has too: {err}") from err
    return Fields(parse_json(text, source), source, "", known)
