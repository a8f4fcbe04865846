"""Everything that decodes bytes of a client or of a file, as functions that fail only where the code has a fault.

Each target takes bytes. It returns if they are right, or if they are refused by the error that its callers expect. Any
other exception is a fault.
"""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from benchmarks.http_client import request_of
from kernels.errors import HotrowError
from serving.config import read_model_directory, read_ps_config
from serving.config.version_policy import read_triton_config
from serving.frontend.http.body import decompress
from serving.model.dense_file import read_dense
from serving.model.graph import read_model_graph
from serving.model.manifest import read_manifest
from serving.planner.trace import read_trace
from serving.protocol import ctr, lookup
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import MessageDecoder, read_message
from serving.protocol.samples import decode_samples
from serving.protocol.shared_memory import SharedMemory
from tests.proof.mutations import change_body, change_bytes, change_json, change_message
from tests.tools.tiny_model import TinyModel, flatten

CORPUS = Path(__file__).with_name("corpus")
MODEL = TinyModel(rows=50)
_folder = TemporaryDirectory(prefix="decoders-")
FOLDER = Path(_folder.name)
VERSION = MODEL.write(FOLDER / "models", "tiny")
CONFIG = read_model_directory(VERSION)
REGIONS = SharedMemory()
LOOKUP_PS = {
    "supportlonglong": True,
    "models": [
        {
            "model": "rows",
            "sparse_files": [str(VERSION / "user"), str(VERSION / "item")],
            "embedding_table_names": ["user", "item"],
            "embedding_vecsize_per_table": [4, 4],
            "maxnum_catfeature_query_per_table_per_sample": [2, 3],
            "default_value_for_each_table": [0.0, 1.0],
            "deployed_device_list": [0],
            "max_batch_size": 64,
            "gpucache": True,
            "gpucacheper": 0.5,
            "hit_rate_threshold": 0.9,
        }
    ],
    "volatile_db": {
        "type": "parallel_hash_map",
        "num_partitions": 4,
        "overflow_margin": 1000,
        "initial_cache_rate": 0.5,
    },
    "persistent_db": {"type": "rocks_db", "path": "rows", "read_only": False, "num_threads": 2},
}
(FOLDER / "ps.json").write_text(json.dumps(LOOKUP_PS), encoding="utf-8")
LOOKUP = read_ps_config(FOLDER / "ps.json").models[0]
PBTXT = b'name: "tiny"\nbackend: "hotrow"\nversion_policy { specific { versions: [1] } }\n'


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        decode: decodes bytes.
        seed: bytes that it accepts.
        change: makes hostile inputs of inputs.
    """

    decode: Callable[[bytes], object]
    seed: bytes
    change: Callable[[bytes, random.Random], bytes]

    def takes(self, data):
        """Decode ``data``; an exception that leaves this function is a fault."""
        reason = ""
        try:
            self.decode(data)
        except HotrowError as err:
            reason = str(err)
        assert len(reason) < 5000, "an error repeats what came"


def _infer(signature, question_of):
    decoder = InferDecoder(signature, REGIONS)

    def decode(data):
        length, _, body = data.partition(b"\n")
        request = decoder.decode(body, length.decode("latin-1") if length else None)
        with request.locating_errors():
            return question_of(request.inputs)

    return decode


MESSAGES = MessageDecoder(ctr.signature_of(CONFIG), REGIONS)


def _message(data):
    try:
        message = read_message(data)
    except DecodeError:
        return None
    return ctr.batch_of(CONFIG, MESSAGES.decode(message).inputs)


def _file(name, read):
    """A decoder of files: the bytes become the file ``name`` of the folder that ``read`` takes."""
    folder = FOLDER / name.partition(".")[0]
    folder.mkdir(exist_ok=True)

    def decode(data):
        (folder / name).write_bytes(data)
        return read(folder)

    return decode


def _version_file(name):
    """A decoder of one file of a version, whose other files are right."""
    folder = FOLDER / f"version-{name}" / "tiny" / "1"
    shutil.copytree(VERSION, folder)
    (folder / "manifest.json").unlink()

    def decode(data):
        (folder / name).write_bytes(data)
        config = read_model_directory(folder)
        return read_dense(config.dense_file, read_model_graph(config.graph_file, config.dense_file))

    return decode


def _seed_of_infer():
    head, _, body = request_of(*_arrays()).partition(b"\r\n\r\n")
    return head.split(b"Inference-Header-Content-Length: ")[1].split(b"\r\n")[0] + b"\n" + body


def _arrays():
    dense, bags = MODEL.sample_requests(3, seed=0)
    return dense, *flatten(bags)


def _seed_of_json():
    names = {"DES": ("FP32", [3, 3]), "CATCOLUMN": ("INT64", None), "ROWINDEX": ("INT32", None)}
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape or [array.size], "data": array.ravel().tolist()}
        for (name, (datatype, shape)), array in zip(names.items(), _arrays(), strict=True)
    ]
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    return (
        b"\n"
        + json.dumps({"id": "1", "inputs": inputs, "outputs": outputs, "parameters": {"timeout": 60_000_000}}).encode()
    )


def _seed_of_lookup():
    inputs = [
        {"name": "KEYS", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 49]},
        {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
    ]
    return b"\n" + json.dumps({"inputs": inputs}).encode()


def _seed_of_message():
    message = service_pb2.ModelInferRequest(model_name="tiny", id="1")
    for name, datatype, array in zip(
        ("DES", "CATCOLUMN", "ROWINDEX"), ("FP32", "INT64", "INT32"), _arrays(), strict=True
    ):
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(
            array.astype({"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}[datatype]).tobytes()
        )
    return message.SerializeToString()


def _change_json_body(data, rng):
    return b"\n" + change_json(data[1:], rng) if data[:1] == b"\n" else change_bytes(data, rng)


SAMPLES = {
    "samples": [
        {"dense": [0.5, 1, -2.5], "keys": [[1], [2, 3], []]},
        {"dense": [0, 0, 0], "keys": {"user": [7], "item": [[], [49, 50]]}},
    ]
}
_CTR, _ROWS = ctr.signature_of(CONFIG), lookup.signature_of(LOOKUP)

#: Decoders of what clients send.
REQUESTS = {
    "samples": Target(lambda data: decode_samples(data, CONFIG), json.dumps(SAMPLES).encode(), change_json),
    "infer-binary": Target(_infer(_CTR, lambda arrays: ctr.batch_of(CONFIG, arrays)), _seed_of_infer(), change_body),
    "infer-json": Target(_infer(_CTR, lambda arrays: ctr.batch_of(CONFIG, arrays)), _seed_of_json(), _change_json_body),
    "lookup": Target(
        _infer(_ROWS, lambda arrays: lookup.keys_of(LOOKUP, arrays)), _seed_of_lookup(), _change_json_body
    ),
    "message": Target(_message, _seed_of_message(), change_message),
    "gzip": Target(
        lambda data: decompress(data, {b"content-encoding": b"gzip"}, 10_000),
        gzip.compress(b"hotrow" * 99),
        change_bytes,
    ),
}
#: Decoders of files.
FILES = {
    "ps.json": Target(
        _file("ps.json", lambda folder: read_ps_config(folder / "ps.json")),
        (FOLDER / "ps.json").read_bytes(),
        change_json,
    ),
    "graph.json": Target(_version_file("graph.json"), (VERSION / "graph.json").read_bytes(), change_json),
    "dense.model": Target(_version_file("dense.model"), (VERSION / "dense.model").read_bytes(), change_bytes),
    "manifest.json": Target(
        _file("manifest.json", read_manifest), (VERSION / "manifest.json").read_bytes(), change_json
    ),
    "config.pbtxt": Target(_file("config.pbtxt", read_triton_config), PBTXT.replace(b"tiny", b"config"), change_bytes),
    "trace.jsonl": Target(
        _file("trace.jsonl", lambda folder: read_trace([folder], [CONFIG])),
        json.dumps(SAMPLES).encode() + b"\n",
        change_json,
    ),
}
TARGETS = REQUESTS | FILES


def corpus_of(name):
    """The inputs of a target: its seed, and those that were kept because they reach other code."""
    kept = sorted((CORPUS / name).glob("*"))
    return [TARGETS[name].seed, *(file.read_bytes() for file in kept)]
