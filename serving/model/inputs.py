"""The first layers of a graph: Data, which names the inputs, and the embeddings, which own the tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from serving.model.names import ANSWER, NAMES_OF_ANSWERS, TABLE_NAME, is_taken
from serving.model.records import Combiner, Embedding, Output, OutputKind, SparseInput
from serving.model.sequences import Padding, SequenceSlots
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY, RowLayout
from serving.model.strict_json import Fields

# Keys of HugeCTR v2.0 to v24.06 for reading training data and sizing memory. A prediction does not depend on them.
_DATA_IGNORED = (
    "source", "eval_source", "check", "format", "num_samples", "eval_num_samples", "slot_size_array",
    "slot_size", "float_label_dense", "cache_eval_data", "num_workers", "async_param",
    "num_iterations_statistics",
)  # fmt: skip
_EMBEDDING_IGNORED = (
    "max_vocabulary_size_per_gpu", "max_vocabulary_size_global", "workspace_size_per_gpu_in_mb", "slot_size_array",
    "plan_file", "vocabulary_size", "max_vocabulary_size", "load_factor",
    # keys of HybridSparseEmbedding, as HugeCTR exports them
    "max_num_frequent_categories", "max_num_infrequent_samples", "p_dup_max", "max_all_reduce_bandwidth",
    "max_all_to_all_bandwidth", "efficiency_bandwidth_ratio", "communication_type", "hybrid_embedding_type",
    "num_iterations_statistics",
)  # fmt: skip
_EMBEDDING_TRAINING = ("optimizer", "hybrid_embedding_param", "plan_file", "slot_size")
_SPARSE_TYPES = {"DistributedSlot": "DistributedSlot", "LocalizedSlot": "LocalizedSlot"}
_SPARSE_KEYS = (
    "top", "slot_num", "type", "max_feature_num_per_sample", "max_nnz", "nnz_per_slot", "is_fixed_length", "names",
)  # fmt: skip
_LONGEST_SEQUENCE = 65_536
_SWITCH: Mapping[bool, bool] = {True: True, False: False}
_PADDINGS: Mapping[str, Padding] = {"end": "end", "start": "start"}
_LARGEST_DIM = 65_536  # the most floats in a row of a host table
_COMBINERS: Mapping[int | str, Combiner] = {0: "sum", 1: "mean", "sum": "sum", "mean": "mean", "sqrtn": "sqrtn"}

_OUTPUT_KINDS: Mapping[str, OutputKind] = {kind: kind for kind in get_args(OutputKind)}

EMBEDDING_TYPES: Mapping[str, RowLayout] = {
    "DistributedSlotSparseEmbeddingHash": "distributed",
    "LocalizedSlotSparseEmbeddingHash": "localized",
    "LocalizedSlotSparseEmbeddingOneHot": "localized",
    "HybridSparseEmbedding": "distributed",  # HugeCTR writes no file for it: its dump_parameters is empty up to v24.06
}


@dataclass(frozen=True, slots=True)
class Label:
    """One label: its top, which is None if an inference graph omits it, and its columns."""

    top: str | None
    dim: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its columns; empty without a top."""
        if self.top is None:
            return ()
        return (self.top,) if self.dim == 1 else tuple(f"{self.top}[{column}]" for column in range(self.dim))


@dataclass(frozen=True, slots=True)
class Data:
    """The content of the Data layer."""

    labels: tuple[Label, ...]
    dense_top: str
    dense_dim: int
    sparse: tuple[SparseInput, ...]
    label_names: tuple[str, ...]
    dense_names: tuple[str, ...]
    outputs: tuple[Output, ...] = ()


