"""The records of models and of a whole ``ps.json``."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kernels.host import RowDtype
from serving.config.clause import Location, Record
from serving.config.gpu import GpuCacheConfig, GpuNetworkConfig
from serving.config.tiers import DisabledConfig, PersistentDbConfig, VolatileDbConfig
from serving.config.update_source import UpdateSourceConfig
from serving.errors import ConfigError, ModelFileError
from serving.model.capacity import HEADROOM_RATIO
from serving.model.graph import Graph, is_network_file
from serving.model.manifest import MANIFEST_NAME, Manifest, read_manifest
from serving.model.names import MODEL_NAME, NAME_EXPECTED
from serving.model.records import Combiner, Output, OutputKind, outputs_of
from serving.model.regular_file import is_absent, real_path
from serving.model.sequences import SequenceSlots
from serving.model.slot_sizes import SlotKeys, SlotRange, ranges_by_input
from serving.model.sparse_rows import KeyType, RowLayout


class StreamStart(Record):
    """What a version's manifest says of the updates of its rows.

    Attributes:
        run: the training run. Its messages apply to the version.
        positions: for each partition of the log, the position that the version's files include. A version on the tables
            of another version serves when these have reached it.
    """

    run: str
    positions: tuple[tuple[str, str], ...] = ()


class TableConfig(Record):
    """One embedding table of one model.

    Attributes:
        name: the table's name inside the model. Stores use ``ModelConfig.full_name``.
        dim: D.
        slots: S.
        combiner: how the rows of one slot are pooled.
        default_value: every float of an unknown key's vector.
        file: the sparse model, a directory (``key`` + ``emb_vector``) or a single file.
        row_layout: the layout of rows in a single file.
        max_keys_per_sample: over all slots of this table; None means no limit.
        row_dtype: the row type in RAM. The rows of every tier are rounded to it.
        slot_ranges: the keys of each slot, if they begin at 0 in the slots of a request; else empty.
        slot_names: the graph's names of the slots; empty if it has none.
        sequences: which slots are sequences; None: all are pooled.
        paddings: of each slot the key that stands for no key; None: it has none. Empty: no slot has one.
        one_key: each slot that is not a sequence has exactly one key.
    """

    name: str
    dim: int
    slots: int
    combiner: Combiner
    default_value: float = 0.0
    file: Path
    row_layout: RowLayout = "distributed"
    max_keys_per_sample: int | None = None
    row_dtype: RowDtype = "fp32"
    slot_ranges: tuple[SlotRange, ...] = ()
    slot_names: tuple[str, ...] = ()
    sequences: SequenceSlots | None = None
    paddings: tuple[int | None, ...] = ()
    one_key: bool = False

    @property
    def positions(self) -> int:
        """The rows of a sample: one of each pooled slot, and L of a sequence."""
        return self.slots if self.sequences is None else self.sequences.positions


class ModelConfig(Record):
    """One model, ready to be opened.

    Attributes:
        name: the model's name.
        version: 0 if the model has no version folder.
        digest: names the version's files, in 64 hexadecimal digits; see ``serving.model.manifest``. Empty if the model
            has no version folder.
        table_tag: names the version in the names of its tables, ``"7-1f2e3d4c"``, so that two versions can be loaded
            side by side. Empty if ``ps.json`` lists the model or it has no version folder.
        graph_file: the layer graph (for v3.0 the inference JSON itself); None if the model is only looked up.
        dense_file: the dense ``.model`` file, or a whole network as ``.onnx``; None if the model is only looked up.
        onnx_file: an ONNX export of the ``.model`` file next to it, if there is one.
        tables: one record per table, in graph order.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        slot_keys: how the keys of requests come.
        max_batchsize: maximum samples per request.
        dense_dim: F.
        label_dim: L; 0 if the model is only looked up.
        dense_names: the graph's names of the dense features; empty if it has none.
        label_names: the graph's names of the columns of answers; empty if it has none.
        label_kinds: the kinds of the columns of answers; empty if an ONNX file is the network, or there is none.
        stated_outputs: the outputs that the graph states; empty if it states none.
        gpu_cache: the settings of its embedding caches on GPUs.
        gpu_network: the settings of its dense network on GPUs.
        stream: the training run that publishes updates of the rows; None if the files come from none.
        base: the version whose tables this version shares; ``tables`` and ``table_tag`` are then those of the base.
            None: the version has tables of its own.
    """

    name: str
    version: int = 0
    digest: str = ""
    table_tag: str = ""
    graph_file: Path | None
    dense_file: Path | None
    onnx_file: Path | None = None
    tables: tuple[TableConfig, ...]
    key_type: KeyType
    slot_keys: SlotKeys = "stored"
    max_batchsize: int
    dense_dim: int
    label_dim: int
    dense_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    label_kinds: tuple[OutputKind, ...] = ()
    stated_outputs: tuple[Output, ...] = ()
    gpu_cache: GpuCacheConfig = GpuCacheConfig()
    gpu_network: GpuNetworkConfig = GpuNetworkConfig()
    stream: StreamStart | None = None
    base: "ModelConfig | None" = None

    @property
    def dense_width(self) -> int:
        """The columns of a batch's ``dense``: F, and those of the masks of sequences."""
        of_tables = (table.sequences for table in self.tables)
        return self.dense_dim + sum(found.positions for found in of_tables if found and found.mask)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What clients can ask for; see ``outputs_of``. Empty if the model is only looked up."""
        of_labels = self.label_dim, self.label_names, self.label_kinds
        return outputs_of(self.stated_outputs, *of_labels) if self.label_dim else ()

    @property
    def of_tables(self) -> "ModelConfig":
        """The version that brings the tables: the base, or this version."""
        return self.base or self

    def on_tables_of(self, base: "ModelConfig") -> "ModelConfig":
        """Return this version with the tables of ``base``."""
        return self.model_copy(update={"base": base, "tables": base.tables, "table_tag": base.table_tag})

    def full_name(self, table: TableConfig) -> str:
        """Return the name of ``table`` in stores: HPS's, or ``"<model>@<version>-<digest>.<table>"``."""
        return f"{self.name}@{self.table_tag}.{table.name}" if self.table_tag else self.hps_name(table)

    @property
    def summary(self) -> str:
        """The name, the version and the slots, for people."""
        slots = (table.name if table.slots == 1 else f"{table.name} x {table.slots}" for table in self.tables)
        return f"{self.name!r}{f' version {self.version}' if self.version else ''}, slots {', '.join(slots)}"

    @property
    def short_digest(self) -> str:
        """The first digits of ``digest``, for the names of tables and for metrics."""
        return self.digest[:8]

    def hps_name(self, table: TableConfig) -> str:
        """Return the name of ``table`` in configurations, hot keys and traces: ``"<model>.<table>"``, as in HPS."""
        return f"{self.name}.{table.name}"

    @property
    def source(self) -> str:
        """The file that error messages name."""
        return str(self.graph_file or self.tables[0].file)

    def network_files(self) -> tuple[Path, Path]:
        """Return the graph and the dense file.

        Raises:
            ConfigError: the model has no dense network.
        """
        if self.graph_file is None or self.dense_file is None:
            reason = "has no dense network; look its rows up from Python: LookupSession.lookup"
            raise ConfigError(f"model {self.name!r}", "", reason)
        return self.graph_file, self.dense_file


