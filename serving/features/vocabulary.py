"""Vocabularies: from values, such as the lines of a file, to the compiled file that native code opens."""

import codecs
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from kernels.host import vocabulary_file
from serving.errors import ConfigError
from serving.features.columns import joined_texts
from serving.features.definition import FeatureConfig
from serving.model.regular_file import read_regular

_MAGIC = b"HRVOCAB1"
_HEAD_BYTES = 32
_MOST_VOCABULARY_BYTES = 1 << 36


def key_count(feature: FeatureConfig, source: str, where: str) -> int | None:
    """Return how many keys a feature can give; None: any keys.

    Raises:
        ConfigError: its vocabulary cannot be read.
    """
    if feature.kind == "vocabulary":
        with compiled_vocabulary(feature, source, where) as (_, values):
            return feature.unknown_buckets + values
    if feature.boundaries is not None:
        return len(feature.boundaries) + 1
    return feature.size if feature.kind == "identity" else feature.buckets


@contextmanager
def compiled_vocabulary(feature: FeatureConfig, source: str, where: str) -> Iterator[tuple[Path, int]]:
    """Give the compiled vocabulary of a feature, made from a file with a value in each line, and its number of values.

    Raises:
        ConfigError: it cannot be read, is empty, or has a value twice.
    """
    path, where = feature.vocabulary, f"{where}.vocabulary"
    try:
        if path is None:
            lines = [str(value).encode() for value in feature.values or ()]
            compiled, values = _compiled(lines, source, where.replace("vocabulary", "values"), "value")
        else:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if head.startswith(_MAGIC):
                yield path, int(np.frombuffer(head[8:16].ljust(8, b"\0"), "<u8")[0])
                return
            compiled, values = _compiled_lines(read_regular(path, _MOST_VOCABULARY_BYTES), source, where)
        with NamedTemporaryFile(prefix="hotrow-vocabulary-") as made:
            made.write(compiled)
            made.flush()
            yield Path(made.name), values
    except OSError as err:
        raise ConfigError(source, where, f"{path}: {(err.strerror or str(err)).lower()}") from err


def vocabulary_values(feature: FeatureConfig) -> list[str]:
    """Return the values of a feature's vocabulary, in their order.

    Raises:
        ConfigError: it cannot be read.
    """
    with compiled_vocabulary(feature, feature.name, feature.name) as (path, count):
        content = path.read_bytes()
    buckets = int(np.frombuffer(content, "<u8", 1, 16)[0])
    begins = np.frombuffer(content, "<u8", count + 1, _HEAD_BYTES)
    texts = content[_HEAD_BYTES + begins.nbytes + 4 * buckets :]
    return [texts[begin:end].decode() for begin, end in pairwise(begins.tolist())]


def _compiled_lines(content: bytes, source: str, where: str) -> tuple[bytes, int]:
    """Return the bytes of a compiled vocabulary of the lines of a text file, and how many values it has.

    Raises:
        ConfigError: a line is empty or repeated, the text is not UTF-8, or there is no line.
    """
    if content.decode("utf-8", "replace").encode() != content:
        raise ConfigError(source, where, "expected text in UTF-8")
    content = content.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    if b"" in lines:
        raise ConfigError(source, where, f"line {lines.index(b'') + 1} is empty; expected a value in each line")
    return _compiled(lines, source, where, "line")


def _compiled(lines: Sequence[bytes], source: str, where: str, what: str) -> tuple[bytes, int]:
    compiled = vocabulary_file(*joined_texts(lines)[:3])
    if isinstance(compiled, tuple):
        first, second = (number + 1 for number in compiled)
        value = lines[second - 1].decode()
        raise ConfigError(source, where, f"{value[:64]!r} is in {what} {first} and in {what} {second}")
    return compiled, len(lines)
