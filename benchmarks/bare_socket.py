"""The limit of any server: a process that reads requests of a known size and answers each with the same bytes.

    python -m benchmarks.bare_socket REQUEST_BYTES ANSWER_FILE

It prints its port, then serves one connection after another until it is killed.
"""

import socket
import sys
from contextlib import suppress
from pathlib import Path


def main(request_bytes, answer_file):
    """Serve on a free port."""
    answer, room = Path(answer_file).read_bytes(), memoryview(bytearray(request_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            with listener.accept()[0] as connection, suppress(ConnectionError):  # a client ends within a request
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                arrived = 0
                while got := connection.recv_into(room[arrived:]):
                    arrived += got
                    if arrived == request_bytes:
                        connection.sendall(answer)
                        arrived = 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