def read_data(fields: Fields) -> Data:
    """Read the Data layer; without a label it has one column. Raise ConfigError if a key is missing or wrong."""
    fields.allow(("name", "type", "label", "outputs", "dense", "sparse", *_DATA_IGNORED))
    # aligned is for mixed precision training; names is Hotrow's own
    dense = fields.object("dense", ("top", "dense_dim", "aligned", "names"))
    labels: tuple[Label, ...] = (Label(None, 1),)
    label_names: tuple[str, ...] = ()
    if "label" in fields:
        of_labels = fields.object("label", ("top", "label_dim", "names"))
        labels = _read_labels(of_labels)
        label_names = _read_names(of_labels, sum(label.dim for label in labels))
    data = Data(
        labels=labels,
        dense_top=dense.text("top"),
        dense_dim=dense.integer("dense_dim", minimum=0),
        sparse=tuple(_read_sparse(entry) for entry in fields.objects("sparse")),
        label_names=label_names or sum((label.names for label in labels), ()),
        dense_names=_read_names(dense, dense.integer("dense_dim", minimum=0)),
        outputs=_read_outputs(fields),
    )
    _check_names(fields, data)
    return data


def _read_names(fields: Fields, count: int) -> tuple[str, ...]:
    """Read the names of positions, which are Hotrow's own. Requests may have the positions by name."""
    if "names" not in fields or (count == 0 and fields.value("names") == []):
        return ()
    names = fields.texts("names")
    if len(names) != count:
        raise fields.error(f"expected one name per position, {count} in all, got {len(names)}", "names")
    return names


def _read_outputs(fields: Fields) -> tuple[Output, ...]:
    """Read the outputs, which are Hotrow's own: what clients call the columns of the answer."""
    outputs: list[Output] = []
    for entry in fields.objects("outputs") if "outputs" in fields else ():
        entry.allow(("name", "kind", "width"))
        kind, width = entry.choice("kind", _OUTPUT_KINDS), entry.integer("width", 1)
        outputs.append(Output(entry.text("name"), kind, width, sum(output.width for output in outputs)))
        if fault := output_fault([output.name for output in outputs]):
            raise entry.error(fault, "name")
    return tuple(outputs)


def output_fault(names: Sequence[str]) -> str:
    """Return what is wrong with the last of the names of outputs; an empty text if nothing is."""
    *earlier, name = names
    if name in earlier:
        return f"two outputs are called {name!r}"
    if ANSWER in earlier or (name == ANSWER and earlier):
        return f"{ANSWER} has all columns, so there are no other outputs"
    if name in NAMES_OF_ANSWERS - {ANSWER}:
        return f"the name {name!r} is reserved in answers"
    return ""


def _check_names(fields: Fields, data: Data) -> None:
    """Refuse names that requests cannot have. Labels are not in requests."""
    of_slots = [name for entry in data.sparse for name in entry.names]
    without = [entry.top for entry in data.sparse if not entry.names]
    if not data.dense_names and data.dense_dim:
        without.append(data.dense_top)
    if without and (of_slots or data.dense_names):
        reason = f"expected names for every input or for none, but {without[0]!r} has none"
        raise fields.error(reason)
    for key, names in (("sparse", of_slots), ("dense", data.dense_names)):
        for name in names:
            if is_taken(name):
                raise fields.error(f"the name {name!r} is reserved in requests", key)
    for name, count in Counter([*data.dense_names, *set(of_slots)]).items():
        if count > 1:
            raise fields.error(f"{name!r} is the name of a dense feature and of another input", "dense.names")


def _read_labels(fields: Fields) -> tuple[Label, ...]:
    """Read one label, or several as v3.3 and later write them: a list of tops and a list of dimensions."""
    several = isinstance(fields.value("label_dim"), list)
    dims = fields.integers("label_dim") if several else (fields.integer("label_dim"),)
    if "top" not in fields:
        return tuple(Label(None, dim) for dim in dims)
    tops = fields.texts("top")
    if len(tops) != len(dims):
        raise fields.error(f"expected {len(tops)} dimensions, one per top, got {len(dims)}", "label_dim")
    return tuple(Label(top, dim) for top, dim in zip(tops, dims, strict=True))


