"""The graphs that come with the package, described in docs/models.md.

``hotrow train --help`` lists them without PyTorch, so they are not in ``document``, which imports it.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable


def built_in_graphs() -> dict[str, Traversable]:
    """Return the graph files by model name, in sorted order."""
    entries = (files("training") / "graphs").iterdir()
    graphs = {entry.name.removesuffix(".json"): entry for entry in entries if entry.name.endswith(".json")}
    return dict(sorted(graphs.items()))
