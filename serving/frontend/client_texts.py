"""Error texts for clients, without the folders of the server. The log has full paths."""

import re
from pathlib import Path

from kernels.errors import HotrowError
from serving.errors import RequestError

#: The folders of an absolute path; not those of a URL, of a relative path or of a word with slashes.
_FOLDERS = re.compile(r"(?<![\w./:~-])/(?:[^\s/:;,'\"()]+/)+")


def message_of(error: HotrowError | MemoryError) -> str:
    """Return an error's text. Errors of requests name only what the client sent."""
    if isinstance(error, MemoryError):
        return "the server has too little free memory for this request"
    return str(error) if isinstance(error, RequestError) else without_folders(str(error))


def without_folders(text: str, repository: tuple[str, ...] = ()) -> str:
    """Return ``text`` with paths in ``repository`` relative to it, and only the names of other files."""
    for folder in repository:
        text = text.replace(folder, "")
    return _FOLDERS.sub("", text) if "/" in text else text  # most have none, and refusals must be cheap


def folders_of(repository: Path) -> tuple[str, ...]:
    """Return what precedes the files of a repository in messages, each with a slash at its end."""
    folder = repository if repository.is_dir() else repository.parent
    forms = dict.fromkeys((str(folder.resolve()), str(folder.absolute()), str(folder)))
    return tuple(f"{form}/" for form in forms if form != ".")
