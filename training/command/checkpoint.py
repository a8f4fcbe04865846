"""Checkpoints: everything that a training needs to go on after it was killed.

A checkpoint is a folder ``step-<n>``, which is complete or absent:

- ``checkpoint.json``: the settings of the training, its position, the results of its epochs, and checksums;
- ``dense.model`` and ``dense.states``: the dense weights and their states; see ``training.model.parameter_files``;
- ``<t>.rows``: the rows of table t with their states; see ``training.row_file``.

A checkpoint of an earlier version has no checksums. Its tables are in ``<t>.sparse`` and ``<t>.states``, the files of a
session's parameters. The model of the best epoch is in a folder ``best``.
"""

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_directory, remove_killed_writes
from serving.model.dense_file import read_dense, write_dense
from serving.model.strict_json import Fields, describe, read_json, shorten
from training.checkpoint_file import read_checkpoint_file, write_checkpoint_file
from training.checkpoint_folder import CheckpointFolder
from training.model.ctr_model import CtrModel
from training.model.parameter_files import read_dense_states, read_table, write_dense_states
from training.model.trainer import Position
from training.row_file import ROWS_SUFFIX, read_rows, shape_of, write_rows

_EARLIER_BEST, _EARLIER_BEST_FILE = "best", "best.json"
#: Where the samples are. If their content is the same, they may have moved.
_PATHS = ("data", "eval_data", "columns")
_MEMBERS = ("settings", "position", "results")
_DENSE, _DENSE_STATES = "dense.model", "dense.states"
_LONG_TEXT, _BEFORE_DIFFERENCE = 60, 20  # of two long texts, a message has what follows this many equal characters


class Checkpoints:
    """The checkpoints of one training in a folder: the newest one, and the one of the best epoch."""

    def __init__(self, folder: Path, model: CtrModel, optimizer: str, settings: dict[str, Any]) -> None:
        """Take the model and its optimizer's name. ``settings`` is JSON that a resumed training must have too."""
        self._folder = folder
        self._checkpoints = CheckpointFolder(folder, "step")
        self._model = model
        self._optimizer = optimizer
        self._settings = settings

    def make_folder(self) -> None:
        """Make the folder if it is absent. Raise OutputError if the disk refuses."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise OutputError(f"{self._folder}: cannot be made: {(err.strerror or str(err)).lower()}") from err

    def check_empty(self) -> None:
        """Raise OutputError if the folder has a checkpoint."""
        found = self._checkpoints.newest()
        if found is not None:
            raise OutputError(f"{found}: a checkpoint of an earlier training; continue it with --resume or delete it")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out of the folder, and remove the unfinished files of a killed training.

        A checkpoint that a killed training was replacing gets its name back.

        Raises:
            OutputError: another training is in the folder.
            ConfigError: there is no folder.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as err:
            raise self._nothing() from err
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{self._folder}: another training writes its checkpoints here") from None
        try:
            self._checkpoints.remove_killed_writes()
            remove_killed_writes(self._folder, _EARLIER_BEST)
            yield
        finally:
            os.close(descriptor)

    def save(self, position: Position, results: list[dict[str, Any]], best_step: int) -> None:
        """Write a checkpoint, and then delete the earlier ones. Every process calls this, and the first one writes.

        Args:
            position: the position of the training.
            results: the results of its epochs.
            best_step: the checkpoint of this step is not deleted.

        Raises:
            OutputError: the disk refuses.
        """
        if not self._model.processes.is_first:
            self._model.send_rows()
            self._model.processes.wait("a checkpoint")
            return
        document = {"settings": self._settings, "position": dataclasses.asdict(position), "results": results}
        try:
            with atomic_directory(self._checkpoints.checkpoint(position.step)) as folder:
                self._write_model(folder)
                write_checkpoint_file(folder, document)
        except OSError as err:
            raise OutputError(
                f"{self._folder}: no checkpoint can be written: {(err.strerror or str(err)).lower()}"
            ) from err
        self._checkpoints.remove_earlier(position.step, kept=best_step)
        earlier_best = self._folder / _EARLIER_BEST
        if self._checkpoints.checkpoint(best_step).exists() and (earlier_best / _EARLIER_BEST_FILE).exists():
            shutil.rmtree(earlier_best, ignore_errors=True)
        self._model.processes.wait("a checkpoint")

    def load(self) -> tuple[Position, list[dict[str, Any]]]:
        """Read the newest checkpoint into the model, and return the position and the results of the epochs.

        Raises:
            ConfigError: there is no checkpoint, or it was made with other settings or data.
            ModelFileError: a file of the checkpoint is missing or damaged.
        """
        path = self._checkpoints.newest()
        if path is None:
            raise self._nothing()
        fields = read_checkpoint_file(path, _MEMBERS)
        found = fields.object("settings")
        has_same_content = found.value("content", None) == self._settings["content"]
        others = ("content", "graph", *(_PATHS if has_same_content else ()))
        plain = {name: value for name, value in self._settings.items() if name not in others}
        _check_same(found, plain)
        _check_content(found, self._settings["content"], self._settings)
        _check_same(found, {"graph": self._settings["graph"]})  # its losses know the mean of the labels, so it is last
        self._read_model(path)
        position = fields.object("position", tuple(field.name for field in dataclasses.fields(Position)))
        counts = {name: position.integer(name, minimum=0, maximum=2**62) for name in ("epoch", "batches", "step")}
        if not isinstance(results := fields.value("results"), list):
            raise fields.error(f"expected a list, got {describe(results)}", "results")
        return Position(**{name: position.value(name) for name in position} | counts), results

    def load_model(self, step: int, epoch: int) -> None:
        """Read the model that was saved at a step, the last one of an epoch.

        Raises:
            ConfigError: there is no such checkpoint.
            ModelFileError: a file of the checkpoint is missing or damaged.
        """
        self._read_model(self.model_folder(step, epoch))

    def model_folder(self, step: int, epoch: int) -> Path:
        """Return the folder with the model that was saved at a step, the last one of an epoch.

        Raises:
            ConfigError: there is no such checkpoint.
            ModelFileError: a file of the checkpoint is missing or damaged.
        """
        path, earlier = self._checkpoints.checkpoint(step), self._folder / _EARLIER_BEST
        description = earlier / _EARLIER_BEST_FILE
        if not path.exists() and description.exists() and read_json(description).get("epoch") == epoch:
            return earlier
        read_checkpoint_file(path, _MEMBERS)
        return path

    def _write_model(self, folder: Path) -> None:
        """Write the weights, the tables and the optimizer's states into an empty folder, in the first process."""
        model, graph = self._model, self._model.graph
        write_dense(folder / _DENSE, graph, model.dense_weights())
        write_dense_states(folder / _DENSE_STATES, graph, model.dense_states(), self._optimizer, model.step)
        for t, table in enumerate(model.tables):
            with (folder / f"{t}{ROWS_SUFFIX}").open("wb") as file:
                write_rows(file, *shape_of(table.native), model.dump(t))

    def _read_model(self, folder: Path) -> None:
        model, graph = self._model, self._model.graph
        model.load_dense_weights(read_dense(folder / _DENSE, graph))
        model.step = read_dense_states(folder / _DENSE_STATES, graph, model.dense_states(), self._optimizer)
        for t, (embedding, table) in enumerate(zip(graph.embeddings, model.tables, strict=True)):
            table.clear()
            if (folder / f"{t}.sparse").exists():  # of an earlier version
                parts = read_table(folder / f"{t}.sparse", folder / f"{t}.states", embedding, "I64", table)
            else:
                parts = read_rows(folder / f"{t}{ROWS_SUFFIX}", *shape_of(table.native))
            for rows in parts:
                model.load(t, rows)

    def _nothing(self) -> ConfigError:
        return ConfigError(str(self._folder), "", "no checkpoint, so nothing can be resumed")


