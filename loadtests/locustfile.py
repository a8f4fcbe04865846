"""Load on one model of a running server: KServe v2 binary requests of 64 samples.

    locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --model dcn --headless -u 8 -r 8 -t 60s

The shapes of the tensors come from the model's metadata and configuration. Keys are drawn from 0 to ``--keys`` - 1 with
a Zipf-like skew. Unknown keys get the default vector.
"""

import json

import numpy as np
from locust import FastHttpUser, constant, events, task

#: Number of different requests per user.
REQUESTS = 32


@events.init_command_line_parser.add_listener
def add_options(parser):
    """Add the options of this file to Locust's."""
    parser.add_argument("--model", default="dcn", help="the model's name")
    parser.add_argument("--samples", type=int, default=64, help="samples per request")
    parser.add_argument("--keys", type=int, default=100_000, help="keys are drawn from 0 up to this number, exclusive")


class Requests:
    """Encoded requests for one model."""

    def __init__(self, metadata, config, samples, keys, seed):
        """Read the tensors' shapes and types from the server's answers."""
        self._tensors = {tensor["name"]: tensor for tensor in metadata["inputs"]}
        self._dense_dim = self._tensors["DES"]["shape"][1]
        self._key_dtype = {"INT64": np.int64, "UINT32": np.uint32}[self._tensors["CATCOLUMN"]["datatype"]]
        self._slots = sum(map(int, config["parameters"]["slots"]["string_value"].split()))
        self._samples = min(samples, int(config["parameters"]["max_batchsize"]["string_value"]))
        self._keys = keys
        self._rng = np.random.default_rng(seed)

    def encode(self):
        """The body of one request and the size of its JSON head in bytes."""
        bags = self._samples * self._slots
        arrays = {
            "DES": self._rng.random((1, self._samples * self._dense_dim), dtype=np.float32),
            "CATCOLUMN": (self._keys ** self._rng.random((1, bags)) - 1).astype(self._key_dtype),
            "ROWINDEX": np.arange(bags + 1, dtype=np.int32).reshape(1, -1),
        }
        inputs = [
            {
                "name": name,
                "datatype": self._tensors[name]["datatype"],
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in arrays.items()
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        return head + b"".join(array.tobytes() for array in arrays.values()), len(head)


class Client(FastHttpUser):
    """A client that sends its next request as soon as an answer arrives."""

    wait_time = constant(0)

    def on_start(self):
        """Ask for the model's tensors and prepare requests."""
        options = self.environment.parsed_options
        self._path = f"/v2/models/{options.model}/infer"
        about = [self._get(f"/v2/models/{options.model}{what}") for what in ("", "/config")]
        requests = Requests(*about, options.samples, options.keys, seed=id(self))
        self._requests = [requests.encode() for _ in range(REQUESTS)]
        self._next = 0

    def _get(self, path):
        answer = self.client.get(path)
        answer.raise_for_status()
        return answer.json()

    @task
    def infer(self):
        """Send one request; an answer without a prediction counts as a failure."""
        body, json_bytes = self._requests[self._next % REQUESTS]
        self._next += 1
        headers = {"Inference-Header-Content-Length": str(json_bytes)}
        with self.client.post(self._path, data=body, headers=headers, catch_response=True) as answer:
            if answer.status_code != 200 or "inference-header-content-length" not in answer.headers:
                answer.failure(f"{answer.status_code}: {answer.text[:200] if answer.text else 'no answer'}")
