"""The graphs that come with the package; docs/models.md describes them.

Apart from ``document``, which reads them, so that ``hotrow-train --help`` lists them where there is no PyTorch.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable


def built_in_graphs() -> dict[str, Traversable]:
    """Return the graph files by their models' names, in the names' order."""
    entries = (files("training") / "graphs").iterdir()
    graphs = {entry.name.removesuffix(".json"): entry for entry in entries if entry.name.endswith(".json")}
    return dict(sorted(graphs.items()))
