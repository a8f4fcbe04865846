"""The state of the plugin, with its embeddings. ``init`` makes the state, and ``reset`` drops the state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from os import PathLike
from typing import Any, Literal, get_args

from serving.model.sparse_rows import KeyType, RowLayout
from training.arguments import items, one_of, path, shown, whole
from training.calls.plugin.creating import OptimizerType, first_rows, optimizer_of
from training.calls.plugin.embedding import Embedding, Limits, ValueType
from training.calls.plugin.inputs import read_coo, read_csr
from training.errors import SessionError
from training.samples import Bags
from training.tables.config import EmbeddingBagConfig
from training.tables.rules import UpdateType
from training.tables.table import EmbeddingTable

_KEY_TYPES: dict[str, KeyType] = {"int64": "I64", "uint32": "I32"}


@dataclass
class Plugin:
    """The arguments of ``init``, and the embeddings by name."""

    replicas: int
    seed: int
    key_type: KeyType
    value_type: ValueType
    batch_size: int
    batch_size_eval: int
    embeddings: dict[str, Embedding] = field(default_factory=dict)

    def samples(self, is_training: bool) -> int:
        """Return the number of samples of one replica."""
        return (self.batch_size if is_training else self.batch_size_eval) // self.replicas


_plugin: Plugin | None = None


def init(
    visible_gpus: Sequence[int],
    seed: int,
    key_type: Literal["int64", "uint32"],
    value_type: ValueType,
    batch_size: int,
    batch_size_eval: int,
) -> None:
    """Begin. Each front end documents the arguments."""
    global _plugin
    if _plugin is not None:
        raise SessionError("init was called before; call reset first, which drops all embeddings")
    gpus = [whole("init", "visible_gpus", gpu, 0) for gpu in items("init", "visible_gpus", visible_gpus)]
    if not gpus or len(set(gpus)) < len(gpus):
        raise ValueError(f"init: expected visible_gpus as different numbers, at least one, got {gpus}")
    one_of("init", "key_type", key_type, _KEY_TYPES)
    one_of("init", "value_type", value_type, get_args(ValueType))
    for name, size in (("batch_size", batch_size), ("batch_size_eval", batch_size_eval)):
        if whole("init", name, size, 1) % len(gpus):
            raise ValueError(f"init: expected {name} as a multiple of {len(gpus)}, the number of GPUs, got {size}")
    seed = whole("init", "seed", seed, 0)
    _plugin = Plugin(len(gpus), seed, _KEY_TYPES[key_type], value_type, int(batch_size), int(batch_size_eval))


def reset() -> None:
    """Drop all embeddings, so that ``init`` may be called again. Before ``init`` it does nothing."""
    global _plugin
    _plugin = None


def create_embedding(
    init_value: Any,
    name_: str = "hugectr_embedding",
    embedding_type: RowLayout = "localized",
    optimizer_type: OptimizerType = "Adam",
    max_vocabulary_size_per_gpu: int = 1,
    slot_size_array: Sequence[int] = (),
    opt_hparams: Sequence[float] = (0.001,),
    update_type: UpdateType = "Local",
    atomic_update: bool = True,
    scaler: float = 1.0,
    slot_num: int = 1,
    max_nnz: int = 1,
    max_feature_num: int = 1000,
    embedding_vec_size: int = 1,
    combiner: Literal["sum", "mean"] = "sum",
) -> str:
    """Make an embedding.

    Args:
        init_value: float32[V, D], the rows of the keys 0 to V - 1. A bool: no rows. A key without a row gets one when
            training first sees it, with weights that depend on the key and the seed.
        name_: its name. If there is such an embedding, the name gets a number: ``hugectr_embedding_1``.
        embedding_type: "localized" or "distributed". The vectors are the same. A localized embedding saves the slot of
            each key. A key of ``init_value`` is in slot ``key % slot_num``.
        optimizer_type: "Adam", "MomentumSGD", "Nesterov", "SGD" or "RowWiseAdaGrad".
        max_vocabulary_size_per_gpu: the most distinct keys of each GPU. Only their sum over all GPUs matters.
        slot_size_array: the most distinct keys of each slot, in place of ``max_vocabulary_size_per_gpu``. Only their
            sum matters.
        opt_hparams: [learning rate, beta1, beta2, epsilon] for Adam, [learning rate, momentum factor] for MomentumSGD
            and Nesterov, [learning rate] for SGD, [learning rate, initial accumulator, epsilon] for RowWiseAdaGrad.
        update_type: what happens to rows without a gradient: "Local", "Global" or "LazyGlobal".
        atomic_update: no effect. Gradients of a row are added before it moves.
        scaler: 1, 128, 256, 512 or 1024. Gradients are divided by it, because the loss was multiplied by it.
        slot_num: S.
        max_nnz: the most keys of a slot of a sample.
        max_feature_num: the most keys of a sample.
        embedding_vec_size: D.
        combiner: how the rows of a slot become one vector.

    Returns:
        the embedding's name.

    Raises:
        SessionError: ``init`` was not called.
        TypeError: an argument is of another type.
        ValueError: an argument is out of range or of another shape.
    """
    place, plugin = "create_embedding", _started("create_embedding")
    if not isinstance(name_, str):
        raise TypeError(f"{place}: expected name_ as a str, got {shown(name_)}")
    one_of(place, "embedding_type", embedding_type, get_args(RowLayout))
    one_of(place, "combiner", combiner, ("sum", "mean"))
    slots = whole(place, "slot_num", slot_num, 1)
    sizes = [whole(place, "slot_size_array", size, 1) for size in items(place, "slot_size_array", slot_size_array)]
    if sizes and len(sizes) != slots:
        raise ValueError(f"{place}: expected slot_size_array with {slots} numbers, one per slot, got {len(sizes)}")
    of_gpu = whole(place, "max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu, 1)
    limits = Limits(
        plugin.key_type,
        sum(sizes) if sizes else of_gpu * plugin.replicas,
        whole(place, "max_nnz", max_nnz, 1),
        whole(place, "max_feature_num", max_feature_num, 1),
    )
    optimizer = optimizer_of(place, optimizer_type, opt_hparams, update_type, scaler)
    name = next(one for one in chain([name_], (f"{name_}_{n}" for n in count(1))) if one not in plugin.embeddings)
    table = EmbeddingTable(
        name,
        EmbeddingBagConfig(whole(place, "embedding_vec_size", embedding_vec_size, 1), combiner, keeps_slots=True),
        seed=plugin.seed + len(plugin.embeddings),
    )
    table.use_states(optimizer.rule.name, optimizer.rule.initial_states)
    if not isinstance(init_value, bool):
        table.load(first_rows(place, init_value, table, slots, limits.vocabulary))
    plugin.embeddings[name] = Embedding(
        table, slots, embedding_type, optimizer, limits, plugin.replicas, plugin.value_type
    )
    return name


def save(embedding_name: str, save_name: str | PathLike[str]) -> None:
    """Write the rows in HugeCTR's directory format, without the states of the optimizer.

    Args:
        embedding_name: the embedding.
        save_name: the folder. It is complete or absent, and replaces an existing folder as a whole.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: ``save_name`` is not a path.
        ValueError: ``save_name`` does not name a folder: "", "." or "/".
        ModelFileError: the embedding has no rows, or the disk refuses.
    """
    place, _, embedding = found("save", embedding_name)
    folder = path(place, "save_name", save_name)
    if not folder.name:
        raise ValueError(f"{place}: expected save_name with the name of a folder, got {str(save_name)!r}")
    embedding.save(folder)


def restore(embedding_name: str, file_name: str | PathLike[str]) -> None:
    """Replace all rows by those of a file. The optimizer begins again, as in a new embedding.

    Args:
        embedding_name: the embedding.
        file_name: what ``save`` wrote, or a sparse model of HugeCTR in either format.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: ``file_name`` is not a path.
        ModelFileError: a file is missing or damaged, or has rows that the embedding cannot have. Nothing has changed.
    """
    place, _, embedding = found("restore", embedding_name)
    embedding.restore(path(place, "file_name", file_name))


def _started(call: str) -> Plugin:
    if _plugin is None:
        raise SessionError(f"{call}: call init first")
    return _plugin


def found(call: str, embedding_name: str) -> tuple[str, Plugin, Embedding]:
    """Return the place for messages, the state, and an embedding."""
    plugin = _started(call)
    if embedding_name not in plugin.embeddings:
        names = ", ".join(map(repr, plugin.embeddings)) or "none"
        raise KeyError(f"{call}: there is no embedding {embedding_name!r}; there are {names}")
    return f"{call}: embedding {embedding_name!r}", plugin, plugin.embeddings[embedding_name]


def divided(
    call: str, embedding_name: str, row_indices: Any, values: Any, of_gpus: Any, is_training: bool
) -> tuple[Embedding, list[Bags]]:
    """Return an embedding, and each replica's part of a batch. See ``broadcast_then_convert_to_csr``."""
    place, plugin, embedding = found(call, embedding_name)
    count = len(items(place, "T", of_gpus))
    if count != plugin.replicas:
        raise ValueError(f"{place}: expected T with {plugin.replicas} items, one per GPU, got {count}")
    samples = plugin.samples(is_training)
    bags = read_coo(place, row_indices, values, samples * plugin.replicas, embedding.slots)
    embedding.check(bags)
    return embedding, [bags[replica * samples : (replica + 1) * samples] for replica in range(plugin.replicas)]


def compressed(
    call: str, embedding_name: str, row_offset: Any, values: Any, nnz: Any, is_training: bool
) -> tuple[Embedding, Bags]:
    """Return an embedding, and one replica's part of a batch. See ``fprop_experimental``."""
    place, plugin, embedding = found(call, embedding_name)
    bags = read_csr(place, row_offset, values, nnz, plugin.samples(is_training), embedding.slots)
    embedding.check(bags)
    return embedding, bags


def replica_number(place: str, plugin: Plugin, replica_id: Any) -> int:
    """Return the number of a replica, from an int or a tensor of one element."""
    replica = whole(place, "replica_id", replica_id, 0)
    one_of(place, "replica_id", replica, range(plugin.replicas))
    return replica


def item_of_replica(place: str, plugin: Plugin, to_each_replica: Any, replica: int) -> Any:
    """Return the item of a replica, from a list of all items or the item alone."""
    if not isinstance(to_each_replica, list | tuple):
        return to_each_replica
    if len(to_each_replica) != plugin.replicas:
        came = len(to_each_replica)
        raise ValueError(f"{place}: expected to_each_replica with {plugin.replicas} items, got {came}")
    return to_each_replica[replica]
