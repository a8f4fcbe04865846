"""What Triton Inference Server's Python backend needs to serve an exported model."""

import re

from serving.model.graph import Graph

#: ``model.py`` of a version: Triton loads the class of this name from it.
TRITON_ENTRY = '''"""Triton's way into Hotrow."""

from serving.frontend.triton import TritonPythonModel  # noqa: F401
'''

_INPUTS = (("DES", "TYPE_FP32"), ("CATCOLUMN", "TYPE_INT64"), ("ROWINDEX", "TYPE_INT32"))
_ANSWER = re.compile(r'"OUTPUT0"[^}]*?dims:\s*\[\s*-1\s*,\s*(\d+)\s*\]')


def triton_config(name: str, graph: Graph) -> str:
    """Write ``config.pbtxt``.

    The inputs have two free dimensions, since clients of HugeCTR's backend send ``[1, N]`` and others ``[B, F]``; so
    Triton itself must not add a batch dimension. The model stays on the CPU unless the file is changed.
    """
    inputs = []
    for tensor, datatype in _INPUTS:
        optional = " optional: true" if tensor == "DES" and graph.dense_dim == 0 else ""
        inputs.append(f'  {{ name: "{tensor}" data_type: {datatype} dims: [ -1, -1 ]{optional} }}')
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            "max_batch_size: 0",
            "input [",
            ",\n".join(inputs),
            "]",
            "output [",
            f'  {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, {graph.label_dim} ] }}',
            "]",
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            "",
        ]
    )


def label_dim_in(config: str) -> int | None:
    """Return the L that a ``config.pbtxt`` says; None where it is not written as ``triton_config`` writes it."""
    found = _ANSWER.search(config)
    return int(found[1]) if found else None
