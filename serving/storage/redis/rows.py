"""Keys and rows of one table as they lie in Redis, in whichever layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kernels.errors import ReservedKeyError
from kernels.host import KeyIndex, RowDtype
from serving.errors import StoreError, StoreLostError
from serving.storage.hps_layout import keys_of
from serving.storage.redis.commands import encoded_fields, encoded_rows
from serving.storage.redis.partitions import Partitions
from serving.storage.redis.sources import FORMS, files_and_form
from serving.storage.row_codec import RowCodec
from serving.storage.store import CHANGED, Keys, Mask, TableSpec, Vectors

STORE_NAME = "redis"
# What is sent or received before the time-out starts anew.
MOST_ROUND_BYTES = 4 * 2**20


class RedisRows:
    """How a table's keys and rows are written. Every method may be called from any thread.

    Attributes:
        spec: the table.
        codec: the form of its rows.
    """

    def __init__(self, spec: TableSpec, row_dtype: RowDtype | None, max_batch_size: int) -> None:
        """Take the table, the form (see ``RowCodec``) and the most keys of one round of commands."""
        self.spec = spec
        self.codec = RowCodec(STORE_NAME, spec, row_dtype)
        self._max_batch_size = max_batch_size
        self._form = "" if self.codec.row_dtype == "fp32" else f":{self.codec.row_dtype}"

    def rounds(self, count: int, bytes_per_key: int) -> Iterator[slice]:
        """The parts of ``count`` keys that are sent at once."""
        rows = max(min(self._max_batch_size, MOST_ROUND_BYTES // bytes_per_key), 1)
        return (slice(start, start + rows) for start in range(0, count, rows))

    @property
    def field_bytes(self) -> int:
        """The size of a key as a word of a command."""
        return self.spec.key_bytes + 6

    def words(self, partitions: Partitions, keys: Keys, rows: Vectors) -> list[tuple[int, NDArray[np.uint8]]]:
        """Rows as words of commands: for each its partition, and uint8[N, ...], each a key and its row's value."""
        order, groups = partitions.groups(keys, self._max_batch_size)
        words = encoded_rows(keys[order], self.codec.encode(keys[order], rows[order]), self.spec.key_bytes)
        return [(group.partition, words[group.begin : group.end]) for group in groups]

    def fields(self, partitions: Partitions, keys: Keys) -> list[tuple[int, NDArray[np.uint8]]]:
        """Keys as words of commands: for each its partition, and uint8[N, ...]."""
        order, groups = partitions.groups(keys, self._max_batch_size)
        words = encoded_fields(keys[order], self.spec.key_bytes)
        return [(group.partition, words[group.begin : group.end]) for group in groups]

    def with_form(self, digest: str) -> str:
        """What the record of a load says of files with ``digest``: rows of another form are another load."""
        files = digest.removesuffix(CHANGED)
        return files + self._form + digest[len(files) :]

    def loaded_from(self, records: Sequence[bytes | None]) -> str | None:
        """The digest that all ``records``, ``<with_form(digest)> <load>``, agree on; None where one is absent."""
        said = {None if record is None else record.rpartition(b" ")[0].decode() for record in records}
        record = said.pop()
        return None if said or record is None else self._without_form(record)

    def check_source(self, record: bytes, known: bytes) -> None:
        """Check that rows come from the files of those that this process knows, and for which its network was trained.

        Raises:
            StoreError: they do not.
        """
        source, expected = files_and_form(record), files_and_form(known)
        if source != expected:
            reason = f"another process has loaded it from other files, {source}; this one goes by {expected}: load "
            raise self.error(
                f"{reason}the model again with the files that are to be served, or give it a name of its own"
            )

    def taker(self, out: Vectors, at: NDArray[np.intp]) -> Callable[[NDArray[np.void]], None]:
        """What values without a gap, void[N], are to be given to: it makes them rows ``at`` of ``out``."""
        if self.codec.row_dtype == "fp32":
            return partial(_put, out.view(f"V{self.codec.value_bytes}").reshape(-1), at)
        return lambda values: _put(out, at, self.codec.decode(values.tobytes()))

    def fill(self, keys: Keys, values: Sequence[bytes | None], out: Vectors, at: NDArray[np.intp]) -> Mask:
        """Make ``values``, with gaps, rows ``at`` of ``out``, zeros where there is none; returns where there are.

        Raises:
            StoreError: a value is of another size; the message names its key.
        """
        present = np.fromiter((value is not None for value in values), dtype=np.bool_, count=at.size)
        held = [value for value in values if value is not None]
        self._check_values(keys[at[present]], held)
        out[at] = 0.0
        out[at[present]] = self.codec.decode(b"".join(held))
        return present

    def decoded(self, held: Mapping[bytes, bytes]) -> tuple[Keys, Vectors]:
        """Raw keys and values as keys and rows. See ``fill`` for the errors."""
        raw_keys, values = list(held), list(held.values())
        strange = next((key for key in raw_keys if len(key) != self.spec.key_bytes), None)
        if strange is not None:
            raise self.error(f"holds a key of {len(strange)} bytes, expected {self.spec.key_bytes}")
        keys = keys_of(raw_keys, self.spec.key_bytes)
        self._check_values(keys, values)
        return keys, self.codec.decode(b"".join(values))

    def batches(
        self, scanned: Iterator[Mapping[bytes, bytes]], batch_rows: int, seen: KeyIndex
    ) -> Iterator[tuple[Keys, Vectors]]:
        """What was ``scanned``, in batches, without the keys of ``seen``, to which all are added."""
        rows: dict[bytes, bytes] = {}
        for some in scanned:
            rows |= self._unseen(some, seen)
            while len(rows) >= batch_rows:
                listed = list(rows.items())
                yield self.decoded(dict(listed[:batch_rows]))
                rows = dict(listed[batch_rows:])
        if rows:
            yield self.decoded(rows)

    def are_new(self, keys: Keys, seen: KeyIndex) -> Mask:
        """Which of int64[N] ``keys`` are not in ``seen``, to which they are added.

        Raises:
            StoreError: one is reserved.
        """
        before = len(seen)
        try:
            is_new: Mask = seen.find_or_insert(keys) >= before
        except ReservedKeyError as err:
            raise self.error(str(err)) from err
        return is_new

    def error(self, reason: str) -> StoreError:
        """An error that names the table."""
        return StoreError(STORE_NAME, self.spec.name, reason)

    def lost(self, reason: str) -> StoreLostError:
        """An error that names the table, of which rows are gone."""
        return StoreLostError(STORE_NAME, self.spec.name, reason)

    def _without_form(self, record: str) -> str | None:
        """The digest of which ``with_form`` makes ``record``; None where that is of another form."""
        digest = record.removesuffix(CHANGED)
        if next((form for form in FORMS if digest.endswith(form)), "") != self._form:
            return None
        return digest.removesuffix(self._form) + record[len(digest) :]

    def _unseen(self, rows: Mapping[bytes, bytes], seen: KeyIndex) -> Mapping[bytes, bytes]:
        is_new = self.are_new(self.decoded(rows)[0], seen)
        if is_new.all():
            return rows
        return {key: row for (key, row), new in zip(rows.items(), is_new, strict=True) if new}

    def _check_values(self, keys: Keys, values: Sequence[bytes]) -> None:
        value_bytes = self.codec.value_bytes
        if set(map(len, values)) - {value_bytes}:
            at = next(place for place, value in enumerate(values) if len(value) != value_bytes)
            reason = f"the value of key {keys[at]} has {len(values[at])} bytes, {self.codec.expectation()}"
            raise self.error(reason)


def _put(out: NDArray[np.generic], at: NDArray[np.intp], values: NDArray[np.generic]) -> None:
    out[at] = values