class ParameterServerConfig(Record):
    """A whole ps.json.

    Attributes:
        models: the models it lists. Empty if the models are the folders of a model repository.
        volatile_tiers: the faster tiers, fastest first. Empty if ``volatile_db`` is disabled.
        persistent_db: the durable tier.
        update_source: where rows come from while models are served.
        key_type: ``supportlonglong``: ``"I64"`` or ``"I32"`` for all models.
        source: the file, for messages.
        keys_without_effect: one line per reason, for the operator.
    """

    models: tuple[ModelConfig, ...]
    volatile_tiers: tuple[VolatileDbConfig, ...]
    persistent_db: PersistentDbConfig
    update_source: UpdateSourceConfig = UpdateSourceConfig()
    key_type: KeyType
    source: str
    keys_without_effect: tuple[str, ...] = ()

    @property
    def headroom_ratio(self) -> float:
        """How much room for new keys a table in RAM without a bound has, as a share of its rows."""
        return HEADROOM_RATIO if self.update_source.type == "disabled" else self.update_source.update_headroom_ratio

    def with_update_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy whose ``update_source`` has other values for some keys.

        Raises:
            ConfigError: there is no ``update_source``.
        """
        if not settings:
            return self
        if self.update_source.type == "disabled":
            reason = f"{' and '.join(settings)} would have no effect, because no updates are read"
            raise ConfigError(self.source, "update_source", reason)
        return self.model_copy(update={"update_source": self.update_source.model_copy(update=dict(settings))})

    @property
    def volatile_db(self) -> VolatileDbConfig | DisabledConfig:
        """The fastest tier before ``persistent_db``."""
        return self.volatile_tiers[0] if self.volatile_tiers else DisabledConfig()


def check_model_name(name: str, source: str, path: str = "") -> str:
    """Return ``name``, or raise ConfigError if it is not a valid model name."""
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise ConfigError(source, path, f"model name {name!r}: {NAME_EXPECTED}")
    return name


def check_key_bits(key_bits: int, key_type: KeyType, at: Location) -> None:
    """Refuse caches of 32-bit keys for a model of int64 keys."""
    if key_bits == 32 and key_type == "I64":
        raise at.error("embedding_cache_key_bits", "32, but the model's keys are int64")


def manifest_next_to(graph_file: Path) -> Manifest | None:
    """Return the manifest next to a graph; None if there is none, or another program's file has its name.

    Raises:
        ModelFileError: the manifest is not a regular file.
    """
    path = graph_file.parent / MANIFEST_NAME
    if is_absent(path):
        return None
    try:
        return read_manifest(graph_file.parent)
    except ModelFileError:
        if not path.is_file():
            raise
        return None


def refuse_shared_tables(graph_file: Path, manifest: Manifest | None) -> None:
    """Refuse the graph of a version without tables where nothing says which folder is the version that brings them.

    Raises:
        ConfigError: the manifest next to the graph names another version's tables.
    """
    if manifest is not None and manifest.tables is not None:
        reason = f"shares the tables of version {manifest.tables.version}; only a model repository can serve it"
        raise ConfigError(str(graph_file), "", reason)


def bringing_tables(models: Iterable[ModelConfig]) -> Sequence[ModelConfig]:
    """Return the versions that bring the tables of ``models``, each once."""
    return list(
        {(model.name, model.version, model.digest): model for model in (each.of_tables for each in models)}.values()
    )


def stream_of(manifest: Manifest | None) -> StreamStart | None:
    """Return what a manifest says of the updates of the version's rows."""
    if manifest is None or not manifest.run:
        return None
    return StreamStart(run=manifest.run, positions=tuple(manifest.positions.items()))


