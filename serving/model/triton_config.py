"""Triton's ``config.pbtxt``: written with a model, compared with an existing file, and corrected.

A user may change the file, so an export keeps it. Only its inputs and outputs follow the versions.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving.errors import ConfigError, OutputError
from serving.model.atomic import atomic_write
from serving.model.names import CANDIDATES, TOP_INDEX, TOP_SCORE
from serving.model.records import Output, default_outputs
from serving.model.regular_file import read_regular

#: The files in a model's folder by the kind of instances. The second is for tritonserver --model-config-name=gpu.
TRITON_FILES = {"CPU": Path("config.pbtxt"), "GPU": Path("configs", "gpu.pbtxt")}

#: The name of a raw feature, and its datatype in ``config.pbtxt``.
RawInput = tuple[str, str]

_INPUTS = (("DES", "TYPE_FP32"), ("CATCOLUMN", "TYPE_INT64"), ("ROWINDEX", "TYPE_INT32"))
_CANDIDATES = (CANDIDATES, "TYPE_INT32")
_RANKINGS = {TOP_INDEX: "TYPE_INT32", TOP_SCORE: "TYPE_FP32"}
_MOST_REQUESTS = 64  # that Triton hands over together
_MOST_BYTES = 4 << 20
_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\[\]{}<>:,;]|[^\s\[\]{}<>:,;\#"']+|.""")
_CLOSING = {"{": "}", "<": ">", "[": "]"}


class TritonTensors(NamedTuple):
    """What Triton must know of the tensors of a model.

    Attributes:
        dense_dim: F.
        outputs: of the model.
        raw_inputs: the raw features that requests may have in place of keys.
    """

    dense_dim: int
    outputs: Sequence[Output]
    raw_inputs: Sequence[RawInput] = ()

    @property
    def inputs(self) -> Iterator[tuple[str, str, bool]]:
        """The name and the datatype of each input, and whether a request may leave it out."""
        for name, datatype in (*_INPUTS, *self.raw_inputs, *([_CANDIDATES] if self.raw_inputs else ())):
            is_optional = self.raw_inputs or name == "ROWINDEX" or (name == "DES" and self.dense_dim == 0)
            yield name, datatype, bool(is_optional)


def triton_config(name: str, tensors: TritonTensors, kind: str) -> str:
    """Return ``config.pbtxt`` for instances on the ``"CPU"`` or on every ``"GPU"``.

    Every tensor has the form ``[1, N]``, as clients of HugeCTR's backend send it. For Triton that is a batch of one, so
    it may hand over waiting requests of different sizes together. ``[B, S]`` keys, which need no ``ROWINDEX``, are a
    batch of B. With raw features every input is optional.
    """
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            f"max_batch_size: {_MOST_REQUESTS}",
            "dynamic_batching { }",
            _blocks(tensors, has_batches=True),
            f"instance_group [ {{ count: 1 kind: KIND_{kind} }} ]",
            "",
        ]
    )


def triton_faults(folder: Path, tensors: TritonTensors) -> Iterator[str]:
    """Yield a line for each file of a model in which Triton would refuse requests or answers of a version."""
    for path, text in _files(folder):
        if found := "; ".join(_differences(text, tensors)):
            yield f"{path} does not fit the version: {found}"


def write_triton_files(folder: Path, tensors: TritonTensors) -> list[Path]:
    """Give the files of a model that do not fit a version its inputs and outputs; the rest stays as it is.

    Returns:
        the files that were written.

    Raises:
        ConfigError: a file is not in protobuf's text form.
        OutputError: a file cannot be written.
    """
    written = []
    for path, text in _files(folder):
        if not _differences(text, tensors):
            continue
        content = _rewritten(text, tensors, str(path)).encode(errors="surrogateescape")
        try:
            with atomic_write(path) as file:
                file.write(content)
        except OSError as err:
            raise OutputError(f"{path}: cannot be written: {err.strerror or err}") from err
        written.append(path)
    return written


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    for file in TRITON_FILES.values():
        try:
            yield folder / file, read_regular(folder / file, _MOST_BYTES).decode(errors="surrogateescape")
        except OSError:
            continue  # without the file, Triton does not load the model


def _differences(text: str, tensors: TritonTensors) -> list[str]:
    """Return how a ``config.pbtxt`` differs from a version."""
    try:
        members = _read(text)
    except ValueError as err:
        return [str(err)]
    inputs, outputs = _entries(members, "input"), _entries(members, "output")
    absent = [name for name, _, _ in tensors.inputs if name not in (*inputs, CANDIDATES)]
    faults = [f"no input {', '.join(absent)}"] if absent else []
    for name, datatype, is_optional in tensors.inputs:
        given = inputs.get(name)
        if given is not None and is_optional and given.get("optional") != "true":
            faults.append(f"input {name} is not optional")
        if given is not None and (name, datatype) in tensors.raw_inputs and given.get("data_type") != datatype:
            faults.append(f"input {name} is {given.get('data_type')}, not {datatype}")
    of_version = {output.name: output for output in tensors.outputs}
    faults += [f"no output {output.name}" for output in default_outputs(tensors.outputs) if output.name not in outputs]
    for name, given in outputs.items():
        columns = given.get("dims")
        columns = columns[-1] if isinstance(columns, list) and columns else columns
        if name not in (*of_version, *_RANKINGS):  # Triton asks for every output if a request names none
            faults.append(f"output {name}, which the version does not have")
        elif name in of_version and columns not in ("-1", str(of_version[name].width)):
            faults.append(f"{name} has {columns} columns, not {of_version[name].width}")
    return faults


