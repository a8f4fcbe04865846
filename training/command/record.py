"""``training.json``: how a version was trained. It is among the version's files."""

import argparse
import hashlib
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import ConfigError
from serving.model.manifest import sha256_of
from serving.model.regular_file import is_absent
from serving.model.strict_json import Fields, read_json
from serving.model.version_writer import TRAINING_FILE

if TYPE_CHECKING:
    from training.model.document import TrainingDocument  # which needs PyTorch

_FORMAT = 1
_OF_EPOCH = ("epoch", "loss", "evaluation_loss", "calibration", "seconds")
_PACKAGES = ("hotrow", "numpy", "pyarrow", "torch")
#: Arguments that do not affect the model. The address of a log may contain a password.
_LEFT_OUT = ("command", "run", "error_code", "describe", "metrics", "plot", "publish", "publish_settings", "resume")


class TrainingRecord:
    """What a ``training.json`` says.

    Attributes:
        name: the version, for people: ``clicks/1``.
        arguments: those of ``hotrow train``.
        data: for each file of data its rows and its SHA-256.
        versions: of Python and of the packages.
        epochs: the figures of each epoch, as ``--metrics`` writes them.
        epoch: the epoch whose model the version has.
        graph: the JSON of the training graph.
    """

    def __init__(self, folder: Path) -> None:
        """Read the record of a version, or of the newest version of a model.

        Raises:
            ConfigError: there is no record, or the file is not a record.
        """
        versions = [entry for entry in folder.glob("*") if entry.name.isdecimal()] if folder.is_dir() else []
        if is_absent(folder / TRAINING_FILE) and versions:
            folder = max(versions, key=lambda entry: int(entry.name))
        if is_absent(folder):
            raise ConfigError(str(folder), "", "no such folder")
        if is_absent(folder / TRAINING_FILE):
            reason = f"there is no {TRAINING_FILE}; only `hotrow train` writes this file"
            raise ConfigError(str(folder), "", reason)
        self.folder = folder
        fields = Fields(read_json(folder / TRAINING_FILE), str(folder / TRAINING_FILE), "")
        self.name = f"{folder.resolve().parent.name}/{folder.resolve().name}"
        self.arguments: dict[str, Any] = _members(fields.object("arguments"))
        self.data: dict[str, Any] = _members(fields.object("data"))
        self.versions: dict[str, Any] = _members(fields.object("versions"))
        self.epochs = [of_this_version(_members(epoch)) for epoch in fields.objects("epochs")]
        for number, epoch in enumerate(self.epochs):
            for name in _OF_EPOCH:
                Fields(epoch, fields.source, f"epochs[{number}]").value(name)
        self.epoch = fields.integer("epoch", maximum=len(self.epochs))
        self.graph: dict[str, Any] = _members(fields.object("graph"))

    @property
    def result(self) -> dict[str, Any]:
        """The figures of the epoch whose model the version has."""
        return self.epochs[self.epoch - 1]


def of_this_version(epoch: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an epoch with the loss of the evaluation, which earlier versions called the log loss."""
    return epoch if "log_loss" not in epoch else {"evaluation_loss": epoch["log_loss"], **epoch}


def _members(fields: Fields) -> dict[str, Any]:
    return {name: fields.value(name) for name in fields}


def record_of(
    options: argparse.Namespace,
    document: "TrainingDocument",
    data: dict[str, Any],
    epochs: Sequence[dict[str, Any]],
    epoch: int,
) -> dict[str, Any]:
    """Return the content of a ``training.json``; see ``TrainingRecord``."""
    arguments = {name: value for name, value in vars(options).items() if value is not None and name not in _LEFT_OUT}
    return {
        "format": _FORMAT,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "data": data,
        "versions": {"python": platform.python_version(), **_versions()},
        "epoch": epoch,
        "epochs": list(epochs),
        "graph": document.document,
    }


def digest_of_data(path: Path) -> str:
    """Return the SHA-256 of a file; of a folder, that of what ``sha256sum`` prints for its files."""
    if not path.is_dir():
        return sha256_of(path)
    files = sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name[0] not in "._")
    lines = "".join(f"{sha256_of(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
