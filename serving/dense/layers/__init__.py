"""What each dense layer computes: one pure function and one entry of ``LAYERS`` per type.

Every function takes the layer's checked parameters, its bottoms, its own weights and the arithmetic to use, and returns
its tops. It is written against the array API, so that the same lines serve NumPy arrays (the reference), torch tensors
(training, with autograd) and ndonnx arrays (the traced ONNX model). No function changes its arguments. Shapes,
parameters and weights were checked by ``serving.model.layer_types``, in files of the same names; formulas are those of
HugeCTR's layer documentation. B is at least 1.
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
