"""A folder of checkpoints, which are folders with a number: ``step-100``."""

import re
import shutil
from pathlib import Path

from serving.model.atomic import remove_killed_writes

_OF_CHECKPOINTS = re.compile(r"checkpoint\.json|dense\..+|.+\.rows|server-[0-9]+")


class CheckpointFolder:
    """The checkpoints of one training. Each one is complete or absent.

    Attributes:
        path: the folder, which may be absent.
    """

    def __init__(self, path: Path, kind: str) -> None:
        """Take the folder. The name of a checkpoint is ``<kind>-<number>``."""
        self.path = path
        self._kind = kind

    def checkpoint(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.path / f"{self._kind}-{number}"

    def newest(self) -> Path | None:
        """Return the checkpoint with the largest number, or None. A file of it may be missing."""
        return max(self._all(), default=(0, None))[1]

    def remove_earlier(self, number: int, kept: int | None = None) -> None:
        """Remove the checkpoints before a number, except one, and what a killed training has not removed of them."""
        for earlier, path in self._all():
            if earlier < number and earlier != kept:
                shutil.rmtree(path, ignore_errors=True)

    def remove_killed_writes(self) -> None:
        """Remove what killed trainings were writing. A checkpoint that was being replaced gets its name back."""
        remove_killed_writes(self.path, f"{self._kind}-[0-9]+")

    def _all(self) -> list[tuple[int, Path]]:
        found = {path.parent for path in self.path.glob(f"{self._kind}-*/*") if _OF_CHECKPOINTS.fullmatch(path.name)}
        numbers = [(path.name.removeprefix(f"{self._kind}-"), path) for path in found]
        return [(int(number), path) for number, path in numbers if number.isdecimal()]
