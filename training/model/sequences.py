"""DIN and BST on raw features: finds histories and their targets, and sizes the networks.

A history is a list feature that shares the keys of another feature, its target, as the items that a user has seen share
the keys of the candidate. The other features with keys describe the user.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

from serving.errors import ConfigError
from serving.features import FeatureDefinition

NETWORKS = ("bst", "din")
_USER, _MASK = "sparse_embedding_user", "items_mask"

Layers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The features of a network that reads sequences.

    Attributes:
        pairs: the names of each history and its target.
        others: the names of the other features with keys.
        positions: the most values of a history.
    """

    pairs: tuple[tuple[str, str], ...]
    others: tuple[str, ...]
    positions: int

    @property
    def tables(self) -> list[str]:
        """The table of each pair."""
        return [f"sparse_embedding_item{number}" for number in range(1, len(self.pairs) + 1)]

    def places(self, network: str) -> dict[str, tuple[str, str]]:
        """Return the slot and the table of each feature. BST's target is the first slot, and DIN's the second."""
        many = len(self.others) > 1
        found = {name: (f"{_USER}[{at}]" if many else _USER, _USER) for at, name in enumerate(self.others)}
        target, history = (0, 1) if network == "bst" else (1, 0)
        for (of_history, of_target), table in zip(self.pairs, self.tables, strict=True):
            found |= {of_history: (f"{table}[{history}]", table), of_target: (f"{table}[{target}]", table)}
        return found


def sequences_of(definition: FeatureDefinition, network: str, source: str) -> Sequences:
    """Find the histories and their targets.

    Raises:
        ConfigError: there is none, or the network cannot read it.
    """
    by_name = {feature.name: feature for feature in definition.features}
    pairs, most = list[tuple[str, str]](), 0
    for number, feature in enumerate(definition.features):
        if feature.list is None or feature.shares is None or feature.kind == "dense":
            continue
        where = f"features[{number}]"
        if feature.list.most is None:
            reason = f"required, because {network} reads a history position by position"
            raise ConfigError(source, f"{where}.list.most", reason)
        if by_name[feature.shares].is_list or any(target == feature.shares for _, target in pairs):
            reason = f"{network} reads one history of a feature that has one value, its target"
            raise ConfigError(source, f"{where}.shares", reason)
        pairs.append((feature.name, feature.shares))
        most = max(most, feature.list.most)
    if not pairs:
        example = '{"name": "seen", ..., "shares": "item", "list": {"most": 10, "keep": "last"}}'
        reason = f"{network} needs a history: a list feature that shares the keys of its target, such as {example}"
        raise ConfigError(source, "features", reason)
    used = {name for pair in pairs for name in pair}
    others = tuple(feature.name for feature in definition.slots if feature.name not in used)
    return Sequences(tuple(pairs), others, most)


def fitted_sequences(layers: Layers, network: str, found: Sequences, most_keys: int, dense: int, dim: int) -> Layers:
    """Return the layers of DIN or BST in the sizes of the features.

    Args:
        layers: of the network's file; they are changed.
        network: its name.
        found: its features.
        most_keys: of the features of the user in a sample.
        dense: F.
        dim: D.
    """
    width, length, user = len(found.pairs) * dim, found.positions + 1, len(found.others)
    data, rest = layers[0], [layer for layer in layers[1:] if "sparse_embedding_hparam" not in layer]
    data["dense"]["dense_dim"] = dense
    data["sparse"], embeddings = [], []
    tables: list[tuple[str, int, int, dict[str, Any]]] = [(_USER, user, most_keys, {})] if user else []
    most_of_slots = [0, found.positions] if network == "bst" else [found.positions, 0]
    for table in found.tables:
        tables.append((table, 2, length, {"sequence": {"most": most_of_slots}}))
    if network == "bst":
        tables[-1][-1]["sequence"]["mask"] = _MASK
    for table, slots, most, sequence in tables:
        top = table.removeprefix("sparse_embedding_")
        entry = {"type": "DistributedSlot", "max_feature_num_per_sample": most, "slot_num": slots}
        data["sparse"].append({"top": top, **entry, **sequence})
        hparam = {"embedding_vec_size": dim, "combiner": 0}
        kind = "DistributedSlotSparseEmbeddingHash"
        embeddings.append({"name": table, "type": kind, "bottom": top, "top": table, "sparse_embedding_hparam": hparam})
    by_name = {layer["name"]: layer for layer in rest}
    by_name["items"]["bottom"] = found.tables
    (_size_din if network == "din" else _size_bst)(by_name, width, length)
    head = by_name["concat1"]
    by_name["reshape_user"]["leading_dim"] = user * dim
    if not user:
        del by_name["reshape_user"]
        head["bottom"].remove("reshape_user")
    if dense:
        head["bottom"].append(data["dense"]["top"])
    if len(head["bottom"]) == 1:
        only = by_name.pop("concat1")["bottom"][0]
        next(layer for layer in rest if layer.get("bottom") == "concat1")["bottom"] = only
    return [data, *embeddings, *by_name.values()]


def _size_din(by_name: dict[str, Any], width: int, length: int) -> None:
    for name in ("slice_history", "slice_target", "slice_repeated"):
        by_name[name]["ranges"] = [[0, width]] * len(by_name[name]["ranges"])
    by_name["target_repeated"]["scale_param"]["factor"] = length - 1
    by_name["attention"]["leading_dim"] = length - 1
    by_name["history_rows"] |= {"leading_dim": width, "time_step": length - 1}
    by_name["interest"]["leading_dim"] = width


def _size_bst(by_name: dict[str, Any], width: int, length: int) -> None:
    by_name["mask"] = {"name": "mask", "type": "Reshape", "bottom": _MASK, "top": "mask", "shape": [-1, 1, 1, length]}
    by_name["slice_mask"]["ranges"] = [[0, length]] * 2
    by_name["mask_row"]["leading_dim"] = length
    by_name["mask_columns"]["scale_param"]["factor"] = width
    by_name["heads"]["num_attention_heads"] = gcd(4, width)
    by_name["sequence"] |= {"leading_dim": width, "time_step": length}
    for name in ("slice_sequence", "slice_norm1"):
        by_name[name]["ranges"] = [[0, width]] * len(by_name[name]["ranges"])
    for name in ("queries", "keys", "values", "attention", "feed_forward2"):
        by_name[name]["fc_param"]["num_output"] = width
    by_name["feed_forward1"]["fc_param"]["num_output"] = 2 * width
    by_name["outputs"]["leading_dim"] = width * length
