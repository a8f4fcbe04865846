"""Serve a model while its trainer goes on learning, and compare it with a copy that gets no updates.

    python examples/demo_updates.py [--samples 20000]

What makes people click changes from window to window. A trainer process learns each window after it was predicted,
publishes the rows that it changed, and exports its network without the rows. One server has the model twice: ``clicks``
follows the updates, and ``frozen`` was exported under a name that no update has. Nothing is left on the disk.
"""

import argparse
import json
import multiprocessing
import re
import signal
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

try:
    import numpy as np
    import torch
    import tritonclient.http as triton
    from demo import serving, title
    from tritonclient.utils import InferenceServerException

    from training.model import CtrModel, export_dense, export_model, open_document
    from training.model.metrics import area_under_curve
    from training.publishing import Publisher
    from training.samples import Samples
    from training.synthetic.criteo_like import generate, planted_weights, true_logits
except ModuleNotFoundError as err:
    sys.exit(f"{err.name} is not installed: run `make demo-updates`, which installs what this demo needs")

MODEL, COPY = "clicks", "frozen"
WINDOWS, FIRST_WINDOWS = 6, 5  # the model is exported after the windows of the first part
TURN = 0.25  # how far the truth turns from one window to the next, in radians
BATCH_SIZE, LEARNING_RATE, PUBLISH_STEPS = 256, 0.003, 20
SAMPLES_PER_REQUEST = 500
LONGEST_WAIT_S = 60.0


class Learned(NamedTuple):
    """What the trainer reports of samples: its step, the rows it published, the log's end, and when it published."""

    step: int = 0
    rows: int = 0
    position: str = "0"
    published_s: float = 0.0


def main() -> int:
    options = read_options()
    started_s = time.monotonic()
    with TemporaryDirectory(prefix="hotrow-demo-") as folder:
        run(Path(folder), options.samples)
    print(f"{time.monotonic() - started_s:.0f} s in all. The server and the trainer have stopped.")
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000, help="samples of a window (default: %(default)s)")
    return parser.parse_args()


def run(folder: Path, size: int) -> None:
    first, *windows = stream(size)
    repository = folder / "models"
    with training(folder) as trainer:
        title(f"1. Train on {len(first):,} samples, and export the model")
        teach(trainer, first)
        tiers = {
            "supportlonglong": True,
            "models": [],
            "volatile_db": {"type": "parallel_hash_map"},
            "update_source": {"type": "folder", "path": "../updates", "update_headroom_ratio": 1},
        }
        (repository / "ps.json").write_text(json.dumps(tiers, indent=2) + "\n")
        title("2. Serve it twice: with updates, and a copy without updates")
        with serving(repository, "--model-control-mode", "explicit", "--load-model", "*") as url:
            title("3. Each window is predicted, and then learned and published")
            try:
                follow(url, trainer, windows)
            except (OSError, InferenceServerException) as err:
                raise SystemExit(f"the server does not answer: {err}") from None


