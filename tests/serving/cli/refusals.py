"""The error of `hotrow serve` about a repository. `hotrow check` must print the same error."""

from serving.errors import HotrowError, told
from serving.repository import ModelRepository


def why_serving_refuses(folder):
    """Return the error as one line, or an empty text if the repository is served."""
    try:
        with ModelRepository(folder) as repository:
            repository.load()
    except HotrowError as err:
        return told(err)
    return ""
