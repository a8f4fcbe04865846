"""Import a Keras model in one call. Keras is imported by the call, not by this package.

1. Find the embeddings among the layers, and what makes their keys: an input, or an input and a preprocessing layer.
2. Cut the model behind the embeddings. Keras exports the rest: the dense network.
3. Read the preprocessing layers as raw features, from the model's ``.keras`` archive.
4. Plan and write a version, as for a network and tables in files. It must give the model's answers before it appears.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serving.errors import ConfigError, MissingExtraError
from serving.importers.outputs import Kind
from serving.importers.pytorch import ImportedModule
from serving.model.version_writer import check_target


def from_keras(
    model: Any,
    example: Any,
    repository: str | Path,
    name: str,
    *,
    logits: bool = False,
    tolerance: float = 1e-5,
    max_batchsize: int = 1024,
    outputs: Mapping[str, Kind] | None = None,
) -> ImportedModule:
    """Write a Keras model into a model repository, and compare the version's answers with the model's.

    Every ``Embedding`` and every ``All2AllDenseEmbedding`` of ``training.tf.sok`` becomes a table. StringLookup,
    IntegerLookup, Hashing, Discretization and Normalization at the model's inputs become raw features, so requests may
    have strings. An empty text counts as missing: it has no key for a Hashing layer. The keys of an ``Embedding`` with
    ``mask_zero`` are a sequence, which needs no padding in requests. Every other ``Embedding`` needs all its keys.
    Everything else becomes the dense network, which Keras exports.

    Args:
        model: a functional or a sequential model of Keras 3 with outputs [B, L]. It may contain such models.
        example: an input of the model, with any B: arrays, lists or tensors. It shows at which side the sequences of an
            ``Embedding`` with ``mask_zero`` are padded. The version must give the model's answers to it, too.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        logits: the model answers with logits, so a Sigmoid is appended to each output that is a probability.
        tolerance: the largest difference between the answers of the model and of the version; relative to the answer if
            a score or a number of a vector is above 1.
        max_batchsize: maximum samples per request.
        outputs: the names and kinds of the outputs; see ``from_torch``. The model's outputs are in a dictionary by
            these names, or in a list: made by layers of these names, or in this order if no layer has such a name.

    Raises:
        ConfigError: the model or the example cannot be imported. The message names the layer.
        ModelFileError: an answer differs by more than ``tolerance``. No version is written.
        MissingExtraError: Keras, onnx, ONNX Runtime or the exporter of Keras's backend is not installed.
        OutputError: the name cannot be used, or the file system refuses.
    """
    try:
        import keras
        import onnx  # noqa: F401

        if keras.backend.backend() == "tensorflow":
            import tf2onnx  # noqa: F401
    except ImportError as err:
        raise MissingExtraError(err.name or "keras", "tensorflow", "importing a Keras model") from err
    if keras.backend.backend() == "jax" and find_spec("jax2onnx") is None:
        reason = "Keras exports models of the backend jax with jax2onnx, which is not installed; install it"
        raise ConfigError("from_keras", "model", f"{reason}; or load the saved model with another backend")
    from serving.importers.keras_model.conversion import convert

    check_target(Path(repository), name)
    return convert(model, example, Path(repository), name, logits, tolerance, max_batchsize, outputs)
