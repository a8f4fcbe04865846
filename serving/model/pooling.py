"""``pooling.json``: how training read a table. Exports write it next to the rows, and ``hotrow import`` reads it.

    {"combiner": "mean", "default_value": 0.5}

HugeCTR's files of a table do not say this. A folder without the file is a table that another program wrote.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from serving.errors import ConfigError, ModelFileError
from serving.model.records import Combiner
from serving.model.regular_file import is_absent
from serving.model.strict_json import Fields, read_json

POOLING_FILE = "pooling.json"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How training read a table.

    Attributes:
        combiner: how the rows of one slot were pooled; None: not known, or a slot never had several rows.
        default_value: every float of an unknown key's vector.
    """

    combiner: Combiner | None = None
    default_value: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the file. The caller syncs it."""
        combiner = {} if self.combiner is None else {"combiner": self.combiner}
        document = {**combiner, "default_value": self.default_value}
        (folder / POOLING_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Pooling":
        """Read the file of a table.

        Raises:
            ModelFileError: the file is damaged.
        """
        path = folder / POOLING_FILE
        if is_absent(path):
            return cls()
        try:
            fields = Fields(read_json(path), str(path), "", ("combiner", "default_value"))
            combiners = {name: name for name in get_args(Combiner)}
            return cls(
                fields.choice("combiner", combiners) if "combiner" in fields else None, fields.number("default_value")
            )
        except ConfigError as err:
            raise ModelFileError(path, ": ".join(filter(None, (err.path, err.reason)))) from err