def _read_sparse(fields: Fields) -> SparseInput:
    """Read one sparse input. v3.0 counts keys per sample, v3.1 and later per slot."""
    fields.allow(
        (*_SPARSE_KEYS, "sequence", "one_key", "padding_keys")  # these three and names are Hotrow's own
    )
    top, slots = fields.text("top"), fields.integer("slot_num")
    one_key = "one_key" in fields and fields.choice("one_key", _SWITCH)
    own = _read_names(fields, slots), _read_sequences(fields, slots), one_key, _read_paddings(fields, slots)
    if "type" in fields:
        fields.choice("type", _SPARSE_TYPES)
    if "is_fixed_length" in fields:
        fields.choice("is_fixed_length", _SWITCH)
    if "max_nnz" in fields:
        fields.integer("max_nnz")
    if ("nnz_per_slot" in fields) == ("max_feature_num_per_sample" in fields):
        raise fields.error("expected either max_feature_num_per_sample or nnz_per_slot")
    if "nnz_per_slot" not in fields:
        return SparseInput(top, slots, fields.integer("max_feature_num_per_sample"), *own)
    per_slot = fields.value("nnz_per_slot")
    if not isinstance(per_slot, list):
        return SparseInput(top, slots, fields.integer("nnz_per_slot") * slots, *own)
    if len(per_slot) != slots:
        raise fields.error(f"expected {slots} numbers, one per slot, got {len(per_slot)}", "nnz_per_slot")
    keys = sum(fields.check_integer(nnz, f"nnz_per_slot[{slot}]", 1) for slot, nnz in enumerate(per_slot))
    return SparseInput(top, slots, keys, *own)


def _read_sequences(fields: Fields, slots: int) -> SequenceSlots | None:
    """Read which slots are sequences: ``{"most": 50}``, or a number per slot with 0 for pooled slots."""
    if "sequence" not in fields:
        return None
    own = fields.object("sequence", ("most", "mask", "padding"))
    if isinstance(own.value("most"), list):
        most = own.integers("most", minimum=0, maximum=_LONGEST_SEQUENCE)
        if len(most) != slots or not any(most):
            raise own.error(f"expected {slots} numbers, one per slot and some of them not 0, got {list(most)}", "most")
    else:
        most = (own.integer("most", maximum=_LONGEST_SEQUENCE),) * slots
    mask = own.text("mask") if "mask" in own else ""
    padding: Padding = own.choice("padding", _PADDINGS) if "padding" in own else "end"
    return SequenceSlots(most, mask, padding)


def _read_paddings(fields: Fields, slots: int) -> tuple[int | None, ...]:
    """Read the key of each slot that stands for no key, or null."""
    if "padding_keys" not in fields:
        return ()
    keys = fields.items("padding_keys")
    if len(keys) != slots:
        raise fields.error(f"expected {slots} keys or null, one per slot, got {len(keys)}", "padding_keys")
    return tuple(
        None if key is None else fields.check_integer(key, f"padding_keys[{slot}]", SMALLEST_KEY, LARGEST_KEY)
        for slot, key in enumerate(keys)
    )


def read_embedding(fields: Fields, sparse: Mapping[str, SparseInput]) -> Embedding:
    """Read one embedding layer, which reads one of ``sparse``. Raise ConfigError if a key is wrong."""
    known = ("name", "type", "bottom", "top", "sparse_embedding_hparam", *_EMBEDDING_TRAINING)
    for key in fields.others(known):
        if key.startswith("plan_file"):  # HugeCTR's samples keep a second plan under such a name
            raise fields.error("HugeCTR reads only plan_file; remove this key, or call it plan_file", key)
    fields.allow(known)
    bottom, top = fields.text("bottom"), fields.text("top")
    if bottom not in sparse:
        raise fields.error(f"expected a sparse input ({', '.join(sparse)}), got {bottom!r}", "bottom")
    table = fields.text("name", top)
    if not TABLE_NAME.fullmatch(table):
        raise fields.error(f"a table's name has letters, digits, '_', '-' and '.' only, got {table!r}", "name")
    hparam = fields.object(
        "sparse_embedding_hparam", ("embedding_vec_size", "combiner", "default_emb_vec_value", *_EMBEDDING_IGNORED)
    )
    return Embedding(
        table=table,
        bottom=bottom,
        top=top,
        slots=sparse[bottom].positions,
        dim=hparam.integer("embedding_vec_size", maximum=_LARGEST_DIM),
        combiner=hparam.choice("combiner", _COMBINERS),
        row_layout=EMBEDDING_TYPES[fields.text("type")],
        default_value=hparam.number("default_emb_vec_value", 0.0),
    )
