"""Keep the model of the best epoch on disk while training goes on."""

import json
import math
from pathlib import Path

from serving.errors import OutputError
from serving.model.atomic import atomic_directory
from serving.model.strict_json import Fields, read_json
from training.command.checkpoint import load_model, save_model
from training.model.ctr_model import CtrModel
from training.model.trainer import EpochResult

_FILE = "best.json"


class BestEpoch:
    """The epoch with the smallest log loss of the evaluation, and its model in a folder.

    Attributes:
        epoch: its number; 0 before the first one.
    """

    def __init__(self, folder: Path, model: CtrModel, optimizer: str, *, resumes: bool) -> None:
        """Take the folder, which need not exist. With ``resumes``, begin with the model in it, if there is one.

        Raises:
            ConfigError: the folder's description is damaged.
        """
        self.epoch = 0
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._loss = math.inf
        if resumes and (folder / _FILE).exists():
            fields = Fields(read_json(folder / _FILE), str(folder / _FILE), "", ("epoch", "loss"))
            self.epoch, self._loss = fields.integer("epoch"), fields.number("loss")

    def offer(self, result: EpochResult) -> None:
        """Keep the model if this epoch is the best so far. The losses of all labels are added.

        Raises:
            OutputError: the disk refuses.
        """
        loss = sum(result.evaluation_loss)
        if loss >= self._loss:
            return
        self.epoch, self._loss = result.epoch, loss
        if not self._model.processes.is_first:
            self._model.send_rows()
            self._model.processes.wait()  # until the files are there
            return
        try:
            with atomic_directory(self._folder) as folder:
                save_model(folder, self._model, self._optimizer)
                (folder / _FILE).write_text(json.dumps({"epoch": self.epoch, "loss": loss}), encoding="utf-8")
        except OSError as err:
            raise OutputError(f"{self._folder}: cannot be written: {(err.strerror or str(err)).lower()}") from err
        self._model.processes.wait()

    def restore(self) -> None:
        """Put the model of the best epoch back."""
        load_model(self._folder, self._model, self._optimizer)
        self._model.processes.wait()  # the folder may be temporary
