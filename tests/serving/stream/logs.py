"""The kinds of logs, as the contract's tests need them: open both ends, lose records, go away and come back."""

import shutil
import uuid

from serving.stream import open_sink, open_source
from tests.tools.kafka_cluster import KafkaCluster
from tests.tools.redis_servers import wait_until

IMPATIENT = "socket.timeout.ms=500&reconnect.backoff.ms=20&reconnect.backoff.max.ms=200"


class FolderLog:
    """A folder. It is away while it has another name."""

    partition = "folder"
    beyond = "1000"

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir()

    def sink(self):
        return open_sink(str(self._folder))

    def source(self, impatient=False):
        return open_source(self._folder.as_uri())

    def lose(self, sink):
        """Lose every record except the newest."""
        for path in sorted(self._folder.iterdir())[:-1]:
            path.unlink()

    def go_away(self):
        self._folder.rename(self._folder.with_suffix(".away"))

    def come_back(self):
        self._folder.with_suffix(".away").rename(self._folder)

    def empty(self):
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def close(self):
        pass


class KafkaLog:
    """A topic of its own. It is away while the brokers are stopped."""

    beyond = "1000000"

    def __init__(self, cluster):
        self._cluster = cluster
        self._other = None
        self._topic = f"hotrow.{uuid.uuid4().hex}"
        self.partition = f"{self._topic}/0"

    @property
    def url(self):
        return f"kafka://{(self._other or self._cluster).addresses}/{self._topic}"

    def sink(self):
        return open_sink(self.url)

    def source(self, impatient=False):
        return open_source(f"{self.url}?{IMPATIENT}" if impatient else self.url)

    def lose(self, sink):
        """Write more than the partition keeps."""
        for _ in range(10):
            sink.send(bytes(900_000), 0)
        sink.flush()

    def go_away(self):
        self._cluster.freeze()

    def come_back(self):
        self._cluster.thaw()

    def empty(self):
        """Restart the brokers without their files: at other addresses, because they choose their ports."""
        self._other = KafkaCluster()

    def close(self):
        self._cluster.thaw()
        if self._other is not None:
            self._other.kill()


class RedisLog:
    """A stream. It is away while the server is down; the server keeps what it has."""

    partition = "hotrow.dcn"
    beyond = "99999999999999-0"

    def __init__(self, server):
        self._server = server
        with server.client() as client:
            client.flushall()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self._server.port}/0/{self.partition}"

    def sink(self):
        return open_sink(self.url)

    def source(self, impatient=False):
        return open_source(self.url)

    def lose(self, sink):
        """Trim the stream to its newest entry."""
        with self._server.client() as client:
            client.xtrim(self.partition, maxlen=1, approximate=False)

    def go_away(self):
        self._server.kill()

    def come_back(self):
        self._server.start()
        with self._server.client() as client:
            wait_until(lambda: not client.info("persistence")["loading"], "Redis has loaded its file")

    def empty(self):
        with self._server.client() as client:
            client.flushall()

    def close(self):
        pass


LOGS = {
    "folder": lambda request: FolderLog(request.getfixturevalue("tmp_path") / "updates"),
    "kafka": lambda request: KafkaLog(request.getfixturevalue("cluster")),
    "redis": lambda request: RedisLog(request.getfixturevalue("server")),
}
