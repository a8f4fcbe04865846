"""The tensors of a click-through model, with the names and forms of HugeCTR's Triton backend.

====================  ==============  ===========================================================================
``DES``               FP32            dense features, [B, F] or flat as [B * F] or [1, B * F]; optional if F = 0
``CATCOLUMN``         INT64, UINT32   N keys, [N] or [1, N], or [B, S] with one key per slot
``ROWINDEX``          INT32, INT64    CSR offsets into the keys, [R] or [1, R]; optional if the keys are [B, S]
``OUTPUT0``           FP32            probabilities, [B, L]
====================  ==============  ===========================================================================
"""

from typing import Any

from serving.batch import DENSE, KEYS, ROW_PTRS, Batch, read_batch
from serving.config import ModelConfig
from serving.features import slots_of
from serving.protocol.tensors import PLATFORM as PLATFORM
from serving.protocol.tensors import Array, Signature, TensorSpec, config_document, key_datatypes

PROBABILITIES = "OUTPUT0"


def signature_of(config: ModelConfig) -> Signature:
    """Return a model's inputs and outputs; of several datatypes of an input, the declared datatype comes first.

    All have two free dimensions, as in Triton with an export's ``config.pbtxt``: HugeCTR's clients send ``[1, N]``.
    """
    return Signature(
        inputs=(
            TensorSpec(DENSE, ("FP32",), (-1, -1), optional=config.dense_dim == 0),
            TensorSpec(KEYS, key_datatypes(config.key_type), (-1, -1)),
            TensorSpec(ROW_PTRS, ("INT32", "INT64"), (-1, -1), optional=True),
        ),
        outputs=(TensorSpec(PROBABILITIES, ("FP32",), (-1, config.label_dim)),),
    )


def batch_of(config: ModelConfig, inputs: dict[str, Array]) -> Batch:
    """Return the samples in a request's arrays, which an ``InferDecoder`` for ``signature_of(config)`` made."""
    return read_batch(config, inputs.get(DENSE), inputs[KEYS], inputs.get(ROW_PTRS))


def slot_names(config: ModelConfig) -> list[str]:
    """Return the names of a model's slots in order."""
    return [slot.name for slot in slots_of(config)]


def triton_config(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return the model's configuration as Triton's ``ModelConfig``."""
    parameters = {
        "max_batchsize": str(config.max_batchsize),
        "tables": " ".join(table.name for table in config.tables),
        "slots": " ".join(str(table.slots) for table in config.tables),
    }
    if config.slot_keys != "stored":
        parameters["keys"] = config.slot_keys
    return config_document(name, signature_of(config), parameters)
