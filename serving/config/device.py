"""What a configuration may ask of a GPU."""

from kernels.errors import DeviceUnavailableError
from serving.config.records import ModelConfig


def refuse_gpu_cache(config: ModelConfig, message: str) -> None:
    """Raise where ``config`` asks for a GPU embedding cache.

    Raises:
        DeviceUnavailableError: with ``message``, which tells what to change.
    """
    if config.gpu_cache:
        raise DeviceUnavailableError(f"{message}: this version of Hotrow looks embeddings up on the CPU only")
