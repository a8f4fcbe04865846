"""Valid names of models and tables, which become folders, metric labels and parts of database keys.

Slots and dense features may have any name that requests do not use for something else.
"""

import re
from collections.abc import Sequence

# HPS builds a table's tag from the model's name and accepts only these characters. A model called "stats" would have
# the path of the statistics of all models: KServe has GET /v2/models/<model>, and Triton GET /v2/models/stats.
MODEL_NAME = re.compile(r"(?!stats$)[A-Za-z0-9_-]{1,120}")
NAME_EXPECTED = "expected 1 to 120 letters, digits, '_' or '-', and not 'stats', because /v2/models/stats is a route"
_VERSION = re.compile(r"@\d+(-[0-9a-f]{8})?(?=\.)")
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")


def without_version(table: str) -> str:
    """Return the full name of a table, ``<model>.<table>``, without the version of a repository's model."""
    return _VERSION.sub("", table, count=1)


#: The end of the name of a list's offsets in KServe's requests.
OFFSETS = ".offsets"
#: The tensors of requests with keys, as in HugeCTR's Triton backend.
DENSE, KEYS, ROW_PTRS = "DES", "CATCOLUMN", "ROWINDEX"
#: What requests call the number of candidates of each user.
CANDIDATES = "CANDIDATES"
#: The output with all columns of an answer, as HugeCTR's clients call it.
ANSWER = "OUTPUT0"
#: The outputs with the best candidates of each user, and with their values.
TOP_INDEX, TOP_SCORE = "TOP_INDEX", "TOP_SCORE"
NAMES_OF_ANSWERS = frozenset((ANSWER, TOP_INDEX, TOP_SCORE))
# Names that requests use for something else.
_NAMES_OF_REQUESTS = ("dense", "keys", DENSE, KEYS, ROW_PTRS, CANDIDATES)
#: The columns of the request log next to those of a model. With several labels, ``prediction_0``, ....
REQUEST_ID, REQUEST_SAMPLE, REQUEST_TIME = "request_id", "request_sample", "request_time"
MODEL_VERSION, PREDICTION, DEFAULTED_KEYS = "model_version", "prediction", "defaulted_keys"
_NAMES_OF_LOG = (REQUEST_ID, REQUEST_SAMPLE, REQUEST_TIME, MODEL_VERSION, DEFAULTED_KEYS)
_PREDICTIONS = re.compile(rf"{PREDICTION}(_\d+)?", re.ASCII)


def is_taken(name: str) -> bool:
    """Whether requests or the request log use a name for something other than a feature."""
    is_column = name in _NAMES_OF_LOG or _PREDICTIONS.fullmatch(name) is not None
    return is_column or name in _NAMES_OF_REQUESTS or name.endswith(OFFSETS)


def names_of_positions(name: str, count: int) -> Sequence[str]:
    """Return the names of the positions of an input: ``ads[0]`` and ``ads[1]``, or ``ads`` if it has one position."""
    return (name,) if count == 1 and not is_taken(name) else tuple(f"{name}[{place}]" for place in range(count))
