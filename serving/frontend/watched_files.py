"""Small files that an operator may replace while the server runs: tokens and certificates."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from serving.background import PeriodicWorker
from serving.errors import ConfigError
from serving.model.regular_file import read_regular

_log = logging.getLogger("hotrow.files")
#: A change counts once two checks in a row see it, so a new file is in use within a second.
_INTERVAL_S = 0.3
_MOST_BYTES = 1 << 20


def read_small_file(file: Path, source: str) -> bytes:
    """Read a regular file of at most 1 MiB; ``source`` names it in messages.

    Raises:
        ConfigError: it cannot be read, is too large, or is not a regular file.
    """
    try:
        return read_regular(file, _MOST_BYTES)
    except OSError as err:
        raise ConfigError(source, "", f"cannot be read: {err.strerror}") from err


class WatchedFiles:
    """Files that are used together, and used again when one of them changes.

    The files are compared by content. So no change is missed, however the files are replaced.
    """

    def __init__(self, files: Mapping[str, Path], use: Callable[[Sequence[bytes]], None]) -> None:
        """Read the files, use them, and look for changes until ``close``.

        Args:
            files: the files by the options that name them.
            use: takes the contents; raises ConfigError if it refuses them. It is called in a thread, except now.

        Raises:
            ConfigError: the files cannot be used.
        """
        self._files = files
        self._use = use
        contents = self._read()
        # The contents, or why they cannot be read: at the last look, and when they were last used or refused.
        self._seen: list[bytes] | str = contents
        self._judged: list[bytes] | str = contents
        use(contents)
        self._worker = PeriodicWorker("files", self._look, _INTERVAL_S)

    def close(self) -> None:
        """Stop looking for changes."""
        self._worker.close()

    def _read(self) -> list[bytes]:
        return [read_small_file(file, f"{option} {file}") for option, file in self._files.items()]

    def _found(self) -> list[bytes] | str:
        """Return the contents, or why they cannot be read."""
        try:
            return self._read()
        except ConfigError as err:
            return str(err)

    def _look(self) -> None:
        found = self._found()
        is_settled, self._seen = found == self._seen, found  # otherwise a program may still be writing
        if not is_settled or found == self._judged:
            return
        names = ", ".join(f"{option} {file}" for option, file in self._files.items())
        try:
            if isinstance(found, str):
                raise ConfigError(found, "", "")
            self._use(found)
        except ConfigError as err:
            _log.error("%s; the server continues with the previous contents", err)
        else:
            _log.info("%s: read again", names)
        self._judged = found  # now, because another error, such as too many open files, says nothing of the contents
