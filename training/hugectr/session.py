"""Training step by step, with HugeCTR's methods."""

import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write, sync, temporary_directory
from serving.model.dense_file import read_dense, write_dense
from serving.model.sparse_file import KeyType
from training.arguments import is_whole
from training.errors import DivergedError, SessionError
from training.hugectr.data_reader import DataReader, DataReader32, DataReader64
from training.hugectr.model_oversubscriber import ModelOversubscriber
from training.hugectr.solver import SolverParser
from training.model.ctr_model import CtrModel
from training.model.document import TrainingDocument, read_document
from training.model.parameter_files import read_dense_states, read_table, write_dense_states, write_table
from training.processes import Processes, start_processes
from training.publishing import Publisher
from training.row_file import TableRows

_log = logging.getLogger(__name__)
Metrics = list[tuple[str, float]]


class Session:
    """The tables, the dense network and the data of one training. Not thread-safe.

    Under torchrun, every process makes the same calls. Each works on its share of every batch, and the first writes.
    """

    def __init__(
        self,
        solver_config: SolverParser,
        config_file: str | PathLike[str],
        use_model_oversubscriber: bool = False,
        temp_embedding_dir: str | PathLike[str] = "",
    ) -> None:
        """Read the document, and make the model or load it from the solver's files.

        Args:
            solver_config: from ``solver_parser_helper``.
            config_file: a JSON file with the clauses ``layers`` and ``optimizer``.
            use_model_oversubscriber: keep the rows of past keysets on disk, see ``ModelOversubscriber``. Only in epoch
                mode.
            temp_embedding_dir: the folder for these rows; "": the working directory.

        Raises:
            ConfigError: an argument, or the document, cannot be used. The oversubscriber needs one process, and
                tables in which a step moves only the rows that it reads.
            ModelFileError: a file of the solver is missing or damaged, or does not fit the document.
            MissingExtraError: the oversubscriber needs rocksdict, which is not installed.
        """
        if not isinstance(solver_config, SolverParser):
            reason = f"expected what solver_parser_helper returned, got {type(solver_config).__name__}"
            raise ConfigError("Session", "solver_config", reason)
        if use_model_oversubscriber and solver_config.repeat_dataset:
            raise ConfigError("Session", "use_model_oversubscriber", "needs epoch mode, so repeat_dataset False")
        self._solver = solver_config
        self._document = read_document(Path(config_file))
        document, is_epoch_mode = self._document, not solver_config.repeat_dataset
        reader_type = DataReader64 if solver_config.i64_input_key else DataReader32
        self._training_data: DataReader = reader_type(
            document, document.data.source, solver_config.batchsize, repeats=not is_epoch_mode, keeps_rest=False
        )
        self._evaluation_data: DataReader = reader_type(
            document,
            document.data.eval_source,
            solver_config.batchsize_eval,
            repeats=not is_epoch_mode,
            keeps_rest=True,
        )
        self._processes = start_processes()
        if use_model_oversubscriber:
            _check_oversubscriber(document, self._processes)
        if self._processes.is_first:
            _log.warning("training runs on the CPU in float32: vvgpu, mixed precision and CUDA graphs have no effect")
        self._model = CtrModel(
            document.graph,
            seed=solver_config.seed,
            rule=document.rule,
            tables=document.tables,
            label_weights=document.label_weights,
            regularizers=document.regularizers,
            processes=self._processes,
        )
        self._oversubscriber = (
            ModelOversubscriber(self._model, temp_embedding_dir or ".", reader_type.key_dtype)
            if use_model_oversubscriber
            else None
        )
        self._learning_rate = document.schedule.base
        self._loss: float | None = None
        self._logits: list[NDArray[np.float32]] = []  # of the evaluation batches since the last metrics
        self._labels: list[NDArray[np.float32]] = []
        self._load()
        self._publisher = self._open_publisher()
        self._evaluation_weights = self._model.dense_weights()

    def start_data_reading(self) -> None:
        """Begin to read the training data and the evaluation data. Needed in non-epoch mode, and only there.

        Raises:
            SessionError: the mode is epoch.
        """
        if not self._solver.repeat_dataset:
            raise SessionError("start_data_reading is for non-epoch mode, so repeat_dataset must be True")
        if self._training_data.source is None:
            raise ConfigError(self._document.graph.source, "layers[0].source", "missing")
        self._training_data.start()
        if self._evaluation_data.source is not None:
            self._evaluation_data.start()

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of the training data."""
        return self._training_data

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of the evaluation data."""
        return self._evaluation_data

    def get_model_oversubscriber(self) -> ModelOversubscriber:
        """Return the oversubscriber. Raise SessionError if the session was made without one."""
        if self._oversubscriber is None:
            raise SessionError("make the session with use_model_oversubscriber True to have a model oversubscriber")
        return self._oversubscriber

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps. Before the first call it is the document's.

        Raises:
            ConfigError: the rate is not a number of at least 0.
        """
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
            raise ConfigError("Session.set_learning_rate", "lr", f"expected a number of at least 0, got {lr!r}")
        self._learning_rate = lr

    def train(self) -> bool:
        """Take one step on the next batch. In epoch mode, return False at the end of the data.

        Raises:
            SessionError: in non-epoch mode, ``start_data_reading`` was not called.
            ConfigError: the document names no training data, or the data does not fit the document.
            DataError: the data is missing or damaged, or has a key that is not in the keyset.
            DivergedError: the loss is not finite.
        """
        if self._training_data.source is None:
            raise ConfigError(self._document.graph.source, "layers[0].source", "missing")
        samples = self._training_data.next_batch()
        if samples is None:
            return False
        if self._oversubscriber is not None:
            self._oversubscriber.check_keys(self._model.bags(samples), self._training_data.source)
        self._loss = self._model.train_batch(samples, self._learning_rate)
        if not math.isfinite(self._loss):
            raise DivergedError(self._model.step, self._learning_rate)
        return True

    def get_current_loss(self) -> float:
        """Return the loss of the last step. Raise SessionError before the first step."""
        if self._loss is None:
            raise SessionError("no step has been taken, so there is no loss")
        return self._loss

    def check_overflow(self) -> None:
        """Do nothing: tables grow, so no table overflows."""

    def copy_weights_for_evaluation(self) -> None:
        """Evaluate with the present dense weights from now on. Rows of tables are always the present rows."""
        self._evaluation_weights = self._model.dense_weights()

    def eval(self) -> bool:
        """Predict the next evaluation batch for ``get_eval_metrics``. A key without a row has the default value.

        In epoch mode the last batch may be smaller.

        Returns:
            False at the end of the data, in epoch mode. True without evaluation data.

        Raises:
            SessionError: in non-epoch mode, ``start_data_reading`` was not called.
            ConfigError: the data does not fit the document.
            DataError: the data is missing or damaged.
        """
        if self._evaluation_data.source is None:
            return True
        samples = self._evaluation_data.next_batch()
        if samples is None:
            return False
        tables = None if self._oversubscriber is None else self._oversubscriber.tables_of(self._model.bags(samples))
        self._logits.append(self._model.logits(samples, self._evaluation_weights, tables))
        self._labels.append(samples.labels)
        return True

    def get_eval_metrics(self) -> Metrics:
        """Return the AUC over all batches since the last call, and forget them. A regression has an RMSE instead.

        Returns:
            [("AUC", area)], or one ("AUC <label>", area) for each column of the labels. The area is NaN if all labels
            are equal. The list is empty if no batch was evaluated.
        """
        if not self._logits:
            return []
        logits, labels = np.concatenate(self._logits), np.concatenate(self._labels)
        self._logits, self._labels = [], []
        metrics: Metrics = []
        names, losses = self._document.label_columns, self._document.losses
        for name, loss, *column in zip(names, losses, labels.T, logits.T, strict=True):
            shown, figure = loss.shown[0]
            metrics.append((shown if len(names) == 1 else f"{shown} {name}", loss.figures(*column)[figure]))
        return metrics

    def evaluation(self, export_predictions_out_file: str = "", export_labels_out_file: str = "") -> Metrics:
        """Evaluate the current model on ``max_eval_batches`` batches, or fewer if the data ends before.

        In epoch mode the evaluation begins at the start of the data, and so does what comes next.

        Args:
            export_predictions_out_file: gets a line of predictions for each sample, which read back as the same
                float32 numbers. An existing file is replaced.
            export_labels_out_file: gets the labels, in the same order.

        Returns:
            see ``get_eval_metrics``. Batches of earlier ``eval`` calls do not count.

        Raises:
            ConfigError: only one of the two files is named, or there is no evaluation data.
            ModelFileError: a file cannot be written.
        """
        if bool(export_predictions_out_file) != bool(export_labels_out_file):
            raise ConfigError("Session.evaluation", "", "expected a file of predictions and a file of labels, got one")
        if self._evaluation_data.source is None:
            raise ConfigError(self._document.graph.source, "layers[0].eval_source", "missing")
        self.copy_weights_for_evaluation()
        self._logits, self._labels = [], []
        self._evaluation_data.rewind()
        for _ in range(self._solver.max_eval_batches):
            if not self.eval():
                break
        self._evaluation_data.rewind()
        if export_predictions_out_file and self._processes.is_first:
            losses = self._document.losses
            predictions = [
                np.stack([loss.answers(column) for loss, column in zip(losses, logits.T, strict=True)], axis=1)
                for logits in self._logits
            ]
            _write_numbers(Path(export_predictions_out_file), predictions)
            _write_numbers(Path(export_labels_out_file), self._labels)
        return self.get_eval_metrics()

    def get_params_num(self) -> int:
        """Return the number of floats: the dense weights, and the rows that the tables in memory have now."""
        dense = sum(math.prod(spec.shape) for spec in self._document.graph.weights)
        rows = sum(len(table) * table.config.dim for table in self._model.tables)
        return dense + int(self._processes.total("numbers of rows", torch.tensor(rows)))

    def init_params(self, model_file: str) -> None:
        """Load the dense weights from a dense model file. "" keeps those that there are.

        Raises:
            ModelFileError: the file is missing, or does not fit the document.
        """
        if model_file:
            self._model.load_dense_weights(read_dense(model_file, self._document.graph))
            self.copy_weights_for_evaluation()

    def download_params_to_files(self, prefix: str, iter: int) -> None:
        """Write all parameters, or no file: N is ``iter``, and i counts the tables from 0.

        - ``<prefix>_dense_N.model`` and ``<prefix><i>_sparse_N.model``: the models.
        - ``<prefix>_opt_dense_N.model`` and ``<prefix><i>_opt_sparse_N.model``: the states of the optimizer.

        Args:
            prefix: a path, or the begin of one: with "out/dcn" the first file is ``out/dcn_dense_N.model``.
            iter: at least 1.

        Raises:
            ConfigError: ``iter`` is less than 1.
            ModelFileError: a file cannot be written. It is raised in every process, and no file has changed.
        """
        if not is_whole(iter, 1):
            reason = f"expected a whole number of at least 1, got {iter!r}"
            raise ConfigError("Session.download_params_to_files", "iter", reason)
        if self._oversubscriber is not None:
            self._oversubscriber.write_back()
        tables = [self._rows(t) for t in range(len(self._document.graph.embeddings))]
        refusal, cause = None, None
        if self._processes.is_first:
            try:
                with _all_or_none(prefix) as temporary:
                    self._write_params(temporary, iter, tables)
            except ModelFileError as err:
                refusal, cause = (err.file, err.reason), err
        for rows in tables:  # the others send their rows, and the first process takes the rows it did not write
            deque(rows, maxlen=0)
        refusal = self._processes.from_first("download_params_to_files", refusal)
        if refusal is not None:
            raise ModelFileError(*refusal) from cause

    def dump_incremental_model_2kafka(self) -> None:
        """Publish the rows that changed since the last call to Kafka, in HPS's format. The first call publishes all.

        The topic of a table is ``hps_et.<model>.<table>``. The messages wait in the folder ``<model>.outbox`` until the
        brokers have them. A thread sends them, also those of an earlier session that ended before.

        Raises:
            SessionError: the solver has no ``kafka_brockers``.
            OutputError: the folder cannot be written, or 8 GiB wait there.
        """
        if self._publisher is None:
            raise SessionError("dump_incremental_model_2kafka needs kafka_brockers of solver_parser_helper")
        self._publisher.publish()

    def _open_publisher(self) -> Publisher | None:
        solver, name = self._solver, self._solver.model_name or self._document.name
        if not solver.kafka_brockers:
            return None
        publisher = Publisher(
            f"kafka://{solver.kafka_brockers.replace(';', ',')}",
            name,
            self._model,
            f"{name}.outbox",
            message_format="hps",
            key_bytes=8 if solver.i64_input_key else 4,
        )
        weakref.finalize(self, publisher.close)
        if self._oversubscriber is not None:
            self._oversubscriber.publisher = publisher
        return publisher

    def _write_params(self, prefix: str, iter: int, tables: Sequence[Iterator[TableRows]]) -> None:
        model, graph = self._model, self._document.graph
        write_dense(f"{prefix}_dense_{iter}.model", graph, model.dense_weights())
        states_path = Path(f"{prefix}_opt_dense_{iter}.model")
        write_dense_states(states_path, graph, model.dense_states(), self._document.optimizer, model.step)
        for t, (embedding, rows) in enumerate(zip(graph.embeddings, tables, strict=True)):
            path, states_path = Path(f"{prefix}{t}_sparse_{iter}.model"), Path(f"{prefix}{t}_opt_sparse_{iter}.model")
            write_table(path, states_path, embedding, self._key_type, model.tables[t], rows)

    @property
    def _key_type(self) -> KeyType:
        return "I64" if self._solver.i64_input_key else "I32"

    def _rows(self, table: int) -> Iterator[TableRows]:
        if self._oversubscriber is not None:
            return self._oversubscriber.rows(table)
        return self._model.dump(table)

    def _load(self) -> None:
        """Load the files that the solver names."""
        solver, model, graph = self._solver, self._model, self._document.graph
        self.init_params(solver.model_file)
        if solver.dense_opt_states_file:
            path = Path(solver.dense_opt_states_file)
            model.step = read_dense_states(path, graph, model.dense_states(), self._document.optimizer)
        files, states_files = solver.embedding_files, solver.sparse_opt_states_file
        for name, paths in (("embedding_files", files), ("sparse_opt_states_file", states_files)):
            if paths and len(paths) != len(graph.embeddings):
                reason = f"expected {len(graph.embeddings)} files, one per table, got {len(paths)}"
                raise ConfigError("solver_parser_helper", name, reason)
        if states_files and not files:
            raise ConfigError("solver_parser_helper", "sparse_opt_states_file", "needs embedding_files")
        for t, file in enumerate(files):
            table, embedding = model.tables[t], graph.embeddings[t]
            states_path = Path(states_files[t]) if states_files else None
            if Path(file).is_file() and not Path(file).stat().st_size:
                _log.warning("%s: the table has no rows", file)
            for rows in read_table(Path(file), states_path, embedding, self._key_type, table):
                if self._oversubscriber is not None:
                    self._oversubscriber.add(t, rows)
                else:
                    model.load(t, rows)


@contextmanager
def _all_or_none(prefix: str) -> Iterator[str]:
    """Yield a prefix in a temporary folder. After the block, its files move next to ``prefix``.

    If the block raises, or a file cannot move, the temporary folder is removed.

    Raises:
        ModelFileError: the disk refuses.
    """
    folder, name = os.path.split(prefix)
    temporary = Path()
    try:
        with temporary_directory(Path(f"{prefix}parameters")) as temporary:
            yield os.path.join(temporary, name)
            moves = [(file, Path(folder, file.name)) for file in temporary.iterdir()]
            for _, target in moves:
                if target.is_dir():
                    raise ModelFileError(target, "cannot be written: it is a folder")
            for file, target in moves:
                file.replace(target)
            sync(Path(folder))
    except ModelFileError as err:
        file = Path(err.file)
        raise ModelFileError(Path(folder, file.name) if file.parent == temporary else file, err.reason) from err
    except OSError as err:
        raise ModelFileError(prefix, f"cannot be written: {(err.strerror or str(err)).lower()}") from err


def _check_oversubscriber(document: TrainingDocument, processes: Processes) -> None:
    if processes.size > 1:
        raise ConfigError("Session", "use_model_oversubscriber", f"expected one process, got {processes.size}")
    for embedding, optimizer in zip(document.graph.embeddings, document.tables, strict=True):
        if optimizer.update_type == "Global" and optimizer.rule.moves_always:
            reason = f"table {embedding.table}: update_type Global moves every row in every step, but rows outside the"
            reason += " keyset are on disk and cannot move; expected Local or LazyGlobal"
            raise ConfigError("Session", "use_model_oversubscriber", reason)


def _write_numbers(path: Path, batches: Iterable[NDArray[np.float32]]) -> None:
    try:
        with atomic_write(path) as file:
            for numbers in batches:
                np.savetxt(file, numbers, fmt="%.9g")
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err