def _check_same(found: Fields, settings: Mapping[str, Any]) -> None:
    """Refuse settings that have changed."""
    for name, value in settings.items():
        if (before := found.value(name, None)) != value:
            place, was, now = _difference(name, before, value)
            raise found.error(f"the checkpoint was made with {was}, and now it is {now}", place)


def _difference(place: str, was: Any, now: Any) -> tuple[str, str, str]:
    """Return where two JSON values first differ, and both for a message."""
    if isinstance(was, dict) and isinstance(now, dict):
        name = next(name for name in was | now if name not in was or name not in now or was[name] != now[name])
        place = f"{place}.{name}"
        if name in was and name in now:
            return _difference(place, was[name], now[name])
        old, new = (shorten(json.dumps(one[name])) if name in one else "none" for one in (was, now))
        return place, old, new
    if isinstance(was, list) and isinstance(now, list):
        pairs = enumerate(zip(was, now, strict=False))
        number = next((number for number, (old, new) in pairs if old != new), None)
        if number is not None:
            return _difference(f"{place}[{number}]", was[number], now[number])
        return place, f"{len(was):,} entries", f"{len(now):,}"
    texts = [json.dumps(value) for value in (was, now)]
    same = sum(takewhile(bool, map(eq, *texts)))
    begin = max(same - _BEFORE_DIFFERENCE, 0) if max(map(len, texts)) > _LONG_TEXT else 0
    old, new = (shorten(f"{'...' * bool(begin)}{text[begin:]}") for text in texts)
    return place, old, new


def _check_content(found: Fields, now: dict[str, str], settings: dict[str, Any]) -> None:
    """Refuse samples that have changed. A checkpoint of an earlier version does not know their content."""
    for name, expected in found.value("content", now).items():
        if now[name] != expected:
            path = settings[name] or settings["data"] or "the generated samples"
            reason = (
                f"{path} has changed since the checkpoint: expected samples with CRC-32 {expected}, got {now[name]}"
            )
            raise found.error(reason, f"content.{name}")
