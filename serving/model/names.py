"""Valid names of models and tables, which become folders, metric labels and parts of database keys."""

import re

# HPS builds a table's tag from the model's name and accepts only these characters.
MODEL_NAME = re.compile(r"[A-Za-z0-9_-]{1,120}")
_VERSION = re.compile(r"@\d+(-[0-9a-f]{8})?(?=\.)")
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")


def without_version(table: str) -> str:
    """Return the full name of a table, ``<model>.<table>``, without the version of a repository's model."""
    return _VERSION.sub("", table, count=1)
