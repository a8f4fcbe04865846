"""The kinds of logs, as the contract's tests need them: open both ends, drop old records, go away and come back."""

import shutil

from serving.stream import open_sink, open_source


class FolderLog:
    """A folder. It is away while it has another name."""

    partition = "folder"
    beyond = "1000"

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir()

    def sink(self):
        return open_sink(str(self._folder))

    def source(self):
        return open_source(self._folder.as_uri())

    def drop_first(self, count):
        for number in range(1, count + 1):
            (self._folder / f"{number:010}.update").unlink()

    def go_away(self):
        self._folder.rename(self._folder.with_suffix(".away"))

    def come_back(self):
        self._folder.with_suffix(".away").rename(self._folder)

    def empty(self):
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def close(self):
        pass


LOGS = {"folder": lambda request: FolderLog(request.getfixturevalue("tmp_path") / "updates")}
