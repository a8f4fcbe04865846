"""The outbox: a folder in which every delta lies from its publication until the log has confirmed it.

A delta is all messages of one publication. The files are complete or absent:

- ``outbox.json``: the names of run and publisher, what the log has confirmed, and the checkpoints of the training;
- ``<number>.delta``: the messages of a delta that the log has not confirmed;
- ``<number>.keys``: the keys of the deltas up to this number, since the file before or a checkpoint. A training that
  goes back to a checkpoint needs the keys that it has published since.
"""

import fcntl
import json
import os
import re
import secrets
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError, OutputError
from serving.model.atomic import atomic_write, remove_killed_writes
from serving.model.regular_file import open_regular
from serving.model.strict_json import Fields, read_json
from serving.stream import Encoded
from training.changes import sorted_keys

Keys = NDArray[np.int64]
_STATE_FILE = "outbox.json"
_FORMAT = 1
_MESSAGE = struct.Struct("<IIHH")  # bytes of the payload, CRC-32 of topic and payload, key group, bytes of the topic
_END = struct.Struct("<4sQ")  # after the last message: the number of the next message
_END_MARK = b"\xff\xff\xff\xff"  # no message has so many bytes
_MOST_MESSAGE_BYTES = 64 << 20
_FILES = rf"[0-9]{{10}}\.(delta|keys)|{_STATE_FILE}"


def clear_outbox(folder: Path) -> None:
    """Remove the files of an outbox. All other files stay.

    Raises:
        OutputError: a publisher uses the folder, or the file system refuses.
    """
    with _errors_of(folder):
        descriptor = _locked(folder)
        try:
            for path in folder.iterdir():
                if re.fullmatch(_FILES, path.name):
                    path.unlink()
        finally:
            os.close(descriptor)


