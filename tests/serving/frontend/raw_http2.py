"""A gRPC client in frames of HTTP/2, for what no client library would send."""

import contextlib
import socket
import struct
import time

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def message_of(data, of_bytes=None):
    """A message of gRPC, or its beginning if it announces more than ``data``."""
    return struct.pack(">BI", 0, len(data) if of_bytes is None else of_bytes) + data


class RawClient:
    """One connection. It reads frames only in ``wait_for`` and, if it may send no more, in ``send``.

    Attributes:
        answers: the kinds and contents of the frames that ended or answered calls, by call.
        goodbye: the error code with which the server says goodbye.
        pongs: how many pings were answered.
        has_settings: the server's settings have come.
        is_closed: the server has closed the connection.
    """

    def __init__(self, address, window=65535, says_hello=True):
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._received = b""
        self._stream_window, self._connection_window, self._windows = 65535, 65535, {}
        self.answers, self.goodbye, self.pongs, self.is_closed = {}, None, 0, False
        self.has_settings = False
        if says_hello:
            self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            self.frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def frame(self, kind, flags, call, data=b""):
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(struct.pack(">IBI", len(data) << 8 | kind, flags, call) + data)

    def open(self, path, **metadata):
        """Begin a call and return its number."""
        call = 1 + 2 * len(self._windows)
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        fields |= {"content-type": "application/grpc", **metadata}
        literal = (b"\x00%c%b%c%b" % (len(n), n.encode(), len(v), v.encode()) for n, v in fields.items())
        self.frame(HEADERS, END_HEADERS, call, b"".join(literal))
        self._windows[call] = self._stream_window
        self.answers[call] = []
        return call

    def send(self, call, data, is_last=False, within_s=5):
        """Send a part of a message as far as the server lets it; return how many bytes went."""
        sent, until_s = 0, time.monotonic() + within_s
        while sent < len(data) and not self.is_closed and not self.ended(call):
            size = min(self._connection_window, self._windows[call], 16384, len(data) - sent)
            if size <= 0:
                if time.monotonic() > until_s:
                    break
                self._pump(0.05)
                continue
            flags = END_STREAM if is_last and sent + size == len(data) else 0
            self.frame(DATA, flags, call, data[sent : sent + size])
            self._connection_window -= size
            self._windows[call] -= size
            sent += size
        return sent

    def ended(self, call):
        """Whether the server has sent a status or a reset."""
        last = ((kind, flags & END_STREAM) for kind, flags, _ in self.answers[call])
        return any(kind == RST_STREAM or (kind == HEADERS and is_end) for kind, is_end in last)

    def wait_for(self, condition, within_s=10):
        """Read frames until the condition holds; return whether it does."""
        until_s = time.monotonic() + within_s
        while not condition() and time.monotonic() < until_s and not self.is_closed:
            self._pump(0.05)
        return bool(condition())

    def text_of(self, call):
        """The contents of the frames that answered a call."""
        return b"".join(data for _, _, data in self.answers[call])

    def _pump(self, wait_s):
        self._socket.settimeout(wait_s)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            data = b""
        self._socket.settimeout(20)
        self.is_closed = not data
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + size:
                return
            kind, flags, call = struct.unpack(">BBI", self._received[3:9])
            frame, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._take(kind, flags, call & 0x7FFFFFFF, frame)

    def _take(self, kind, flags, call, data):
        if kind == WINDOW_UPDATE and call:
            self._windows[call] += int.from_bytes(data)
        elif kind == WINDOW_UPDATE:
            self._connection_window += int.from_bytes(data)
        elif kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", data):
                if number == _INITIAL_WINDOW_SIZE:
                    self._windows = {one: left + value - self._stream_window for one, left in self._windows.items()}
                    self._stream_window = value
            self.has_settings = True
            self.frame(SETTINGS, ACK, 0)
        elif kind == PING:
            self.pongs += flags & ACK
            if not flags & ACK:
                self.frame(PING, ACK, 0, data)
        elif kind == GOAWAY:
            self.goodbye = struct.unpack(">I", data[4:8])[0]
        elif call:
            self.answers[call].append((kind, flags, data))
