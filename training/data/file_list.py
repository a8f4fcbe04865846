"""HugeCTR's file lists: a text file with the number of files in its first line, then the path of one file per line."""

from collections.abc import Sequence
from pathlib import Path

from serving.model.atomic import atomic_write
from serving.model.regular_file import open_regular
from training.errors import DataError

_LONGEST_FIRST_LINE = 32


def is_file_list(path: Path) -> bool:
    """Return whether the first line is that of a file list. Raise OSError if the file cannot be read."""
    with open_regular(path) as file:
        return _count(file.readline(_LONGEST_FIRST_LINE)) is not None


def read_file_list(path: Path) -> list[Path]:
    """Return the files of a file list, or the path itself if it is no file list.

    The paths in a list are relative to the working directory, as in HugeCTR, or to the list's folder.

    Raises:
        DataError: the list cannot be read, or has another number of files than its first line says.
    """
    try:
        with open_regular(path) as file:
            count = _count(file.readline(_LONGEST_FIRST_LINE))
            if count is None:
                return [path]
            names = [line.strip().decode() for line in file if line.strip()]
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err
    except UnicodeDecodeError as err:
        raise DataError(path, "the file list is not UTF-8") from err
    if len(names) != count:
        raise DataError(path, f"the first line says {count} files, but {len(names)} are listed")
    return [Path(name) if Path(name).exists() else path.parent / name for name in names]


def write_file_list(path: str | Path, files: Sequence[str | Path]) -> None:
    """Write a file list."""
    with atomic_write(path) as file:
        file.write("".join(f"{line}\n" for line in (len(files), *files)).encode())


def _count(first_line: bytes) -> int | None:
    """Return the number of files of a file list; None if the line does not begin one."""
    text = first_line.strip()
    return int(text) if text.isdigit() and first_line.endswith(b"\n") else None