class Outbox:
    """The deltas of one publisher. One thread writes deltas while another one sends them.

    Attributes:
        is_new: whether the folder had no outbox before.
        run: the name of the training run. It stays the same in this folder.
        publisher: the name of the publisher.
        sequence: the number of the next message.
        positions: for each partition, the position after the last message that the log has confirmed.
    """

    def __init__(self, folder: str | Path, model: str, most_bytes: int) -> None:
        """Open the outbox, or make one.

        Args:
            folder: is created if it does not exist.
            model: the name of the model. A folder has one model's outbox.
            most_bytes: deltas are refused while so many bytes wait for the log.

        Raises:
            OutputError: another publisher uses the folder, or the file system refuses.
            ConfigError: the outbox is of another model, or is none.
        """
        self._folder = Path(folder)
        self._model = model
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # guards the state, and its file
        with self._errors():
            self._descriptor: int | None = _locked(self._folder)
        try:
            self.is_new = not (self._folder / _STATE_FILE).exists()
            self.run = secrets.token_hex(8)
            self.publisher = "trainer"
            self.positions: dict[str, str] = {}
            self._confirmed, self.sequence = 0, 1
            self._checkpoints: list[tuple[int, int]] = []  # step, and the last delta before it
            if self.is_new:
                self._write_state()
            else:
                self._read_state()
            self._waiting = self._open_deltas()
            self._last = max([self._confirmed, *self._waiting])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other publishers use the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, messages: Iterable[Encoded], keys: Mapping[str, list[Keys]], next_sequence: Any) -> bool:
        """Write a delta. Return False, and write nothing, if there are no messages.

        Args:
            messages: the messages.
            keys: the keys of each table in them, complete after the last message.
            next_sequence: returns the number after the last message.

        Raises:
            OutputError: the file system refuses, or too many bytes wait for the log.
        """
        messages = iter(messages)
        first = next(messages, None)
        if first is None:
            return False
        number = self._last + 1
        with self._errors(), atomic_write(self._delta(number)) as file:
            size_bytes = self._write_message(file, first, 0)
            for message in messages:
                size_bytes = self._write_message(file, message, size_bytes)
            sequence = next_sequence()
            file.write(_END.pack(_END_MARK, sequence))
            with self._lock:
                needs_keys = bool(self._checkpoints)
            if needs_keys:  # before the delta: a key too many does no harm
                _write_keys(self._keys_file(number), _unique(keys))
        with self._lock:
            self._last, self.sequence = number, sequence
            self._waiting[number] = size_bytes
        return True

    def waiting(self) -> list[int]:
        """Return the numbers of the deltas that the log has not confirmed, in their order."""
        with self._lock:
            return sorted(self._waiting)

    def read(self, number: int) -> Iterator[Encoded]:
        """Yield the messages of a delta.

        Raises:
            ModelFileError: the file is missing or damaged.
        """
        path = self._delta(number)
        try:
            with open_regular(path) as file:
                while (message := _read_message(path, file)) is not None:
                    yield message
        except OSError as err:
            raise ModelFileError(path, f"cannot be read: {err.strerror}") from err

    def confirm(self, number: int, positions: Mapping[str, str]) -> None:
        """Note that the log has a delta and all before it, and remove its file.

        Raises:
            OutputError: the file system refuses.
        """
        with self._errors():
            with self._lock:
                self._confirmed = number
                self.positions |= positions
                self._write_state()
            self._delta(number).unlink(missing_ok=True)
            with self._lock:
                self._waiting.pop(number, None)

    def add_checkpoint(self, step: int) -> None:
        """Note that the training can go back to this moment, from now on.

        Raises:
            OutputError: the file system refuses.
        """
        with self._errors(), self._lock:
            self._checkpoints.append((step, self._last))
            self._write_state()

    def keep_checkpoints(self, steps: Iterable[int]) -> None:
        """Forget all checkpoints except the last one of each of these steps.

        Raises:
            OutputError: the file system refuses.
        """
        kept = set(steps)
        with self._errors(), self._lock:
            self._checkpoints = sorted(
                ((step, delta) for step, delta in dict(self._checkpoints).items() if step in kept),
                key=lambda checkpoint: checkpoint[1],
            )
            self._write_state()
            self._merge_keys()

    def keys_since(self, step: int) -> dict[str, Keys]:
        """Return the keys of each table that were published after a checkpoint.

        Raises:
            ConfigError: nothing is known of this checkpoint.
            ModelFileError: a file of keys is damaged.
        """
        after = min((delta for of_step, delta in self._checkpoints if of_step == step), default=None)
        if after is None:
            reason = f"nothing is known of a checkpoint at step {step}, so what servers have cannot be corrected"
            raise ConfigError(str(self._folder), "", f"{reason}; delete this folder to begin a new run")
        keys: dict[str, list[Keys]] = defaultdict(list)
        for number in self._numbers("keys"):
            if number > after:
                for table, of_table in _read_keys(self._keys_file(number)).items():
                    keys[table].append(of_table)
        return _unique(keys)

    def _merge_keys(self) -> None:
        """Merge the files of keys between two checkpoints, and remove the files before the first checkpoint."""
        begins = [delta for _, delta in self._checkpoints]
        merged: dict[int, list[int]] = defaultdict(list)
        for number in self._numbers("keys"):
            merged[sum(begin < number for begin in begins)].append(number)
        for checkpoints, numbers in merged.items():
            if checkpoints and len(numbers) > 1:
                keys: dict[str, list[Keys]] = defaultdict(list)
                for number in numbers:
                    for table, of_table in _read_keys(self._keys_file(number)).items():
                        keys[table].append(of_table)
                _write_keys(self._keys_file(numbers[-1]), _unique(keys))
            for number in numbers[:-1] if checkpoints else numbers:
                self._keys_file(number).unlink()

    def _open_deltas(self) -> dict[int, int]:
        """Return the deltas that wait, with their sizes. Remove those that the log has confirmed."""
        waiting = {}
        with self._errors():
            for number in self._numbers("delta"):
                path = self._delta(number)
                if number <= self._confirmed:
                    path.unlink()
                    continue
                waiting[number] = path.stat().st_size
                with open_regular(path) as file:
                    file.seek(max(waiting[number] - _END.size, 0))
                    end = file.read()
                if len(end) != _END.size or not end.startswith(_END_MARK):
                    raise ModelFileError(path, "expected the end of a delta, found other bytes")
                self.sequence = max(self.sequence, _END.unpack(end)[1])
        return waiting

    def _write_message(self, file: BinaryIO, message: Encoded, size_bytes: int) -> int:
        topic = (message.topic or "").encode()
        checksum = zlib.crc32(message.payload, zlib.crc32(topic))
        file.write(_MESSAGE.pack(len(message.payload), checksum, message.key_group, len(topic)))
        file.write(topic)
        file.write(message.payload)
        size_bytes += _MESSAGE.size + len(topic) + len(message.payload)
        with self._lock:
            waiting_bytes = sum(self._waiting.values())
        if waiting_bytes and waiting_bytes + size_bytes > self._most_bytes:
            reason = f"{waiting_bytes:,} bytes wait for the update log, and at most {self._most_bytes:,} may"
            raise OutputError(f"{self._folder}: the outbox is full: {reason}")
        return size_bytes

    def _write_state(self) -> None:
        document = {
            "format": _FORMAT,
            "model": self._model,
            "run": self.run,
            "publisher": self.publisher,
            "confirmed": self._confirmed,
            "sequence": self.sequence,
            "positions": self.positions,
            "checkpoints": self._checkpoints,
        }
        with atomic_write(self._folder / _STATE_FILE) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")

    def _read_state(self) -> None:
        fields = Fields(read_json(self._folder / _STATE_FILE), str(self._folder / _STATE_FILE), "")
        fields.choice("format", {_FORMAT: _FORMAT})
        if (found := fields.text("model")) != self._model:
            raise fields.error(f"expected the outbox of model {self._model!r}, found that of {found!r}", "model")
        self.run, self.publisher = fields.text("run"), fields.text("publisher")
        self._confirmed = fields.integer("confirmed", minimum=0)
        self.sequence = fields.integer("sequence", minimum=1)
        positions = fields.object("positions")
        self.positions = {partition: positions.text(partition) for partition in positions}
        try:
            self._checkpoints = [(int(step), int(delta)) for step, delta in fields.value("checkpoints")]
        except (TypeError, ValueError) as err:
            raise fields.error("expected pairs of a step and a delta", "checkpoints") from err

    def _numbers(self, kind: str) -> list[int]:
        names = (path.stem for path in self._folder.glob(f"*.{kind}"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def _delta(self, number: int) -> Path:
        return self._folder / f"{number:010}.delta"

    def _keys_file(self, number: int) -> Path:
        return self._folder / f"{number:010}.keys"

    def _errors(self) -> AbstractContextManager[None]:
        return _errors_of(self._folder)


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise OutputError(f"{folder}: cannot be written: {(err.strerror or str(err)).lower()}") from err


def _locked(folder: Path) -> int:
    """Make the folder, lock it for one publisher, and remove what killed writes have left; return the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(f"{folder}: another publisher uses this outbox") from None
    remove_killed_writes(folder, _FILES)
    return descriptor


def _read_message(path: Path, file: BinaryIO) -> Encoded | None:
    """Read the next message, or None at the end of the delta."""
    start = file.read(_MESSAGE.size)
    if len(start) == _END.size and start.startswith(_END_MARK) and not file.read(1):
        return None
    if len(start) == _MESSAGE.size:
        payload_bytes, checksum, group, topic_bytes = _MESSAGE.unpack(start)
        if payload_bytes <= _MOST_MESSAGE_BYTES:
            topic, payload = file.read(topic_bytes), file.read(payload_bytes)
            if len(payload) == payload_bytes and zlib.crc32(payload, zlib.crc32(topic)) == checksum:
                return Encoded(payload, group, topic.decode() or None)
    raise ModelFileError(path, "a message of the delta is damaged")


def _unique(keys: Mapping[str, list[Keys]]) -> dict[str, Keys]:
    return {table: sorted_keys(parts) for table, parts in keys.items()}


def _write_keys(path: Path, keys: Mapping[str, Keys]) -> None:
    with atomic_write(path) as file:
        body = b"".join(of_table.astype("<i8").tobytes() for of_table in keys.values())
        sizes = {table: of_table.size for table, of_table in keys.items()}
        file.write(json.dumps({"keys": sizes, "crc32": zlib.crc32(body)}).encode() + b"\n" + body)


def _read_keys(path: Path) -> dict[str, Keys]:
    """Read a file of keys. Raise ModelFileError if it is damaged."""
    try:
        with open_regular(path) as file:
            header = json.loads(file.readline())
            body = file.read()
        if zlib.crc32(body) != header["crc32"]:
            raise ValueError("another checksum")
        every = np.frombuffer(body, "<i8").astype(np.int64)
        ends = np.cumsum(list(header["keys"].values()), dtype=np.int64)
        return dict(zip(header["keys"], np.split(every, ends[:-1]), strict=True))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelFileError(path, f"is not a file of an outbox's keys: {err}") from err
