"""The model of ``benchmarks.servers`` in mosec, without checks: NumPy finds the row of each key.

    python -m benchmarks.mosec_server FOLDER WORKERS

FOLDER has ``keys.npy``, sorted, ``vectors.npy``, ``weight.npy`` and ``bias.npy``. A request has the float32 numbers and
then the int64 keys of its samples. It prints its port, then serves until it is killed.
"""

import os
import sys
from pathlib import Path

import numpy as np
from mosec import Server, Worker

from benchmarks.triton_server import free_ports

_FOLDER = "HOTROW_MOSEC_FOLDER"
_DENSE, _SLOTS = 13, 26


class Model(Worker):
    """Logistic regression over numbers and the rows of keys."""

    def __init__(self):
        """Read the arrays."""
        folder = Path(os.environ[_FOLDER])
        self.keys, self.vectors, self.weight, self.bias = (
            np.load(folder / f"{name}.npy") for name in ("keys", "vectors", "weight", "bias")
        )

    def deserialize(self, data):
        """Return the numbers and the keys of a body."""
        samples = len(data) // (4 * _DENSE + 8 * _SLOTS)
        numbers = np.frombuffer(data, np.float32, samples * _DENSE).reshape(samples, _DENSE)
        return numbers, np.frombuffer(data, np.int64, offset=numbers.nbytes)

    def forward(self, data):
        """Return the probabilities."""
        numbers, keys = data
        rows = self.vectors[np.searchsorted(self.keys, keys)].reshape(len(numbers), -1)
        logits = np.concatenate([numbers, rows], axis=1) @ self.weight + self.bias
        return 1 / (1 + np.exp(-logits))

    def serialize(self, data):
        """Return the bytes of an answer."""
        return data.tobytes()


def main(folder, workers):
    """Serve on a free port."""
    os.environ[_FOLDER] = folder
    [port] = free_ports(1)
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port)]
    server = Server()
    server.append_worker(Model, num=int(workers))
    print(port, flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
