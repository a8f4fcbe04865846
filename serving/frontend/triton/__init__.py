"""Models inside Triton Inference Server: the model class of its Python backend.

An exported ``model.py`` is one line, ``from serving.frontend.triton import TritonPythonModel``. Triton's own module
exists only inside Triton, so it is imported when a model is opened. Each instance of a model is its own process, with
one parameter server. The tiers are those of the repository's ``ps.json``, as with ``hotrow serve``.
"""

from serving.frontend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
