"""The NN worker: ``TrainCtx`` feeds batches to the user's loop, and sends gradients back."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from queue import SimpleQueue
from threading import RLock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.regular_file import open_regular
from training.arguments import number, pair, whole
from training.errors import SessionError
from training.persia.checkpoint import DENSE_FILE, CheckpointFacts, checkpoints_in, new_checkpoint
from training.persia.config import read_embedding_config
from training.persia.ctx import Feed
from training.persia.sparse.optim import Optimizer
from training.persia.wire import Answer, Cluster, Message, Peer, Server, peers

if TYPE_CHECKING:
    from training.publishing import Publisher

_log = logging.getLogger("hotrow.persia")
Features = tuple[list[torch.Tensor], list[torch.Tensor]]


class Staleness:
    """Bounds how many batches are looked up whose gradients are not applied yet."""

    def __init__(self, most: int) -> None:
        """Allow so many batches."""
        self._left = most  # batches that may be looked up before any gradient is applied
        self._in_order: SimpleQueue[Answer | None] = SimpleQueue()
        self._updates: deque[Answer] = deque()

    def enter(self) -> None:
        """Wait until another batch may be looked up: each waits for the update of one earlier batch."""
        if self._left:
            self._left -= 1
        elif (update := self._in_order.get()) is not None:
            update.wait()

    def leave(self, update: Answer) -> None:
        """Allow another batch when an update is done. Raise the error of an earlier update."""
        self._in_order.put(update)
        self._updates.append(update)
        while self._updates and self._updates[0].is_done:
            self._updates.popleft().result()

    def wait(self) -> None:
        """Wait for all updates. Raise the error of an update."""
        while self._updates:
            self._updates.popleft().result()

    def end(self) -> None:
        """End the wait of ``enter``."""
        self._in_order.put(None)


class Leaf(NamedTuple):
    """The vectors of a feature, which are part of a block; see ``embedding_worker.Block``.

    Attributes:
        name: of the feature.
        block: its name.
        begin: where the vectors begin in the block.
        vectors: float32[R, D].
    """

    name: str
    block: str
    begin: int
    vectors: torch.Tensor


class TrainingBatch:
    """A batch on its way through the NN worker; for ``TrainCtx.prepare_features``."""

    def __init__(self, rest: Message, vectors: Answer) -> None:
        """Take what the data loader sent, and what the embedding worker answers."""
        self.number: int = rest.facts["number"]
        self.rest = rest
        self.vectors = vectors
        self.leaves: list[Leaf] | None = None


class TrainCtx:
    """Trains a dense network on batches whose embeddings are elsewhere. Belongs to one thread.

    Use it in a ``with`` block. Embeddings are float32 tensors on the CPU.

    Attributes:
        batches: how many batches were trained, with those of the loaded checkpoint.
        publisher: what ``publish_to`` has returned; None: nothing is published.
        checkpoint_folder: of the run's ``--checkpoint``; None: there is none.
    """

    def __init__(
        self,
        grad_scaler: Any = None,
        sparse_optimizer: Optimizer | None = None,
        port: int = 0,
        data_queue_size: int = 1,
        *,
        emb_initialization: tuple[float, float] = (-0.01, 0.01),
        admit_probability: float = 1.0,
        weight_bound: float = 10.0,
        embedding_staleness: int = 8,
    ) -> None:
        """Prepare.

        Args:
            grad_scaler: PyTorch's; checkpoints have its state.
            sparse_optimizer: of the embeddings.
            port: of this process, ``int(os.environ["TRAINER_PORT"])``.
            data_queue_size: how many batches of the data loader may wait here.
            emb_initialization: first weights are drawn uniformly from this range.
            admit_probability: the probability that a lookup makes a row for a new sign.
            weight_bound: weights stay between this number and its negative; 0: there is no bound.
            embedding_staleness: the most batches that are looked up and whose gradients are not applied. With 1, each
                lookup sees all earlier gradients.

        Raises:
            SessionError: this process is not a role of a run, or ``port`` is another.
            TypeError: there is no sparse optimizer, or an argument is no number.
            ValueError: a number is out of range.
            ConfigError: the embedding configuration is wrong.
        """
        if not isinstance(sparse_optimizer, Optimizer):
            raise TypeError(f"TrainCtx: expected a sparse_optimizer of training.persia, got {sparse_optimizer!r}")
        for name, value in (("data_queue_size", data_queue_size), ("embedding_staleness", embedding_staleness)):
            whole("TrainCtx", name, value, 1)
        low, high = pair("TrainCtx", "emb_initialization", emb_initialization)
        if low > high:
            raise ValueError(f"TrainCtx: expected emb_initialization (low, high), got {emb_initialization}")
        self._cluster = Cluster.from_environment()
        self._address = f"127.0.0.1:{port}"
        if self._address != self._cluster.nn_worker:
            raise SessionError(f"TrainCtx: expected TRAINER_PORT as port, {self._cluster.nn_worker}, got {port}")
        self._config = read_embedding_config(self._cluster.embedding_config)
        self._grad_scaler, self._optimizer = grad_scaler, sparse_optimizer.facts()
        self._settings: dict[str, Any] = {
            "optimizer": self._optimizer,
            "initialization": (low, high),
            "admit_probability": number("TrainCtx", "admit_probability", admit_probability, 0, 1),
            "weight_bound": number("TrainCtx", "weight_bound", weight_bound, 0),
        }
        self._feed, self._staleness = Feed(data_queue_size), Staleness(embedding_staleness)
        self._ready: SimpleQueue[TrainingBatch | None] = SimpleQueue()
        self._looking_ahead: Thread | None = None
        self._current: TrainingBatch | None = None
        self._has_warned = False
        self._is_entered = False
        self._known_checkpoint: Path | None = None  # that was loaded or written
        self._lookups: WeakSet[Answer] = WeakSet()
        self._may_look_up = RLock()  # of the main thread, or of a lookup that begins
        self.publisher: Publisher | None = None
        self.batches = 0
        self.checkpoint_folder = None if self._cluster.checkpoint is None else Path(self._cluster.checkpoint)

    def __enter__(self) -> Self:
        """Configure the embedding servers, and listen for the data loader.

        Raises:
            RoleError: a server refuses.
            SessionError: the port cannot be bound.
        """
        self._servers = peers("embedding server", self._cluster.embedding_servers)
        self._workers = peers("embedding worker", self._cluster.embedding_workers)
        for answer in [server.start("configure", **self._settings) for server in self._servers]:
            answer.result()
        methods = {"begin": self._feed.begin, "put": self._feed.put, "finish": self._feed.finish}
        self._server = Server(self._address, methods)
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until all gradients are applied, unless there is an error, and disconnect.

        The data loader still gets answers until this process ends. It sends no more batches.
        """
        self._is_entered = False
        try:
            if error is None:
                self._staleness.wait()
        finally:
            if self.publisher is not None:
                self.publisher.__exit__(kind, error, traceback)
            self._feed.close()
            self._staleness.end()
            for peer in (*self._servers, *self._workers):
                peer.close()
            if self._looking_ahead is not None:
                self._looking_ahead.join()

    def data_loader(self) -> Iterator[TrainingBatch]:
        """Yield the batches of the data loader in its order, until it ends.

        A batch whose gradients are not handed back before the next is asked for moves no row.

        Raises:
            SessionError: there is another iterator already, or the run has a checkpoint that was not loaded.
            RoleError: another role failed.
        """
        self._require_entered("data_loader")
        if self.checkpoint_folder is not None:
            self._require_known(self.checkpoint_folder)
        if self._looking_ahead is not None:
            raise SessionError("TrainCtx: expected one call of data_loader, got another")
        self._begin_to_publish()
        self._looking_ahead = Thread(target=self._look_ahead, name="look ahead", daemon=True)
        self._looking_ahead.start()
        self._feed.open(self.batches)
        while True:
            if self._current is not None:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("a batch moves no row, because on_after_backward was not called for it")
                self._hand_back(self._current, {})
            batch = self._ready.get()
            if batch is None:
                return
            self._current = batch
            yield batch

    def _look_ahead(self) -> None:
        """Look up batches before they are needed, as far as staleness allows."""
        while (rest := self._feed.take()) is not None:
            self._staleness.enter()
            number = rest.facts["number"]
            with self._may_look_up:
                vectors = self._worker(number).start("look_up", number=number)
                self._lookups.add(vectors)
            self._ready.put(TrainingBatch(rest, vectors))
        self._ready.put(None)

    def _worker(self, number: int) -> Peer:
        """Return the embedding worker that has a batch; see ``Backend.send_data``."""
        return self._workers[number % len(self._workers)]

    def prepare_features(self, data: TrainingBatch) -> tuple[Features, torch.Tensor | list[torch.Tensor]]:
        """Return a batch as tensors: ``(dense, sparse), target``.

        Args:
            data: the batch that ``data_loader`` gave last.

        Returns:
            dense: a list of the dense arrays. sparse: a list of the features in the data loader's order, [B, D] of a
            summed feature, and [B, sample_fixed_size, D + 1] of a raw feature, whose last column is 1 where there is a
            sign. target: the tensor [B, L], or a list if there are several.

        Raises:
            SessionError: it is another batch.
            RoleError: the embeddings cannot be looked up.
        """
        if data is not self._current:
            raise SessionError("prepare_features: expected the batch that data_loader gave last, got another")
        vectors = data.vectors.result()
        data.leaves = [
            Leaf(name, block, begin, torch.from_numpy(vectors.arrays[block])[begin:end].requires_grad_())
            for name, block, begin, end in vectors.facts["features"]
        ]
        sparse = [
            _raw(leaf.vectors, vectors.arrays[f"index {leaf.name}"])
            if f"index {leaf.name}" in vectors.arrays
            else leaf.vectors
            for leaf in data.leaves
        ]
        arrays, facts = data.rest
        dense = [torch.tensor(arrays[f"dense {number}"]) for number in range(facts["dense"])]
        targets = [torch.tensor(arrays[f"target {number}"]) for number in range(facts["targets"])]
        return (dense, sparse), targets[0] if len(targets) == 1 else targets

    def on_after_backward(self, scale: float, batch_idx: int) -> bool:
        """Send back the gradients of the prepared batch. The embedding servers apply them in the background.

        Args:
            scale: the loss was multiplied by this number.
            batch_idx: has no effect.

        Returns:
            whether all gradients are finite. If not, no row moves.

        Raises:
            SessionError: there is no prepared batch, or its gradients were handed back already.
            ValueError: the scale is not a number above 0.
            RoleError: the gradients of an earlier batch could not be applied.
        """
        self._require_entered("on_after_backward")
        batch = self._current
        if batch is None or batch.leaves is None:
            raise SessionError("on_after_backward: expected prepare_features and a backward pass before each call")
        if not 0 < scale < float("inf"):
            raise ValueError(f"on_after_backward: expected a scale above 0, got {scale}")
        gradients, missing = _gradients(batch.leaves, scale)
        is_finite = all(np.isfinite(gradient).all() for gradient in gradients.values())
        has_any = len(missing) < len(batch.leaves)
        self._hand_back(batch, gradients if is_finite and has_any else {}, missing)
        return is_finite

    def _hand_back(self, batch: TrainingBatch, gradients: dict[str, NDArray[Any]], missing: Sequence[str] = ()) -> None:
        self._current = None
        if batch.leaves is None:
            batch.vectors.result()  # frees their memory, which is the worker's
        self.batches = batch.number + 1
        worker = self._worker(batch.number)
        self._staleness.leave(worker.start("update", gradients, number=batch.number, missing=missing))

    def dump_checkpoint(self, model: Any = None, dense_optimizer: Any = None) -> Path:
        """Write a checkpoint: all rows, their optimizer, and the states of what is given. Earlier ones are deleted.

        It has the gradients of all batches that were handed back. It may also have rows that are not trained yet,
        because lookups run ahead. It is complete or absent.

        Args:
            model: a module of PyTorch.
            dense_optimizer: an optimizer of PyTorch.

        Returns:
            its folder, ``<checkpoint>/batch-<batches>``.

        Raises:
            SessionError: the run has no ``--checkpoint``, or has a checkpoint that was not loaded.
            OutputError: the disk refuses.
            RoleError: a server cannot write its rows.
        """
        folder = self._checkpoint("dump_checkpoint")
        self._require_known(folder)
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            run, positions = "", {}
            if self.publisher is not None:
                stack.enter_context(self.publisher.checkpoint(self.batches))
                run, positions = self.publisher.run, self.publisher.flush()
            path = stack.enter_context(new_checkpoint(folder, self.batches))
            answers = [server.start("dump", folder=str(path)) for server in self._servers]
            steps = [answer.result().facts["step"] for answer in answers]
            states = {name: one.state_dict() for name, one in self._stateful(model, dense_optimizer).items()}
            torch.save(states, path / DENSE_FILE)
            facts = CheckpointFacts(
                self.batches, max(steps), self._optimizer, self._config, len(answers), run, positions
            )
            facts.write(path)
        self._known_checkpoint = checkpoints_in(folder).checkpoint(self.batches)
        return self._known_checkpoint

    def publish_to(self, url: str, model: str, **options: Any) -> "Publisher":
        """Publish changed rows to servers that follow. Call it before data_loader, and ``publish`` in the loop.

        ``dump_checkpoint`` publishes too. A training that goes on from a checkpoint publishes the present value of
        every key that was published after it. The outbox is in the folder of checkpoints.

        Args:
            url: the update log.
            model: the model's name in the repository. A table has the name of its feature group.
            options: ``message_format``, ``rows``, ``key_bytes``, ``most_outbox_bytes`` and ``settings`` of
                ``training.publishing.Publisher``.

        Returns:
            the publisher, which ends with the ``with`` block.

        Raises:
            SessionError: the run has no ``--checkpoint``, batches were asked for already, or it is another call.
            ConfigError: an argument cannot be used, or a feature group cannot be the name of a table.
            OutputError: the outbox cannot be used.
            MissingExtraError: the log needs a library that is not installed.
        """
        outbox = self._checkpoint("publish_to") / "outbox"
        if self.publisher is not None or self._looking_ahead is not None:
            raise SessionError("publish_to: expected one call, before data_loader")
        # for those who publish only, because the import takes long
        from training.persia.publishing import ServerRows
        from training.publishing import Publisher

        rows = ServerRows(self._config, self._servers, self._quiet)
        self.publisher = Publisher(url, model, rows, outbox, **options)
        return self.publisher

    def _begin_to_publish(self) -> None:
        """Make the servers that follow agree with the rows of the loaded checkpoint, or with no rows."""
        if self.publisher is None:
            return
        if self.publisher.is_new:
            with self.publisher.checkpoint(self.batches):
                pass
        else:
            self.publisher.resume(self.batches)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Wait for all gradients and lookups. Inside the block, no lookup begins, so no row changes."""
        self._staleness.wait()
        with self._may_look_up:
            for vectors in list(self._lookups):
                vectors.wait()
            yield

    def load_checkpoint(self, model: Any = None, dense_optimizer: Any = None) -> int:
        """Go on from the newest checkpoint of the run's ``--checkpoint``, if there is one. Call it before data_loader.

        Args:
            model: what the checkpoint was written with.
            dense_optimizer: the same.

        Returns:
            how many batches the checkpoint has seen; the data loader does not send them again. 0: there is none.

        Raises:
            SessionError: the run has no ``--checkpoint``, or batches were asked for already.
            ConfigError: the checkpoint has other features, another optimizer, or not what is to be loaded.
            ModelFileError: ``checkpoint.json`` or the dense file is damaged, or does not fit. Nothing has changed.
            RoleError: a server cannot read its rows. The training cannot begin then.
        """
        path = checkpoints_in(self._checkpoint("load_checkpoint")).newest()
        if self._looking_ahead is not None:
            raise SessionError("load_checkpoint: expected the call before data_loader")
        if path is None:
            return 0
        facts = CheckpointFacts.read(path)
        if facts.config != self._config:
            raise ConfigError(str(path), "", f"expected the features of {self._cluster.embedding_config}, got others")
        for name in ("rule", "initial_states"):
            if facts.optimizer[name] != self._optimizer[name]:
                reason = f"expected {self._optimizer[name]}, as the sparse_optimizer has, got {facts.optimizer[name]}"
                raise ConfigError(str(path), f"optimizer.{name}", reason)
        _load_dense(path / DENSE_FILE, self._stateful(model, dense_optimizer))
        for answer in [server.start("load", folder=str(path), step=facts.step) for server in self._servers]:
            answer.result()
        self.batches, self._known_checkpoint = facts.batches, path
        return facts.batches

    def _require_entered(self, call: str) -> None:
        if not self._is_entered:
            raise SessionError(f"{call}: expected the call in the with block of TrainCtx")

    def _checkpoint(self, call: str) -> Path:
        self._require_entered(call)
        if self.checkpoint_folder is None:
            raise SessionError(f"{call}: expected the option --checkpoint DIR of the run")
        return self.checkpoint_folder

    def _require_known(self, folder: Path) -> None:
        """Refuse to begin at zero, and in the end to replace a checkpoint, when there is a checkpoint to go on from."""
        newest = checkpoints_in(folder).newest()
        if newest not in (None, self._known_checkpoint):
            expected = "expected load_checkpoint before data_loader"
            raise SessionError(f"{newest}: not loaded; {expected}, or another --checkpoint for a new training")

    def _stateful(self, model: Any, dense_optimizer: Any) -> dict[str, Any]:
        """Return what is there of what has a state."""
        given = {"model": model, "dense_optimizer": dense_optimizer, "grad_scaler": self._grad_scaler}
        return {name: one for name, one in given.items() if one is not None}


def _gradients(leaves: Sequence[Leaf], scale: float) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the gradients of blocks, divided by the scale, and the features that have none."""
    rows: dict[str, tuple[int, int]] = {}
    for leaf in leaves:
        end, dim = leaf.begin + len(leaf.vectors), leaf.vectors.shape[1]
        rows[leaf.block] = max(end, rows.get(leaf.block, (0, 0))[0]), dim
    gradients = {block: np.empty(shape, np.float32) for block, shape in rows.items()}
    missing = []
    for leaf in leaves:
        of_leaf = gradients[leaf.block][leaf.begin : leaf.begin + len(leaf.vectors)]
        if leaf.vectors.grad is None:
            missing.append(leaf.name)
            of_leaf.fill(0)
            continue
        with np.errstate(over="ignore"):  # then a gradient is not finite
            np.divide(leaf.vectors.grad.numpy(), np.float32(scale), out=of_leaf)
    return gradients, missing


