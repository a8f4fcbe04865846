"""Import a PyTorch module in one call. PyTorch is imported by the call, not by this package."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import MissingExtraError
from serving.importers.outputs import Kind
from serving.importers.verifying import Comparison

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A module that became a model.

    Attributes:
        path: the version's folder.
        comparison: how the version's answers compare with the module's answers to random requests.
        dense: the module's inputs that a request joins into its dense features, in this order.
        slots: the table and the module's input of each slot of a request, in order.
        names: what requests by name call the dense features and the slots. Slots with the same name have the same keys.
    """

    path: Path
    comparison: Comparison
    dense: tuple[str, ...]
    slots: tuple[tuple[str, str], ...]
    names: tuple[str, ...]


def from_torch(
    module: "nn.Module",
    example: tuple[Any, ...] | Mapping[str, Any],
    repository: str | Path,
    name: str,
    *,
    logits: bool = False,
    tolerance: float = 1e-5,
    max_batchsize: int = 1024,
    features: str | Path | None = None,
    run: str = "",
    positions: Mapping[str, str] | None = None,
    sequences: Mapping[str, int] | None = None,
    most_keys: Mapping[str, int] | None = None,
    outputs: Mapping[str, Kind] | None = None,
) -> ImportedModule:
    """Write a PyTorch module into a model repository, and compare the version's answers with the module's.

    Every ``nn.EmbeddingBag`` and ``nn.Embedding`` that ``forward`` calls becomes a table, including those in TorchRec's
    ``EmbeddingBagCollection``. So does every table of Hotrow's ``EmbeddingBagCollection``. The rest of ``forward``
    becomes the dense network. The module is run in eval mode, and is left as it was.

    Inputs of ``forward`` may be nested in tuples, lists and dictionaries. B is the number of samples:

    - float32[B, ...]: dense features. Several inputs are joined into one, in order.
    - int64 or int32 [B, ...]: keys, a fixed number per sample.
    - int64 or int32 [N] and [B]: keys, and the offsets of each sample's keys, for ``nn.EmbeddingBag``. The offsets are
      [B + 1] with ``include_last_offset``, and in Hotrow's ``EmbeddingBagCollection``.
    - TorchRec's ``KeyedJaggedTensor``.
    - None, bool, int, float and str: fixed to the example's value.

    Keys must reach the tables as they are, because a request's keys go directly to the tables.

    Args:
        module: on the CPU, float32.
        example: the arguments of one call of the module: a tuple of positional arguments, or a dictionary of keyword
            arguments. Any B.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        logits: the module answers with logits, so a Sigmoid is appended to each output that is a probability.
        tolerance: the largest difference between the answers of the module and of the version; relative to the answer
            if a score or a number of a vector is above 1.
        max_batchsize: maximum samples per request.
        features: a ``features.json``, so that requests may have raw features. A feature gives keys to the slot of its
            name, see ``ImportedModule.names``, or names its ``slot``.
        run: the training run that publishes updates of the rows; empty if it publishes none.
        positions: for each partition of the update log, the position that the rows include.
        sequences: for each input that is a padded sequence, [B, L], the key that stands for no key. Requests have up to
            L keys and need no padding. The module's masks and lengths are made from them.
        most_keys: for each table with keys and offsets that has ``mode="max"`` or gets weights, the most keys of a bag.
            The network gets the row of each key. Requests have a list of weights next to the list of keys.
        outputs: what clients call the outputs, and the kind of each: ``"probability"`` from 0 to 1, ``"score"`` for any
            number, ``"vector"``, or ``"omit"`` to leave it out. ``forward`` returns a tensor for each, float32[B] or
            float32[B, L], in a dictionary by these names, or in a tuple in this order. Other entries of a dictionary
            are probabilities. An only tensor without a name is called ``OUTPUT0``.

    Raises:
        ConfigError: the module or the example cannot be imported, or the features are not those of its slots. The
            message names the table or the input.
        ModelFileError: an answer differs by more than ``tolerance``. No version is written.
        MissingExtraError: PyTorch, onnxscript, onnx or ONNX Runtime is not installed.
        OutputError: the name cannot be used, or the file system refuses.
    """
    try:
        import onnx  # noqa: F401  the exporter needs onnx and onnxscript
        import onnxscript  # noqa: F401
        import torch  # noqa: F401
    except ImportError as err:
        raise MissingExtraError((err.name or "torch").partition(".")[0], "train", "importing a PyTorch module") from err
    from serving.importers.pytorch.conversion import convert

    return convert(
        module,
        example,
        Path(repository),
        name,
        logits,
        tolerance,
        max_batchsize,
        features=None if features is None else Path(features),
        run=run,
        positions=positions,
        sequences=sequences or {},
        most_keys={} if most_keys is None else most_keys,
        outputs=outputs,
    )
