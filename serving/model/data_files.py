"""Which names in a folder are data, for every reader of a folder.

Names that begin with ``.`` or ``_`` are not data, as in Spark, Hive and Arrow: ``_SUCCESS``, ``_temporary``,
``.0.csv.crc``, rsync's ``.0.csv.Xy12``. Of the other names, the suffix decides, so ``0.csv.bak``, ``0.csv~`` and
``0.csv.part`` are not CSV files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HIDDEN = (".", "_")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a folder.

    Attributes:
        files: the data, in the order of their names.
        left_out: the names of all other entries by the reason.
    """

    files: tuple[Path, ...]
    left_out: Mapping[str, Sequence[str]]

    def __str__(self) -> str:
        """Return how many files are data, and how many are not and why, for messages."""
        total = len(self.files) + sum(map(len, self.left_out.values()))
        reasons = (
            f"{reason}: {len(names):,} ({', '.join(map(repr, names[:_SHOWN]))}{', ...' * (len(names) > _SHOWN)})"
            for reason, names in self.left_out.items()
        )
        return "; ".join([f"{len(self.files):,} of {total:,} entries are data files", *reasons])


def _is_data_name(name: str) -> bool:
    """Return whether a name may be one of data."""
    return not name.startswith(_HIDDEN)


def list_data_files(folder: Path, suffixes: Sequence[str]) -> DataFiles:
    """List the entries of a folder whose names end in one of ``suffixes``. They may be dead links, pipes and folders.

    Raises:
        OSError: the folder cannot be read.
    """
    files: list[Path] = []
    left_out: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        reason = _reason_to_leave_out(path, suffixes)
        if reason:
            left_out.setdefault(reason, []).append(path.name)
        else:
            files.append(path)
    return DataFiles(tuple(files), left_out)


def _reason_to_leave_out(path: Path, suffixes: Sequence[str]) -> str:
    if not _is_data_name(path.name):
        return "the name begins with '.' or '_'"
    if path.name.endswith(tuple(suffixes)):
        return ""  # whatever it is: a dead link is missing data
    return "a folder" if path.is_dir() else f"the name does not end in {' or '.join(suffixes)}"
