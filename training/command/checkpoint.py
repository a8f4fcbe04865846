"""Checkpoints: everything that a training needs to go on after it was killed.

A checkpoint is a folder ``step-<n>``, which is complete or absent. It has the files of
``training.model.parameter_files`` and ``checkpoint.json``: the settings of the training, its position, and the results
of its epochs.
"""

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_directory
from serving.model.dense_file import read_dense, write_dense
from serving.model.strict_json import Fields, read_json
from training.model.ctr_model import CtrModel
from training.model.parameter_files import read_dense_states, read_table, write_dense_states, write_table
from training.model.trainer import Position

_FILE = "checkpoint.json"


class Checkpoints:
    """The checkpoints of one training in a folder. Only the newest is kept."""

    def __init__(self, folder: Path, model: CtrModel, optimizer: str, settings: dict[str, Any]) -> None:
        """Take the model and its optimizer's name. ``settings`` is JSON that a resumed training must have too."""
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._settings = settings

    def check_empty(self) -> None:
        """Make the folder. Raise OutputError if it has a checkpoint, or cannot be made."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise OutputError(f"{self._folder}: cannot be made: {(err.strerror or str(err)).lower()}") from err
        found = self._newest()
        if found is not None:
            raise OutputError(f"{found}: a checkpoint of an earlier training; continue it with --resume or delete it")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out of the folder. Raise OutputError if one is in it, ConfigError without a folder."""
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
            yield
        finally:
            os.close(descriptor)

    def save(self, position: Position, results: list[dict[str, Any]]) -> None:
        """Write a checkpoint, and then delete the earlier ones. Of several processes, the first writes.

        Raises:
            OutputError: the disk refuses.
        """
        if not self._model.processes.is_first:
            self._model.send_rows()
            self._model.processes.wait()  # until the checkpoint is there
            return
        document = {"settings": self._settings, "position": dataclasses.asdict(position), "results": results}
        try:
            with atomic_directory(self._folder / f"step-{position.step}") as folder:
                save_model(folder, self._model, self._optimizer)
                (folder / _FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as err:
            raise OutputError(
                f"{self._folder}: no checkpoint can be written: {(err.strerror or str(err)).lower()}"
            ) from err
        for step, path in self._all():
            if step < position.step:
                shutil.rmtree(path, ignore_errors=True)
        self._model.processes.wait()

    def load(self) -> tuple[Position, list[dict[str, Any]]]:
        """Read the newest checkpoint into the model, and return the position and the results of the epochs.

        Raises:
            ConfigError: there is no checkpoint, or it was made with other settings.
            ModelFileError: a file of the checkpoint is missing or damaged.
        """
        path = self._newest()
        if path is None:
            raise self._nothing()
        source = str(path / _FILE)
        fields = Fields(read_json(source), source, "", ("settings", "position", "results"))
        found = fields.object("settings")
        for name, value in self._settings.items():
            if found.value(name) != value:
                shown = "another value" if name == "graph" else json.dumps(found.value(name))
                raise found.error(f"the checkpoint was made with {shown}, and now it is {_shown(name, value)}", name)
        load_model(path, self._model, self._optimizer)
        position = fields.object("position", tuple(field.name for field in dataclasses.fields(Position)))
        return Position(**{name: position.value(name) for name in position}), fields.value("results")

    def _nothing(self) -> ConfigError:
        return ConfigError(str(self._folder), "", "no checkpoint, so nothing can be resumed")

    def _all(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of all complete checkpoints."""
        paths = [path.parent for path in self._folder.glob(f"step-*/{_FILE}")]
        steps = [(path.name.removeprefix("step-"), path) for path in paths]
        return [(int(step), path) for step, path in steps if step.isdecimal()]

    def _newest(self) -> Path | None:
        return max(self._all(), default=(0, None))[1]


def save_model(folder: Path, model: CtrModel, optimizer: str) -> None:
    """Write the weights, the tables and the optimizer's states into an empty folder, in the first process.

    Raises:
        ModelFileError: the disk refuses.
    """
    graph = model.graph
    write_dense(folder / "dense.model", graph, model.dense_weights())
    write_dense_states(folder / "dense.states", graph, model.dense_states(), optimizer, model.step)
    for t, embedding in enumerate(graph.embeddings):
        write_table(folder / f"{t}.sparse", folder / f"{t}.states", embedding, "I64", model.dump(t))


def load_model(folder: Path, model: CtrModel, optimizer: str) -> None:
    """Undo ``save_model``.

    Raises:
        ModelFileError: a file is missing or damaged, or does not fit the model.
    """
    graph = model.graph
    model.load_dense_weights(read_dense(folder / "dense.model", graph))
    model.step = read_dense_states(folder / "dense.states", graph, model.dense_states(), optimizer)
    for t, (embedding, table) in enumerate(zip(graph.embeddings, model.tables, strict=True)):
        table.clear()
        paths = (folder / f"{t}.sparse", folder / f"{t}.states")
        for rows in read_table(*paths, embedding, "I64", table):
            model.load(t, rows)


def _shown(name: str, value: Any) -> str:
    return "this graph" if name == "graph" else json.dumps(value)
