"""Size limits of ONNX files; the tests of networks cover the rest of ``serving.dense.onnx_file``."""

from types import SimpleNamespace

import pytest

from serving.dense import onnx_file

onnx = pytest.importorskip("onnx")


def too_large():
    """Fail as protobuf does for more than 2 GiB, without the memory."""
    from google.protobuf.message import EncodeError

    raise EncodeError("Failed to serialize proto")


def test_a_model_is_written_unchanged():
    model = onnx.ModelProto(producer_name="somebody")

    assert onnx.load_model_from_string(onnx_file.serialized(model)) == model


def test_a_model_of_more_than_two_gib_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="it has more than 2,147,483,647 bytes, the limit of an ONNX file"):
        onnx_file.serialized(SimpleNamespace(SerializeToString=too_large))

    monkeypatch.setattr(onnx_file, "_LARGEST_BYTES", 3)
    with pytest.raises(ValueError, match="it has 10 bytes; the limit of an ONNX file is 3"):
        onnx_file.serialized(onnx.ModelProto(producer_name="somebody"))
