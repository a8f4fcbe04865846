"""Training or evaluation data of a session, batch by batch."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from serving.errors import ConfigError
from training.data.opening import read_hugectr
from training.data.streams import batches_of, read_ahead
from training.errors import DataError, SessionError
from training.model.document import TrainingDocument
from training.model.sample_check import check_samples_fit
from training.samples import Samples

_log = logging.getLogger(__name__)


class DataReader:
    """Reads batches ahead in a thread. Its methods are called from one thread.

    In epoch mode the data ends. Otherwise it begins again, and a batch may hold the last samples and the first ones.
    """

    key_dtype: ClassVar[DTypeLike]

    def __init__(
        self, document: TrainingDocument, source: str | None, batch_size: int, *, repeats: bool, keeps_rest: bool
    ) -> None:
        """Open nothing yet.

        Args:
            document: says what the files look like.
            source: the file or file list; None: only ``set_source`` names one.
            batch_size: the samples of a batch.
            repeats: non-epoch mode.
            keeps_rest: in epoch mode, whether the last batch may be smaller. Otherwise it is left out.

        Raises:
            ConfigError: the format has keys of another type.
        """
        key_type = {"Raw": np.uint32, "Parquet": np.int64}.get(document.data.format, self.key_dtype)
        if key_type is not self.key_dtype:
            reason = f"keys of {document.data.format} files are {np.dtype(key_type)}, so i64_input_key is wrong"
            raise ConfigError(document.graph.source, "layers[0].format", reason)
        self._document = document
        self._source = source
        self._batch_size = batch_size
        self._repeats = repeats
        self._keeps_rest = keeps_rest
        self._batches: Iterator[Samples] | None = None
        self.rewind()

    @property
    def source(self) -> str | None:
        """The file or file list; None: there is none yet."""
        return self._source

    def set_source(self, file_name: str = "") -> None:
        """Read another file or file list from its beginning, or the current one again. Only in epoch mode.

        Args:
            file_name: the file or file list; "": the current one.

        Raises:
            SessionError: the mode is non-epoch.
            ConfigError: there is no current file.
            DataError: there is no such file.
        """
        if self._repeats:
            raise SessionError("set_source is for epoch mode, so repeat_dataset must be False")
        if not file_name and self._source is None:
            raise ConfigError(self._document.graph.source, "layers[0]", "names no file, so set_source needs a name")
        if file_name and not Path(file_name).exists():
            raise DataError(file_name, "no such file or directory")
        self._source = file_name or self._source
        self.rewind()

    def start(self) -> None:
        """Begin to read, in non-epoch mode. A second call does nothing."""
        if self._batches is None:
            self._batches = self._read()

    def rewind(self) -> None:
        """Read from the beginning again, in epoch mode. Otherwise do nothing."""
        if not self._repeats:
            self._batches = self._read()

    def next_batch(self) -> Samples | None:
        """Return the next batch. None: the data has ended, or there is no source.

        Raises:
            SessionError: in non-epoch mode, reading has not started; or an earlier call failed.
            ConfigError: the data does not fit the graph.
            DataError: a file is missing, cut short or damaged.
        """
        if self._source is None:
            return None
        if self._batches is None:
            raise SessionError(
                "call start_data_reading first" if self._repeats else f"reading {self._source} failed; call set_source"
            )
        try:
            samples = next(self._batches, None)
            if samples is not None:
                check_samples_fit(self._document.graph, samples)
        except BaseException:
            self._batches = None
            raise
        return samples

    def _read(self) -> Iterator[Samples]:
        keeps_rest = self._keeps_rest and not self._repeats
        return read_ahead(batches_of(self._parts(), self._batch_size, keeps_rest=keeps_rest))

    def _parts(self) -> Iterator[Samples]:
        assert self._source is not None
        while True:
            samples = 0
            for part in read_hugectr(self._source, self._document, self.key_dtype, self._batch_size):
                samples += len(part)
                yield part
            if not samples:
                raise DataError(self._source, "no samples")
            if not self._repeats:
                if samples < self._batch_size and not self._keeps_rest:
                    left_out = "epoch mode leaves out an incomplete batch, so nothing is trained"
                    _log.warning(
                        "%s: %d samples, but a batch has %d: %s", self._source, samples, self._batch_size, left_out
                    )
                return


class DataReader32(DataReader):
    """A reader of uint32 keys."""

    key_dtype = np.uint32


class DataReader64(DataReader):
    """A reader of int64 keys."""

    key_dtype = np.int64
