"""Train CTR models, and embedding tables in any PyTorch model. Import this package only where PyTorch is installed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.embedding import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        clip_grad_norm_,
        join_state_dicts,
    )

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "clip_grad_norm_", "join_state_dicts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training import embedding  # PyTorch takes a second to import, which hotrow's help does not need

    return getattr(embedding, name)
