"""The committed results, and the record of each case."""

import json

from benchmarks.report import Record


class Results:
    """The files of a folder of results, read when they are asked for."""

    def __init__(self, folder):
        self._folder = folder
        self._files = {}
        self.absent = []

    def records_of(self, row):
        """One record per case of the row, None where there is none; ``absent`` names these.

        Raises:
            ValueError: more than one record is of a case, or a record has another unit than the row.
        """
        return [self._record(row, case) for case in row.cases]

    def runs(self):
        """Pairs (file name, hardware) of the files that were read."""
        return [(name, document["hardware"]) for name, document in sorted(self._files.items()) if document]

    def _record(self, row, case):
        records = [Record(**fields) for fields in self._document(row.source).get("records", [])]
        found = [record for record in records if record.name == row.name and case.items() <= record.params.items()]
        words = f"{row.name} {' '.join(f'{key}={value}' for key, value in case.items())}".strip()
        if not found:
            self.absent.append(f"`{words}` in {row.source}")
            return None
        if len(found) > 1:
            raise ValueError(f"{row.source}: expected one record of {words}, found {len(found)}")
        if found[0].unit != row.unit.of:
            raise ValueError(f"{row.source}: expected {words} in {row.unit.of!r}, found {found[0].unit!r}")
        return found[0]

    def _document(self, name):
        if name not in self._files:
            path = self._folder / name
            self._files[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return self._files[name]
