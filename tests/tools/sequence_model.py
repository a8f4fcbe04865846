"""A small model with sequences in a real version directory, with its answers computed in NumPy."""

from dataclasses import dataclass, field

import numpy as np

from tests.tools.tiny_model import TinyModel


@dataclass(frozen=True)
class SequenceModel(TinyModel):
    """Logistic regression over dense features, the rows of each position, and the masks of sequences.

    Attributes:
        most: by table, the most keys of each slot, 0 for a pooled slot; tables that are not here are pooled.
        padding: where positions without a key are.
        masked: the network reads the masks.
        names: of the slots; empty: they have none.
    """

    tables: dict[str, int] = field(default_factory=lambda: {"user": 1, "goods": 2})
    dense_dim: int = 2
    dim: int = 3
    rows: int = 50
    most: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"goods": (0, 4)})
    padding: str = "end"
    masked: bool = True
    names: tuple[str, ...] = ("user", "item", "seen")

    def widths(self, table):
        """The positions of each slot."""
        return [max(most, 1) for most in self.most.get(table, (0,) * self.tables[table])]

    def graph(self):
        """See ``TinyModel.graph``."""
        document = super().graph()
        data, *layers = document["layers"]
        by_name = {layer["name"]: layer for layer in layers}
        names = iter(self.names)
        for entry, table in zip(data["sparse"], self.tables, strict=True):
            if self.names:
                entry["names"] = [next(names) for _ in range(self.tables[table])]
            by_name[f"{table}_flat"]["leading_dim"] = sum(self.widths(table)) * self.dim
            if table in self.most:
                entry["max_feature_num_per_sample"] += sum(self.most[table])
                entry["sequence"] = {"most": list(self.most[table]), "padding": self.padding}
                if self.masked:
                    entry["sequence"]["mask"] = f"{table}_mask"
                    by_name["concat"]["bottom"].append(f"{table}_mask")
        if self.names:
            data["dense"]["names"] = [f"n{number}" for number in range(self.dense_dim)]
        return document

    def weights(self):
        """See ``TinyModel.weights``."""
        rng = np.random.default_rng([self.seed, 99])
        inputs = self.dense_dim + sum(sum(self.widths(table)) for table in self.tables) * self.dim
        inputs += sum(sum(self.widths(table)) for table in self.most) * self.masked
        return rng.normal(size=(inputs, 1)).astype(np.float32), rng.normal(size=1).astype(np.float32)

    def probabilities(self, dense, bags):
        """The oracle: float64[B, 1]; see ``TinyModel.probabilities``."""
        weight, bias = self.weights()
        logits = []
        for features, slots in zip(dense, bags, strict=True):
            rest, parts, masks = iter(slots), [np.asarray(features)], []
            for table in self.tables:
                vectors = self.vectors(table).astype(np.float64)
                for most in self.most.get(table, (0,) * self.tables[table]):
                    bag = next(rest)
                    rows = [vectors[key] if key < self.rows else np.zeros(self.dim) for key in bag]
                    if not most:
                        parts.append(sum(rows, np.zeros(self.dim)))
                        masks += [float(bool(bag))] if table in self.most else []
                        continue
                    empty = [np.zeros(self.dim)] * (most - len(rows))
                    parts += rows + empty if self.padding == "end" else empty + rows
                    is_key, is_empty = [1.0] * len(rows), [0.0] * len(empty)
                    masks += is_key + is_empty if self.padding == "end" else is_empty + is_key
            numbers = np.concatenate([*parts, masks * self.masked])
            logits.append(numbers @ weight.astype(np.float64) + bias)
        return 1 / (1 + np.exp(-np.array(logits).reshape(-1, 1)))

    def sample_requests(self, samples, seed=0, most_keys=3):
        """Random dense features and bags; some sequences are empty, and some are full."""
        dense, bags = super().sample_requests(samples, seed, most_keys)
        rng = np.random.default_rng([seed, 1])
        longest = [most for table in self.tables for most in self.most.get(table, (0,) * self.tables[table])]
        for slots in bags:
            for slot, most in enumerate(longest):
                if most:
                    count = rng.choice([0, most, rng.integers(0, most + 1)])
                    slots[slot] = rng.integers(0, self.rows, count).tolist()
        return dense, bags
