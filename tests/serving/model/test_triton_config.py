"""Triton's configuration of a model, with protobuf's own reader as the oracle."""

import re

import pytest

from serving.errors import ConfigError
from serving.model.records import Output
from serving.model.triton_config import TritonTensors, triton_config, triton_faults, write_triton_files

pytest.importorskip("grpc", reason="the extra grpc is not installed")
text_format = pytest.importorskip("google.protobuf.text_format")
model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")

ONE = (Output("OUTPUT0"),)
RAW = TritonTensors(
    2,
    (Output("OUTPUT0", width=3),),
    [("user", "TYPE_STRING"), ('a "b" \u65e5\u672c', "TYPE_INT64"), ("tags.offsets", "TYPE_INT32")],
)
KEPT = """# of the team
name: 'ctr' backend: "python"
max_batch_size: 8;
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] } ]
input { name: "old" data_type: TYPE_FP32 dims: [ -1 ] optional: true }  # of an earlier version
instance_group [ { count: 2, kind: KIND_CPU } ]
parameters { key: "engine" value: { string_value: "input [ { name: 'x' } ]" } }
output < name: "OUTPUT0", data_type: TYPE_FP32, dims: 1 >
# the end"""


def parsed(text):
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.pbtxt").write_text(KEPT)
    return tmp_path


@pytest.mark.parametrize("tensors", [TritonTensors(0, ONE), TritonTensors(13, ONE), RAW])
def test_a_written_configuration_fits_its_version(tmp_path, tensors):
    text = triton_config("ctr", tensors, "GPU")
    (tmp_path / "config.pbtxt").write_text(text)

    inputs = {entry.name: entry for entry in parsed(text).input}

    raw = [name for name, _ in tensors.raw_inputs]
    assert list(inputs) == ["DES", "CATCOLUMN", "ROWINDEX", *raw, *(["CANDIDATES"] if raw else [])]
    assert [entry.optional for entry in inputs.values()][:3] == [
        tensors.dense_dim == 0 or tensors is RAW,
        tensors is RAW,
        True,
    ]
    assert list(triton_faults(tmp_path, tensors)) == []


def test_the_difference_is_one_line_for_each_file(folder):
    (line,) = triton_faults(folder, RAW)

    names = 'CATCOLUMN, ROWINDEX, user, a "b" \u65e5\u672c, tags.offsets'
    what = f"no input {names}; input DES is not optional; OUTPUT0 has 1 columns, not 3"
    assert line == f"{folder / 'config.pbtxt'} does not fit the version: {what}"


def test_a_rewritten_file_keeps_all_that_is_not_an_input_or_output(folder):
    before = parsed(KEPT)

    assert write_triton_files(folder, RAW) == [folder / "config.pbtxt"]

    text = (folder / "config.pbtxt").read_text()
    after = parsed(text)
    assert list(triton_faults(folder, RAW)) == []
    expected = parsed(triton_config("ctr", RAW, "CPU"))
    assert (after.input, after.output) == (expected.input, expected.output)
    for message in (before, after):
        del message.input[:], message.output[:]
    assert before == after
    assert text.startswith("# of the team")
    assert text.endswith("# the end")
    assert write_triton_files(folder, RAW) == []


@pytest.mark.parametrize("text", ["max_batch_size: 0", 'name: "ctr"'])
def test_a_file_without_batches_keeps_none(folder, text):
    (folder / "config.pbtxt").write_text(text)

    write_triton_files(folder, RAW)

    config = parsed((folder / "config.pbtxt").read_text())
    assert list(config.input[0].dims) == [-1, -1]
    assert list(config.output[0].dims) == [-1, 3]
    assert not any(entry.allow_ragged_batch for entry in config.input)
    assert list(triton_faults(folder, RAW)) == []


def test_a_raw_feature_of_another_type_is_a_difference(folder):
    (folder / "config.pbtxt").write_text(triton_config("ctr", RAW, "CPU").replace("TYPE_STRING", "TYPE_INT64"))

    (line,) = triton_faults(folder, RAW)

    assert line.endswith("input user is TYPE_INT64, not TYPE_STRING")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("changed by hand", "its text ends too early"),
        ("input [ { name: 'x'", "its text ends too early"),
        ("a {" * 2000, "its text is nested too deeply"),
        ("[1]", "its text has '[' in place of a key"),
        ('name: "a', "its text ends too early"),
    ],
)
def test_a_file_that_cannot_be_read_is_never_rewritten(folder, text, reason):
    (folder / "config.pbtxt").write_text(text)

    assert [line.endswith(reason) for line in triton_faults(folder, RAW)] == [True]
    with pytest.raises(ConfigError, match=re.escape(reason)):
        write_triton_files(folder, RAW)

    assert (folder / "config.pbtxt").read_text() == text


def test_a_model_without_the_file_has_no_differences(tmp_path):
    assert list(triton_faults(tmp_path, RAW)) == []
    assert write_triton_files(tmp_path, RAW) == []
