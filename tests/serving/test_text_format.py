"""Protobuf's text format, against protobuf itself."""

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.text_format import parse_text_format
from serving.config.version_policy import read_triton_config
from serving.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a: 1", {"a": ["1"]}),
        ("a: -1.5e3, a: TRUE; b { }", {"a": ["-1.5e3", "TRUE"], "b": [{}]}),
        ("a: [1, 2] a: 3 b: []", {"a": ["1", "2", "3"], "b": []}),
        ("a: { b < c: 1 > } # { \n", {"a": [{"b": [{"c": ["1"]}]}]}),
        ("a [ { b: 1 }, { } ]", {"a": [{"b": ["1"]}, {}]}),
        (r"""a: 'it\'s' "# {" """, {"a": [r"""'it\'s# {""" + '"']}),
    ],
)
def test_members_are_read_in_their_order(text, expected):
    assert parse_text_format(text, "file") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a", "line 1: expected a colon, got the end"),
        ("a:\n", "line 2: expected a value, got the end"),
        ("a 1", "line 1: expected a colon, got '1'"),
        ("a: }", "line 1: expected a value, got '}'"),
        ("a: 1\n}", "line 2: expected a field's name, got '}'"),
        ("a { b: 1 >", "line 1: expected a field's name or }, got '>'"),
        ("a {\n\n", "line 3: expected a field's name or }, got the end"),
        ("a: [1 2]", "line 1: expected a comma or ], got '2'"),
        ('a: "x\n"', "line 1: expected protobuf's text format, got '\"'"),
        ("a: \0", r"line 1: expected protobuf's text format, got '\\x00'"),
        ("a {" * 33, "line 1: expected at most 32 levels, got the end"),
        ("a {" * 100_000, "line 1: expected at most 32 levels, got 'a'"),
    ],
)
def test_another_text_is_refused_with_its_line(text, reason):
    with pytest.raises(ConfigError, match=f"^file: {reason}$"):
        parse_text_format(text, "file")


CONFIG = """name: "m" backend: 'python' max_batch_size: 4 dynamic_batching { } # a comment
input [ { name: "DES" data_type: TYPE_FP32 dims: [ -1 ] optional: true }, { name: "x" "y" dims: 1; dims: 2 } ]
version_policy: { specific < versions: [1, 3] > }, parameters { key: "a" value { string_value: "b" } }
"""
_TOKENS = [*"{}[]<>:,;1#\n", '"a"', "all", "latest", "num_versions", "versions"]


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(CONFIG)), st.integers(0, 3), st.sampled_from(["", *_TOKENS])), max_size=2
    )
)
def test_what_protobuf_reads_is_read_and_means_the_same(changes, tmp_path_factory):
    text = CONFIG
    for at, removed, added in changes:
        text = f"{text[:at]}{added}{text[at + removed :]}"
    try:
        message = text_format.Parse(text, ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError):
        message = None
    folder = tmp_path_factory.getbasetemp() / "m"
    folder.mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    if message is None or message.name not in ("", "m"):
        return
    kind = message.version_policy.WhichOneof("policy_choice")
    if kind is None or (kind == "specific" and not message.version_policy.specific.versions):
        return
    policy = read_triton_config(folder).policy

    assert policy.model_fields_set == {kind}
    if kind == "specific":
        assert policy.specific.versions == list(message.version_policy.specific.versions)


def test_every_key_of_tritons_configuration_is_known(tmp_path):
    fields = ModelConfig.DESCRIPTOR.fields_by_name
    messages = [name for name, field in fields.items() if field.message_type and name != "version_policy"]
    (tmp_path / "config.pbtxt").write_text(" ".join(f"{name} {{ a: 1 }}" for name in messages))

    assert set(messages) - {"input", "output", "instance_group"} == set(read_triton_config(tmp_path).without_effect)
