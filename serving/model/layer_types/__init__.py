"""The structure of each dense layer type: its parameters, the shapes it makes, the weights it owns.

Each type has one function and one entry in ``LAYER_TYPES``. The computation of a layer is in the file of the same name
in ``serving.dense.layers``. Names, defaults and weight orders are those of HugeCTR's layer documentation, graph
exporter and dense model file.
"""

from collections.abc import Mapping

from serving.model.layer_types import attention, elementwise, normalization, products, shapes
from serving.model.layer_types.products import cross_weights
from serving.model.layer_types.site import INITIALIZERS, LayerType, Site, Structure, inner, show

__all__ = ["INITIALIZERS", "LAYER_TYPES", "REFUSED", "LayerType", "Site", "Structure", "cross_weights", "inner", "show"]

LAYER_TYPES: Mapping[str, LayerType] = {
    **attention.TABLE,
    **elementwise.TABLE,
    **normalization.TABLE,
    **products.TABLE,
    **shapes.TABLE,
}

REFUSED: Mapping[str, str] = {
    "EmbeddingCollection": "HugeCTR's own inference reads none either; give each table an embedding layer",
    "GRU": "its weights are one block in a layout that only cuDNN knows",
}