def _rewritten(text: str, tensors: TritonTensors, source: str) -> str:
    """Return a ``config.pbtxt`` whose inputs and outputs are those of a version."""
    try:
        members = _read(text)
    except ValueError as err:
        raise ConfigError(source, "", str(err)) from err
    has_batches = any(member.value != "0" for member in members if member.key == "max_batch_size")
    blocks, parts, end = _blocks(tensors, has_batches=has_batches), [], 0
    for member in members:
        if member.key in ("input", "output"):
            parts += [text[end : member.begin], blocks]
            blocks, end = "", member.end
    rest = text[end:]
    return "".join([*parts, rest]) if parts else f"{rest.rstrip()}\n{blocks}\n"


def _blocks(tensors: TritonTensors, *, has_batches: bool) -> str:
    """Return the inputs and the outputs. Without batches Triton runs each request alone, as the user wants it."""
    dims, columns, ragged = ("-1", "", " allow_ragged_batch: true") if has_batches else ("-1, -1", "-1, ", "")
    inputs = [
        f"  {{ name: {_quoted(name)} data_type: {datatype} dims: [ {dims} ]{ragged}"
        f"{' optional: true' if is_optional else ''} }}"
        for name, datatype, is_optional in tensors.inputs
    ]
    outputs = [
        f"{_comment(output)}  {{ name: {_quoted(output.name)} data_type: TYPE_FP32 dims: [ {columns}{output.width} ] }}"
        for output in tensors.outputs
    ]
    outputs += [
        f'  {{ name: "{name}" data_type: {datatype} dims: [ {columns}-1 ] }}' for name, datatype in _RANKINGS.items()
    ]
    return "\n".join(["input [", ",\n".join(inputs), "]", "output [", ",\n".join(outputs), "]"])


def _comment(output: Output) -> str:
    return "" if output.kind == "probability" else f"  # a {output.kind}\n"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


class _Member(NamedTuple):
    """A field of a message: a text, a list, or the members of a message, and where the field is in the text."""

    key: str
    value: Any
    begin: int
    end: int


def _read(text: str) -> list[_Member]:
    """Return the fields of a text in protobuf's form. Raise ValueError if it has another form."""
    try:
        return list(_members(_Tokens(text)))
    except RecursionError as err:
        raise ValueError("its text is nested too deeply") from err


class _Tokens:
    """The tokens of a text in protobuf's form, without comments."""

    def __init__(self, text: str) -> None:
        self._found = [found for found in _TOKEN.finditer(text) if not found[0].isspace() and found[0][0] != "#"]
        self._next = 0
        self.begin = self.end = 0  # of the last token

    @property
    def ahead(self) -> str:
        """The next token; an empty text at the end."""
        return self._found[self._next][0] if self._next < len(self._found) else ""

    def take(self) -> str:
        """Return the next token. Raise ValueError at the end of the text."""
        if not self.ahead:
            raise ValueError("its text ends too early")
        found = self._found[self._next]
        self._next += 1
        self.begin, self.end = found.span()
        return found[0]


def _members(tokens: _Tokens, closing: str = "") -> Iterator[_Member]:
    """Yield the fields up to a closing bracket, or up to the end."""
    while tokens.ahead != closing:
        key = tokens.take()
        begin = tokens.begin
        if not re.fullmatch(r"\w+", key):
            raise ValueError(f"its text has {key[:32]!r} in place of a key")
        if tokens.ahead == ":":
            tokens.take()
        value = _value(tokens)
        yield _Member(key, value, begin, tokens.end)
        if tokens.ahead in (",", ";"):
            tokens.take()
    if closing:
        tokens.take()


def _value(tokens: _Tokens) -> Any:
    token = tokens.take()
    if token in ("{", "<"):
        return list(_members(tokens, _CLOSING[token]))
    if token != "[":
        return token
    values = []
    while tokens.ahead != "]":
        values.append(_value(tokens))
        if tokens.ahead == ",":
            tokens.take()
    tokens.take()
    return values


def _entries(members: Sequence[_Member], key: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each input or output, by its name."""
    given = [member.value for member in members if member.key == key]
    entries = [{field.key: field.value for field in entry} for value in given for entry in _messages(value)]
    return {_text(entry["name"]): entry for entry in entries if isinstance(entry.get("name"), str)}


def _messages(value: Any) -> list[list[_Member]]:
    """Return the messages of a field, which may be repeated in a list."""
    if not isinstance(value, list) or all(isinstance(member, _Member) for member in value):
        return [value] if isinstance(value, list) else []
    return [member for member in value if isinstance(member, list)]


def _text(quoted: str) -> str:
    """Return the text in quotes."""
    try:
        return str(json.loads(f'"{quoted[1:-1]}"'))
    except json.JSONDecodeError:
        return quoted[1:-1]
