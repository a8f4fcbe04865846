"""Logs a sample of the requests of a server while it serves."""

import errno
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakKeyDictionary

from serving.batch import JoinedKeys
from serving.errors import ConfigError, MissingExtraError, OutputError, RequestError, did_you_mean
from serving.metrics import MetricSample
from serving.request_log.files import LogStream, finish_streams, has_room
from serving.request_log.records import Entry, RecordForm, takes_raw_features
from serving.request_log.writer import SampleWriter
from serving.session import InferenceSession, ModelSession

_log = logging.getLogger("hotrow.request_log")
#: A stream that is larger or older becomes a Parquet file.
_MOST_STREAM_BYTES, _MOST_STREAM_AGE_S = 64 << 20, 3600.0
_TIDY_AGAIN_S = 60.0  # after a fault
_OPTION, _WITHOUT = "--log-requests", "--log-without"


class RequestLog(SampleWriter[Entry]):
    """Logs a random share of the requests to models with a dense network. Any thread may call ``log``."""

    def __init__(
        self, folder: Path, share: float, max_bytes: int, without: Collection[str] = (), workers: int = 1
    ) -> None:
        """Begin to log.

        Args:
            folder: of the log; each model has a folder in it.
            share: of the requests that are logged.
            max_bytes: of all files of the log. The oldest are deleted first.
            without: the features that are left out.
            workers: how many processes write to the log.

        Raises:
            MissingExtraError: pyarrow is not installed.
            OutputError: the folder cannot be written.
        """
        try:
            import_module("pyarrow.parquet")
        except ImportError as err:
            raise MissingExtraError("pyarrow", "features", _OPTION) from err
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as err:
            raise OutputError(f"{_OPTION}: {folder} cannot be written: {err.strerror}") from err
        self._folder = folder
        self._max_bytes = max_bytes
        self._open_bytes = max_bytes // (4 * workers)  # a stream counts twice, and half is for Parquet files
        self._without = frozenset(without)
        self._forms: WeakKeyDictionary[InferenceSession, dict[bool, RecordForm]] = WeakKeyDictionary()
        self._streams: dict[tuple[str, Any], LogStream] = {}  # by folder and schema
        self._tidy_due_s = 0.0  # when closed streams are converted to Parquet, by ``time.monotonic``
        self._cannot_tidy = False
        super().__init__(_log, "logged", share)

    def check(self, sessions: Iterable[ModelSession]) -> None:
        """Check that a model has each feature that is left out.

        Raises:
            ConfigError: no model has a feature of this name, which may be misspelt.
        """
        known: dict[str, None] = {}
        for session in sessions:
            if isinstance(session, InferenceSession):
                known |= dict.fromkeys(name for form in self._forms_of(session).values() for name in form.columns)
            else:
                _log.warning("model %s has no dense network, so its requests are not logged", session.config.name)
        if self._without and not known:
            _log.warning("no model is loaded yet, so the names of %s cannot be checked", _WITHOUT)
            return
        for name in sorted(self._without - known.keys()):
            reason = f"no served model has the feature {name[:64]!r}{did_you_mean(name, known)}"
            raise ConfigError(_WITHOUT, "", reason)

    def log(self, session: ModelSession, question: Any, answer: Any, request_id: str) -> None:
        """Log a request and its answer, or leave it out."""
        if not self.is_drawn() or not isinstance(session, InferenceSession):
            return
        try:
            batch = question.expanded()
        except RequestError:  # too many values
            self.drop()
            return
        entry = Entry(session, batch, answer, request_id, time.time_ns() // 1000)
        self.add(entry, entry.size_bytes)

    def readings(self) -> Iterator[MetricSample]:
        """Return how many requests were logged, and how many of the sample were dropped."""
        for state, count in zip(("written", "dropped"), self.counts, strict=True):
            help_text = "Sampled requests that the request log has written, and dropped."
            yield MetricSample("hotrow_logged_requests", help_text, (("state", state),), count)

    @property
    def _place(self) -> Path:
        return self._folder

    def _writes(self, entries: Sequence[Entry]) -> Iterable[tuple[Callable[[], None], int]]:
        groups: dict[tuple[InferenceSession, bool], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((entry.session, isinstance(entry.batch.sent, JoinedKeys)), []).append(entry)
        return [(partial(self._write, *group, of_group), len(of_group)) for group, of_group in groups.items()]

    def _tidy(self, is_end: bool) -> None:
        """Convert streams to Parquet if they are large or old, and all at the end."""
        total_bytes = sum(stream.size_bytes for stream in self._streams.values())
        oldest_s = time.monotonic() - _MOST_STREAM_AGE_S
        due = [
            key
            for key, stream in self._streams.items()
            if is_end
            or total_bytes > self._open_bytes
            or stream.size_bytes > _MOST_STREAM_BYTES
            or stream.opened_s < oldest_s
        ]
        self._close_streams(due)
        if is_end or self._tidy_due_s <= time.monotonic():
            self._convert()

    def _close_streams(self, keys: Iterable[tuple[str, Any]]) -> None:
        for key in keys:
            self._streams.pop(key).close()
            self._tidy_due_s = 0.0

    def _convert(self) -> None:
        try:
            finish_streams(self._folder, self._max_bytes)
        except OSError as err:
            if not self._cannot_tidy:
                _log.error("%s: cannot convert a stream to Parquet yet: %s", self._folder, err.strerror or err)
            self._cannot_tidy, self._tidy_due_s = True, time.monotonic() + _TIDY_AGAIN_S
        else:
            self._cannot_tidy, self._tidy_due_s = False, math.inf

    def _write(self, session: InferenceSession, has_keys: bool, entries: list[Entry]) -> None:
        form = self._forms_of(session)[has_keys]
        message = form.record_batch(entries).serialize()
        key = form.folder, form.schema
        if key in self._streams and not self._streams[key].is_there:
            self._streams.pop(key).close()
        is_new = key not in self._streams
        needed_bytes = message.size + is_new * form.schema.serialize().size
        if not has_room(self._folder, self._max_bytes, 2 * needed_bytes):  # for the Parquet file, too
            reason = f"{needed_bytes:,} bytes and their Parquet file do not fit into the {self._max_bytes:,} of the log"
            raise OSError(errno.EDQUOT, reason)
        if is_new:
            self._streams[key] = LogStream(self._folder / form.folder, form.schema)
        self._streams[key].append(message)

    def _forms_of(self, session: InferenceSession) -> dict[bool, RecordForm]:
        """Return the form of requests with raw features, if the model takes them, and that of requests with keys."""
        forms = self._forms.get(session)
        if forms is None:
            kinds = (False, True) if takes_raw_features(session) else (True,)
            forms = {has_keys: RecordForm(session, has_keys, self._without) for has_keys in kinds}
            self._forms[session] = forms
        return forms
