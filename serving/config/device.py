"""What a configuration may ask of a GPU."""

from kernels.errors import DeviceUnavailableError
from serving.config.records import ModelConfig


def refuse_gpu_cache(config: ModelConfig, source: str = "") -> None:
    """Raise where ``config``, read from the file ``source``, asks for a GPU embedding cache.

    Raises:
        DeviceUnavailableError: it does; the message tells what to change.
    """
    if config.gpu_cache:
        raise DeviceUnavailableError(
            f"{source}{': ' if source else ''}model {config.name!r}: gpucache is true; set it to false: "
            "this version of Hotrow looks embeddings up on the CPU only"
        )
