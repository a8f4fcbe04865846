"""Check that samples fit a graph."""

import numpy as np

from serving.errors import ConfigError
from serving.model.graph import Graph
from training.samples import Samples


def check_samples_fit(graph: Graph, samples: Samples, first_sample: int = 0) -> None:
    """Raise ConfigError unless the graph can read these samples. ``first_sample`` is the number of the first one."""
    slots = sum(entry.slots for entry in graph.sparse)
    for what, path, asked, found in (
        ("labels", "layers[0].label.label_dim", graph.label_dim, samples.labels.shape[1]),
        ("dense features", "layers[0].dense.dense_dim", graph.dense_dim, samples.dense.shape[1]),
        ("slots", "layers[0].sparse", slots, samples.bags.slots),
    ):
        if asked != found:
            raise ConfigError(graph.source, path, f"the graph reads {asked} {what}, but the data has {found}")
    for index, (entry, bags) in enumerate(zip(graph.sparse, _by_input(graph, samples), strict=True)):
        counts = bags.sum(axis=1)
        if counts.size and counts.max() > entry.max_keys_per_sample:
            sample = int(np.argmax(counts > entry.max_keys_per_sample))
            reason = f"at most {entry.max_keys_per_sample} keys are allowed"
            reason += f", but sample {first_sample + sample} has {counts[sample]}"
            raise ConfigError(graph.source, f"layers[0].sparse[{index}]", reason)
        if entry.sequences is not None and (found := entry.sequences.too_long(bags)):
            most = entry.sequences.most[found.slot]
            reason = (
                f"at most {most} keys are allowed, but slot {found.slot} of sample {first_sample + found.sample} has"
            )
            raise ConfigError(graph.source, f"layers[0].sparse[{index}].sequence", f"{reason} {found.keys}")


def check_every_table_learns(graph: Graph, samples: Samples) -> None:
    """Check that each table will have a row, because a table without rows cannot be written."""
    for index, (entry, sizes) in enumerate(zip(graph.sparse, _by_input(graph, samples), strict=True)):
        if not sizes.any():
            reason = f"no training sample has a key of {entry.top!r}, so its table would stay empty"
            raise ConfigError(graph.source, f"layers[0].sparse[{index}]", reason)


def _by_input(graph: Graph, samples: Samples) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return for each sparse input int64[B, its slots], the number of keys of each bag."""
    sizes, ends = samples.bags.sizes, np.cumsum([entry.slots for entry in graph.sparse])
    return [sizes[:, end - entry.slots : end] for entry, end in zip(graph.sparse, ends, strict=True)]
