"""The control groups of Linux, version 1 and 2, by which a container limits this process."""

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def groups_of(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, innermost first; every one of them may have a limit."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        names = [name for name in path.split("/") if name]
        # A container often sees its own group as the root, and nothing above it.
        yield from (root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def words_in(file: Path) -> list[str]:
    """Return the words of a group's file; none if the group does not have the file."""
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []


def number_in(file: Path) -> int | None:
    """Return the number in a group's file; None for no limit."""
    words = words_in(file)
    return int(words[0]) if words and words[0].isdigit() else None