def stream(size: int) -> list[Samples]:
    """Return the first part and the windows. The weight of each key turns from one planted truth to another."""
    drawn = generate(size * (FIRST_WINDOWS + WINDOWS), seed=0).samples
    keys = drawn.bags.keys.reshape(len(drawn), -1)
    before, after = (0.25 * planted_weights(keys, seed).reshape(keys.shape).sum(axis=1) for seed in (0, 100))
    first = FIRST_WINDOWS * size
    angles = TURN * (np.arange(len(drawn)) // size - FIRST_WINDOWS).clip(min=0)
    logits = true_logits(drawn.dense, keys, 0) - before + np.cos(angles) * before + np.sin(angles) * after
    chances = 1 / (1 + np.exp(-logits))
    labels = (np.random.default_rng(1).random(len(drawn)) < chances).astype(np.float32)
    samples = Samples(labels[:, None], drawn.dense, drawn.bags)
    return [samples[:first], *(samples[start : start + size] for start in range(first, len(samples), size))]


@contextmanager
def training(folder: Path):
    """Start the trainer process, and yield the connection to it. The process ends with the block."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    trainer = context.Process(target=learn, args=(folder, its, mine), daemon=True)
    trainer.start()
    its.close()
    try:
        yield mine
    finally:
        mine.close()  # the trainer ends when it reads the next window
        trainer.join(timeout=10)
        trainer.kill()
        trainer.join()


def learn(folder: Path, windows, other_end) -> None:
    """Train and export a model. Then learn and publish each window, and export the network."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other process, and that ends this one
    other_end.close()
    torch.set_num_threads(1)
    document = open_document("wdl")
    model = CtrModel(document.graph, seed=0, rule=document.rule, tables=document.tables)
    is_gone = suppress(BrokenPipeError, ConnectionResetError)  # the other process has ended
    with is_gone, Publisher(str(folder / "updates"), MODEL, model, folder / "outbox") as publisher:
        for batch in batches(windows.recv()):
            model.train_batch(batch, LEARNING_RATE)
        export_model(model, document.document, folder / "models", MODEL, publisher=publisher)
        export_model(model, document.document, folder / "models", COPY)
        windows.send(Learned())
        while (window := received(windows)) is not None:
            rows, published_s = 0, 0.0
            for number, batch in enumerate(batches(window), 1):
                model.train_batch(batch, LEARNING_RATE)
                if number % PUBLISH_STEPS == 0 or number * BATCH_SIZE >= len(window):
                    published_s = time.monotonic()
                    rows += sum(publisher.publish().values())
            windows.send(Learned(model.step, rows, publisher.flush()["folder"], published_s))
            network = export_dense(model, document.document, folder / "models", MODEL, base=1, publisher=publisher)
            windows.send(network.name)


def received(windows) -> Samples | None:
    try:
        return windows.recv()
    except EOFError:
        return None


def batches(samples: Samples):
    return (samples[start : start + BATCH_SIZE] for start in range(0, len(samples), BATCH_SIZE))


def teach(trainer, samples: Samples) -> Learned:
    """Let the trainer learn samples, and wait for its report."""
    with reaching_trainer():
        trainer.send(samples)
        return trainer.recv()


def load_network(url: str, trainer) -> None:
    """Wait for the network that the trainer exports, and serve it."""
    with reaching_trainer():
        version = trainer.recv()
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        client.load_model(MODEL)
        if not client.is_model_ready(MODEL, version):
            raise SystemExit(f"version {version} does not serve: {client.get_model_repository_index()}")


@contextmanager
def reaching_trainer():
    try:
        yield
    except (EOFError, OSError):
        raise SystemExit("the trainer has ended; the lines above say why") from None


def follow(url: str, trainer, windows: list[Samples]) -> None:
    """Predict each window with both models, and let the trainer learn it. Print a line for each window."""
    print("window  samples  AUC without updates  AUC with updates  rows changed  visible after")
    learned, lag, published, arrived = Learned(), "-", 0, 0
    for number, window in enumerate(windows, 1):
        labels = window.labels[:, 0]
        without, _ = ask(url, COPY, window)
        updated, step = ask(url, MODEL, window)
        if step != learned.step:
            raise SystemExit(f"the answer has rows of step {step}, but the trainer published step {learned.step}")
        aucs = area_under_curve(labels, without), area_under_curve(labels, updated)
        rows, arrived = rows_of(url) - arrived, rows_of(url)
        print(f"{number:6}  {len(window):7,}  {aucs[0]:19.4f}  {aucs[1]:16.4f}  {rows:12,}  {lag:>13}", flush=True)
        if window is not windows[-1]:
            learned = teach(trainer, window)
            published += learned.rows
            wait_for(url, learned.position)
            lag = f"{time.monotonic() - learned.published_s:.2f} s"
            load_network(url, trainer)
    if arrived != published:
        raise SystemExit(f"the trainer published {published:,} rows, and the server changed {arrived:,}")
    if aucs[1] <= aucs[0]:
        raise SystemExit("the updates did not help; with so few samples this is chance, so take more --samples")
    print(f"\nThe server has changed {arrived:,} rows, as many as the trainer published.")
    print(f"In the last window the AUC is {aucs[1]:.4f} with updates and {aucs[0]:.4f} without.")


def tensors(samples: Samples) -> list[triton.InferInput]:
    """Return DES, CATCOLUMN and ROWINDEX, each [1, N], as HugeCTR's Triton clients send them."""
    arrays = {
        "DES": ("FP32", samples.dense.reshape(1, -1)),
        "CATCOLUMN": ("INT64", samples.bags.keys.reshape(1, -1)),
        "ROWINDEX": ("INT32", samples.bags.row_ptrs.astype(np.int32).reshape(1, -1)),
    }
    inputs = []
    for name, (datatype, values) in arrays.items():
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(np.ascontiguousarray(values))
        inputs.append(tensor)
    return inputs


def ask(url: str, model: str, samples: Samples) -> tuple[np.ndarray, int]:
    """Send all samples. Return the probabilities, and the trainer's newest step whose rows the model has."""
    probabilities, step = [], 0
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        for start in range(0, len(samples), SAMPLES_PER_REQUEST):
            part = samples[start : start + SAMPLES_PER_REQUEST]
            answer = client.infer(model, tensors(part), parameters={"freshness": True})
            probabilities.append(answer.as_numpy("OUTPUT0").reshape(-1))
            step = answer.get_response()["parameters"].get("newest_step", 0)
    return np.concatenate(probabilities), step


def rows_of(url: str) -> int:
    """Return how many rows the server has changed."""
    counted = re.findall(r"^hotrow_update_rows_total\{.*\} (\d+)", page(url, "/metrics"), flags=re.MULTILINE)
    return sum(map(int, counted))


def wait_for(url: str, position: str) -> None:
    """Wait until the server has applied the log up to a position."""
    end_s = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < end_s:
        models = {model["name"]: model for model in json.loads(page(url, "/status"))["models"]}
        [reader] = models[MODEL]["versions"][0]["updates"]
        reached = [int(part["position"] or 0) for part in reader["partitions"]]
        if reached and reached[0] >= int(position):
            return
        time.sleep(0.01)
    reason = reader["fault"] or f"it is at {reached}, and the log at {position}"
    raise SystemExit(f"after {LONGEST_WAIT_S:.0f} s the server has not applied the updates: {reason}")


def page(url: str, path: str) -> str:
    with urllib.request.urlopen(url + path, timeout=LONGEST_WAIT_S) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
