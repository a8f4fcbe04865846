"""What a process knows of a table in Redis that others may load anew: it goes by the rows that it was started with."""

from collections.abc import Iterable, Mapping, Sequence

from serving.storage.redis.records import is_same_load
from serving.storage.redis.rows import RedisRows
from serving.storage.redis.sources import Writer, files_and_form, partitions_of


class Watch:
    """The records of the loads of a table's partitions, as one process expects them. Any thread may call any method.

    Attributes:
        records: by partition, as last seen; None where the table, or a part of it, has no record of the load that
            filled it. Replaced as a whole: readers take no lock.
        refilling: the name of the load that brings back rows, whose claims own changes leave alone.
        is_slowest: nothing behind Redis has the rows.
    """

    def __init__(self, rows: RedisRows, partitions: int) -> None:
        """Know none yet, of so many ``partitions``."""
        self.records: list[bytes] | None = None
        self.refilling = ""
        self.is_slowest = False
        self._rows = rows
        self._partitions = partitions

    def see(self, records: Sequence[bytes | None]) -> None:
        """Expect those ``records``, one by partition, from now on."""
        held = [record for record in records if record is not None]
        self.records = held if len(held) == len(records) else None

    def see_some(self, records: Mapping[int, bytes]) -> None:
        """Expect those ``records`` of some partitions from now on, if there were some of all."""
        if self.records is not None:
            self.records = [records.get(number, record) for number, record in enumerate(self.records)]

    def writer(self, number: int) -> Writer:
        """Who this process is where it changes rows of a partition."""
        records = self.records
        if records is None:
            return Writer("", self._partitions, self.refilling)
        return Writer(files_and_form(records[number]), self._partitions, self.refilling, self.is_slowest)

    def check(self, known: Sequence[bytes] | None, records: Mapping[int, bytes | None]) -> None:
        """Check that the rows beside ``records``, by partition, are those that this process looks for.

        Args:
            known: the ``records`` of this watch when the reading began.
            records: what lay beside the rows, None where nothing did.

        Raises:
            StoreError: another process has loaded a partition from other files, in another form, or into another number
                of partitions.
        """
        for number, record in records.items():
            if record is None:
                continue
            if known is None:
                self._check_partitions(record)
            elif record != known[number] and not is_same_load(record, known[number]):
                self._rows.check_source(record, known[number])
                self._check_partitions(record)

    def check_opened(self, records: Iterable[bytes | None]) -> bool:
        """Check ``records`` of a table that is opened; whether all tell how many partitions it has.

        Raises:
            StoreError: another number than this process goes by.
        """
        numbers = {None if record is None else partitions_of(record) for record in records}
        strange = numbers - {None, self._partitions}
        if strange:
            held = max(filter(None, strange))
            reason = f"it was loaded with {held}, this process goes by {self._partitions}"
            raise self._rows.error(f"num_partitions differs: {reason}")
        return None not in numbers

    def _check_partitions(self, record: bytes) -> None:
        number = partitions_of(record)
        if number not in (None, self._partitions):
            reason = f"another process has loaded it with num_partitions {number}; this one goes by {self._partitions}"
            raise self._rows.error(f"{reason}: let all who share it have the same")


def records_of_load(records: Sequence[bytes | None]) -> Sequence[bytes | None]:
    """Those of a table's first partitions that tell what it was loaded from: as many as the load says it has."""
    numbers = {partitions_of(record) for record in records if record is not None}
    return records[: numbers.pop()] if len(numbers) == 1 else records
