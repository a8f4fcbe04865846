"""The dense layers: one pure function and one entry of ``LAYERS`` per type.

Every function takes the layer's checked parameters, bottoms, weights and arithmetic, and returns the layer's tops. It
is written against the array API, so the same lines serve NumPy arrays (the reference), torch tensors (training, with
autograd) and ndonnx arrays (the traced ONNX model). No function changes its arguments. ``serving.model.layer_types``
has checked shapes, parameters and weights, in files of the same names. The formulas are from HugeCTR's layer
documentation. B is at least 1.
"""

from collections.abc import Mapping

from serving.dense.layers import attention, elementwise, normalization, products, shapes
from serving.dense.layers.signature import Arrays, LayerFunction, LayerOverride, LayerWeights, Params

__all__ = ["LAYERS", "Arrays", "LayerFunction", "LayerOverride", "LayerWeights", "Params"]

LAYERS: Mapping[str, LayerFunction] = {
    **attention.TABLE,
    **elementwise.TABLE,
    **normalization.TABLE,
    **products.TABLE,
    **shapes.TABLE,
}
