"""A log in memory, which can be away."""

from serving.errors import SinkError
from serving.stream import UpdateSink


class Log:
    """A log in memory with two partitions."""

    def __init__(self):
        self.messages = []  # payload, key group, topic
        self.is_away = False
        self.url = self.settings = None

    def open(self, url, settings):
        self.url, self.settings = url, settings
        if self.is_away:
            raise SinkError(url, "is away")
        return MemorySink(self)


class MemorySink(UpdateSink):
    def __init__(self, log):
        self._log = log
        self._positions = {}

    def send(self, payload, key_group, topic=None):
        if self._log.is_away:
            raise SinkError("memory", "is away")
        self._log.messages.append((payload, key_group, topic))
        self._positions[f"p{key_group % 2}"] = str(len(self._log.messages))

    def flush(self):
        if self._log.is_away:
            raise SinkError("memory", "is away")
        return self._positions

    def close(self):
        pass
