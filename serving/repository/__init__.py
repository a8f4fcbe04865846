"""The model repository: which models and versions are served, and how a version comes and goes.

``source`` reads what the folder has, ``loader`` opens and drops one version, ``repository`` decides which versions
answer requests, and ``states`` remembers why the others do not.
"""

from serving.repository.loaded_model import LoadedModel
from serving.repository.repository import ModelRepository, Peers
from serving.repository.source import Versions
from serving.repository.states import ModelState

__all__ = ["LoadedModel", "ModelRepository", "ModelState", "Peers", "Versions"]
