"""The model repository: which models and versions are served, and how a version comes and goes.

``source`` reads what the folder has, ``loader`` opens and drops one version, ``served_model`` answers its requests,
``repository`` decides which versions serve, and ``states`` remembers why the others do not. ``version_tables`` are what
several versions may share. ``warm_up`` answers logged requests before a version serves.
"""

from serving.repository.peers import Peers
from serving.repository.repository import ModelRepository
from serving.repository.served_model import ServedModel
from serving.repository.source import Versions
from serving.repository.states import ModelState
from serving.repository.warm_up import check_warm_up

__all__ = ["ModelRepository", "ModelState", "Peers", "ServedModel", "Versions", "check_warm_up"]
