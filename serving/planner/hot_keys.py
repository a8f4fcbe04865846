"""Write the rows that a trace looks up most, for ``volatile_db.hot_keys``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.errors import OutputError
from serving.model.atomic import atomic_write
from serving.planner.plan import TablePlan


def write_hot_keys(plans: Sequence[TablePlan], folder: Path) -> None:
    """Write the keys of every table that was looked up, hottest first, as int64[K] into ``<full name>.npy``.

    The folder is created if it does not exist.

    Raises:
        OutputError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            if plan.hottest.size:
                with atomic_write(folder / f"{plan.name}.npy") as file:
                    np.save(file, plan.hottest)
    except OSError as err:
        raise OutputError(f"{folder}: cannot be written: {err.strerror}") from err
