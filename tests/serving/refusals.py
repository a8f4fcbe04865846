"""What `hotrow serve` says of a repository that it refuses; `hotrow check` is to say the same."""

from serving.errors import HotrowError, told
from serving.repository import ModelRepository


def why_serving_refuses(folder):
    """One line, or "" where the repository is served."""
    try:
        with ModelRepository(folder) as repository:
            repository.load()
    except HotrowError as err:
        return told(err)
    return ""