def slot_keys_of(graph: Graph, graph_file: Path, key_type: KeyType, manifest: Manifest | None) -> SlotKeys:
    """Return how a model's requests give keys, as the manifest next to its graph says.

    Without such a manifest, the clients of a graph with ``slot_size_array`` shift keys, as those of HugeCTR do.

    Raises:
        ConfigError: the manifest says that the server shifts keys, but the graph does not say by what.
    """
    keys: SlotKeys = "stored" if manifest is None else manifest.keys
    if keys == "unshifted" and (graph.slot_sizes is None or key_type != "I64"):
        expected = "a Data layer with slot_size_array, one number per slot, and int64 keys"
        raise ConfigError(str(graph_file), "layers[0]", f"{MANIFEST_NAME} says keys: unshifted, which needs {expected}")
    return "shifted" if keys == "stored" and graph.slot_sizes is not None else keys


def tables_of(
    graph: Graph, files: Sequence[Path], key: str, at: Location, slot_keys: SlotKeys = "stored"
) -> tuple[TableConfig, ...]:
    """Return one record per embedding layer. ``files`` are the sparse models that ``key`` lists, in graph order.

    Raises:
        ConfigError: the numbers of files and embedding layers differ, or there is no embedding layer.
    """
    if not graph.embeddings:
        raise ConfigError(graph.source, "layers", "expected at least one embedding layer, found none")
    if len(files) != len(graph.embeddings):
        raise at.error(key, f"expected {len(graph.embeddings)}, one per embedding layer; got {len(files)}")
    inputs = {sparse.top: sparse for sparse in graph.sparse}
    ranges = ranges_by_input(graph) if slot_keys == "unshifted" else {}
    return tuple(
        TableConfig(
            name=embedding.table,
            dim=embedding.dim,
            slots=inputs[embedding.bottom].slots,
            combiner=embedding.combiner,
            default_value=float(embedding.default_value),
            file=real_path(file),
            row_layout=embedding.row_layout,
            max_keys_per_sample=inputs[embedding.bottom].max_keys_per_sample,
            slot_ranges=ranges.get(embedding.bottom, ()),
            slot_names=inputs[embedding.bottom].names,
            sequences=inputs[embedding.bottom].sequences,
            paddings=inputs[embedding.bottom].paddings,
            one_key=inputs[embedding.bottom].one_key,
        )
        for embedding, file in zip(graph.embeddings, files, strict=True)
    )


def onnx_next_to(dense_file: Path) -> Path | None:
    """Return the ONNX export next to a ``.model`` file, or None if there is none."""
    onnx_file = dense_file.with_suffix(".onnx")
    return None if is_absent(onnx_file) or is_network_file(dense_file) else onnx_file