def _load_dense(path: Path, stateful: dict[str, Any]) -> None:
    """Load all states, or raise an error and change nothing."""
    try:
        with open_regular(path) as file:
            states = torch.load(file, weights_only=True)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except Exception as err:  # PyTorch raises errors of many types for a damaged file
        raise ModelFileError(path, f"cannot be read: {_in_one_line(err)}") from err
    for name in stateful:
        if not isinstance(states, dict) or name not in states:
            raise ConfigError(str(path), name, "missing; dump_checkpoint was called without it")
    before = deepcopy({name: one.state_dict() for name, one in stateful.items()})
    for name, one in stateful.items():
        try:
            one.load_state_dict(states[name])
        except Exception as err:  # as above
            for loaded, state in before.items():
                stateful[loaded].load_state_dict(state)
            raise ModelFileError(path, f"{name}: does not fit: {_in_one_line(err)}") from err


def _in_one_line(err: Exception) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())}"


def _raw(rows: torch.Tensor, index: NDArray[Any]) -> torch.Tensor:
    """Return the rows [R, D] of a raw feature by sample, [B, sample_fixed_size, D + 1]. Row 0 of the index is zeros."""
    places = torch.tensor(index)
    with_zeros = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
    return torch.cat([with_zeros[places], (places != 0).unsqueeze(2).to(rows)], dim=2)
