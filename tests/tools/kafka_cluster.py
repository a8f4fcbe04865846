"""A Kafka cluster for tests: librdkafka's mock cluster in a process of its own. This file is also that process."""

import os
import signal
import subprocess
import sys


class KafkaCluster:
    """Brokers on 127.0.0.1. Topics are made when somebody writes to them, and have four partitions.

    A partition keeps about 5 MB: the beginning of a longer log is gone.
    """

    def __init__(self, brokers: int = 1):
        """Start the process and wait until the brokers listen."""
        command = [sys.executable, __file__, str(brokers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addresses = self._process.stdout.readline().strip()
        if not self.addresses:
            raise RuntimeError(f"the brokers ended with {self._process.wait()}")

    def freeze(self):
        """Stop the brokers: they accept connections and answer nothing until ``thaw``."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self):
        """Continue the brokers."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        """End the brokers; their topics are gone."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def main():
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": "x", "test.mock.num.brokers": int(sys.argv[1]), "log_level": 0})
    brokers = producer.list_topics(timeout=60).brokers.values()
    print(",".join(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
    sys.stdin.read()  # until the test ends, however it ends


if __name__ == "__main__":
    main()
