"""Every file of a model, damaged in every usual way: the error names the file, what was expected and what came.

One model is written byte by byte: three tables, of which ``user`` and ``item`` are twins in size, and the two files of
``tag`` are (two floats are as long as a key), and a BatchNorm. It is opened from its folder as a server would.
"""

import json
import shutil
import struct
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.config import read_ps_config
from serving.dense.onnx import build_onnx
from serving.errors import ConfigError, ModelFileError, RequestError, ServingError
from serving.model.graph import parse_graph
from serving.model.manifest import write_manifest
from serving.model.sparse_file import open_sparse
from serving.opening import load_model

DIMS = {"user": 3, "item": 3, "tag": 2}
KEYS = {"user": [1, 2, 3, 4, 5], "item": [6, 7, 8, 9, 10], "tag": [11, 12, 13, 14]}
WIDTH = 1 + sum(DIMS.values())


def document():
    embeddings = [
        {
            "name": name, "type": "LocalizedSlotSparseEmbeddingHash", "bottom": f"{name}_keys", "top": f"{name}_rows",
            "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"},
        }
        for name, dim in DIMS.items()
    ]  # fmt: skip
    data = {
        "type": "Data",
        "label": {"label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 1},
        "sparse": [{"top": f"{name}_keys", "slot_num": 1, "nnz_per_slot": 4} for name in DIMS],
    }
    return {
        "inference": {
            "input_key_type": "I64", "dense_model_file": "dense.model", "sparse_model_file": list(DIMS),
        },
        "layers": [
            data,
            *embeddings,
            *({"type": "Reshape", "bottom": f"{name}_rows", "top": name, "leading_dim": d} for name, d in DIMS.items()),
            {"type": "Concat", "bottom": [*DIMS, "dense"], "top": "all"},
            {"type": "BatchNorm", "bottom": "all", "top": "normal", "bn_param": {"factor": 0.9, "eps": 1e-5}},
            {"type": "InnerProduct", "bottom": "normal", "top": "logit", "fc_param": {"num_output": 1}},
            {"type": "Sigmoid", "bottom": "logit", "top": "click"},
        ],
    }  # fmt: skip


def floats(count, seed):
    return np.random.default_rng(seed).normal(0, 1, count).astype("<f4")


def write_model(folder):
    """Write the version ``<folder>/ads/1`` with a manifest; return it."""
    version = folder / "ads" / "1"
    version.mkdir(parents=True)
    (version / "graph.json").write_text(json.dumps(document(), indent=1))
    (version / "dense.model").write_bytes(floats(3 * WIDTH + 1, 1).tobytes())
    statistics = {"type": "BatchNorm", "mean": [0.5] * WIDTH, "var": [1.5] * WIDTH}
    (version / "dense.model.ntp.json").write_text(json.dumps({"layers": [statistics]}))
    for seed, (name, dim) in enumerate(DIMS.items()):
        keys = KEYS[name]
        (version / name).mkdir()
        (version / name / "key").write_bytes(struct.pack(f"<{len(keys)}q", *keys))
        (version / name / "emb_vector").write_bytes(floats(len(keys) * dim, 10 + seed).tobytes())
        (version / name / "slot_id").write_bytes(struct.pack(f"<{len(keys)}Q", *([seed] * len(keys))))
    write_manifest(version, "ads", 1)
    return version


FILES = [
    "graph.json",
    "dense.model",
    "dense.model.ntp.json",
    *(f"{n}/{f}" for n in DIMS for f in ("key", "emb_vector")),
]

PAIRS = list(combinations(FILES, 2))


@pytest.fixture
def version(tmp_path):
    return write_model(tmp_path)


@pytest.fixture
def bare(version):
    """The same model without a manifest, as HugeCTR writes it."""
    (version / "manifest.json").unlink()
    return version


def opened(version):
    """Open the model and predict one sample with it."""
    with load_model(version, engine="numpy") as session:
        return session.predict([0.25], [2, 7, 12], [0, 1, 2, 3])


def refusal(version, kind=ModelFileError):
    with pytest.raises(kind) as caught:
        opened(version)
    return str(caught.value)


def test_the_undamaged_model_is_right(version):
    normal = np.concatenate(
        [floats(len(KEYS[n]) * d, 10 + i).reshape(-1, d)[1] for i, (n, d) in enumerate(DIMS.items())]
    )
    normal = (np.append(normal, 0.25) - 0.5) / np.sqrt(1.5 + 1e-5)
    gamma, beta, weight, bias = np.split(floats(3 * WIDTH + 1, 1).astype(float), [WIDTH, 2 * WIDTH, 3 * WIDTH])

    expected = 1 / (1 + np.exp(-((normal * gamma + beta) @ weight + bias)))

    np.testing.assert_allclose(opened(version), [expected], rtol=1e-5)


DAMAGE = {
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a byte less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, "a byte more") for name in [*FILES, "user/slot_id"]), *(("user/key", damage) for damage in DAMAGE)],
)
def test_the_manifest_reveals_every_damaged_file(version, name, damage):
    size_bytes = (version / name).stat().st_size
    DAMAGE[damage](version / name)

    message = refusal(version)

    if damage in ("missing", "a folder"):
        assert message == f"{version / name}: named by the manifest, but {damage}"
    else:
        found = (version / name).stat().st_size
        assert message == f"{version / name}: expected {size_bytes:,} bytes, found {found:,}"


@pytest.mark.parametrize("name", [*FILES, "user/slot_id"])
def test_the_manifest_reveals_a_changed_bit_in_every_file(version, name):
    content = bytearray((version / name).read_bytes())
    content[len(content) // 2] ^= 1
    (version / name).write_bytes(content)

    assert refusal(version).startswith(f"{version / name}: expected SHA-256 ")


WITHOUT_MANIFEST = {
    (
        "dense.model",
        "a byte more",
    ): "expected 112 bytes (normal.gamma 9, normal.beta 9, logit.weight 9x1, logit.bias 1)",
    ("dense.model", "a byte less"): "expected 112 bytes (",
    ("dense.model", "empty"): "expected 112 bytes (",
    ("dense.model", "missing"): "no such file",
    ("dense.model", "a folder"): "cannot be read: not a regular file",
    ("dense.model.ntp.json", "a byte more"): "line 1 column 145: Extra data",
    ("dense.model.ntp.json", "a byte less"): "line 1 column 144: the text ends too early",
    ("dense.model.ntp.json", "empty"): "line 1 column 1: the file is empty",
    ("dense.model.ntp.json", "missing"): "no such file; it holds the mean and variance of normal",
    ("dense.model.ntp.json", "a folder"): "cannot be read: not a regular file",
    ("user/key", "a byte more"): "expected a multiple of 8 bytes, at least 8, found 41",
    ("user/key", "a byte less"): "expected a multiple of 8 bytes, at least 8, found 39",
    ("user/key", "empty"): "expected a multiple of 8 bytes, at least 8, found 0",
    ("user/key", "missing"): "no such file",
    ("user/key", "a folder"): "not a regular file",
    ("item/emb_vector", "a byte more"): "expected 60 bytes for 5 keys of 12 bytes, found 61",
    ("item/emb_vector", "a byte less"): "expected 60 bytes for 5 keys of 12 bytes, found 59",
    ("item/emb_vector", "empty"): "expected 60 bytes for 5 keys of 12 bytes, found 0",
    ("item/emb_vector", "missing"): "no such file",
    ("item/emb_vector", "a folder"): "not a regular file",
    ("tag/slot_id", "a byte more"): "expected 32 bytes for 4 keys of 8 bytes, found 33",
    ("tag/slot_id", "a byte less"): "expected 32 bytes for 4 keys of 8 bytes, found 31",
    ("tag/slot_id", "empty"): "expected 32 bytes for 4 keys of 8 bytes, found 0",
    ("tag/slot_id", "a folder"): "not a regular file",
}


@pytest.mark.parametrize(("name", "damage"), WITHOUT_MANIFEST)
def test_every_damaged_file_is_refused_without_a_manifest_too(bare, name, damage):
    DAMAGE[damage](bare / name)

    assert refusal(bare).startswith(f"{bare / name}: {WITHOUT_MANIFEST[name, damage]}")


@pytest.mark.parametrize("is_version", [True, False])
@pytest.mark.parametrize("name", ["user/slot_id", "user/meta", "manifest.json"])
def test_an_optional_file_that_is_a_dead_link_is_refused(bare, name, is_version):
    folder = bare if is_version else bare.rename(bare.with_name("export"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")

    assert refusal(folder).startswith(str(folder / name))


def test_a_ps_json_that_is_a_dead_link_is_refused(version):
    ps = version.parent.parent / "ps.json"
    ps.symlink_to("gone")

    assert refusal(version, ConfigError) == f"{ps}: cannot be read: a link to a file that does not exist"


@pytest.mark.parametrize("name", ["dense.model", "user", "user/key", "graph.json"])
def test_links_in_a_circle_are_refused(bare, name):
    (bare / name).rename(bare.parent / "elsewhere")
    (bare / name).symlink_to(bare / name)

    assert name.partition("/")[0] in refusal(bare, ServingError)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("a byte more", "line 56 column 2: Extra data"),
        ("a byte less", "line 56 column 1: the text ends too early"),
        ("empty", "line 1 column 1: the file is empty"),
    ],
)
def test_a_damaged_graph_is_refused_without_a_manifest_too(bare, damage, message):
    DAMAGE[damage](bare / "graph.json")

    lines = len(json.dumps(document(), indent=1).splitlines())
    assert refusal(bare, ConfigError).startswith(f"{bare / 'graph.json'}: {message.replace('56', str(lines))}")


def test_a_column_with_one_row_more_or_less_is_refused(bare):
    key, vector = bare / "user" / "key", bare / "user" / "emb_vector"
    whole = key.read_bytes(), vector.read_bytes()

    key.write_bytes(whole[0] + whole[0][:8])
    assert refusal(bare) == f"{vector}: expected 72 bytes for 6 keys of 12 bytes, found 60"

    key.write_bytes(whole[0])
    vector.write_bytes(whole[1][:-12])
    assert refusal(bare) == f"{vector}: expected 60 bytes for 5 keys of 12 bytes, found 48"


@pytest.mark.parametrize("damage", ["a byte more", "a byte less", "empty"])
def test_a_damaged_manifest_is_refused(version, damage):
    (version / "manifest.json").write_bytes((version / "manifest.json").read_bytes().strip())
    DAMAGE[damage](version / "manifest.json")

    assert refusal(version).startswith(f"{version / 'manifest.json'}: line ")


def test_a_model_without_a_manifest_answers_the_same(version):
    answer = opened(version)
    (version / "manifest.json").unlink()

    assert np.array_equal(opened(version), answer)


def exchange(one, other):
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


# Without a manifest two files of one length and one form look the same.
TWINS = [("user/key", "item/key"), ("user/emb_vector", "item/emb_vector"), ("tag/key", "tag/emb_vector")]


@pytest.mark.parametrize(("one", "other"), [*TWINS, ("graph.json", "dense.model")], ids=" and ".join)
def test_the_manifest_reveals_any_two_swapped_files(version, one, other):
    exchange(version / one, version / other)

    message = refusal(version, ServingError)

    assert message.startswith((f"{version / one}: expected ", f"{version / other}: expected "))


@pytest.mark.parametrize(("one", "other"), [x for x in PAIRS if x not in TWINS], ids=" and ".join)
def test_swapped_files_are_refused_without_a_manifest_too_except_twins(bare, one, other):
    exchange(bare / one, bare / other)

    message = refusal(bare, ServingError)

    tables = {str(bare / Path(name).parent) for name in (one, other) if "/" in name}
    assert message.startswith((f"{bare / one}: ", f"{bare / other}: ", *(f"{table}/emb_vector: " for table in tables)))


def test_swapped_tables_of_different_dimensions_are_refused(bare):
    exchange(bare / "user", bare / "tag")

    message = "expected 48 bytes for 4 keys of 12 bytes, found 32, as if of 2 floats each"
    assert refusal(bare) == f"{bare / 'user' / 'emb_vector'}: {message}"


def test_only_the_manifest_reveals_swapped_tables_of_one_size(version):
    exchange(version / "user", version / "item")

    assert refusal(version).startswith(f"{version / 'item' / 'emb_vector'}: expected SHA-256 ")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param([], "layers: expected a list of objects, got an empty list", id="of no layer"),
        pytest.param([WIDTH, 4], "layers: expected 1 entries, for normal, found 2", id="of two layers"),
        pytest.param([WIDTH - 1], "layers[0].mean: expected 9 numbers, the columns of normal, got 8", id="narrower"),
        pytest.param([WIDTH + 1], "layers[0].mean: expected 9 numbers, the columns of normal, got 10", id="wider"),
    ],
)
def test_the_statistics_of_another_model_are_refused(bare, entries, message):
    layers = [{"type": "BatchNorm", "mean": [0.0] * columns, "var": [1.0] * columns} for columns in entries]
    (bare / "dense.model.ntp.json").write_text(json.dumps({"layers": layers}))

    assert refusal(bare) == f"{bare / 'dense.model.ntp.json'}: {message}"


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("dense.model", WIDTH + 2, "dense.model: normal.beta has weights that are NaN or infinite"),
        ("dense.model", -1, "dense.model: logit.bias has weights that are NaN or infinite"),
        ("item/emb_vector", 4, "item: the row of key 7 has values that are NaN or infinite"),
    ],
)
def test_numbers_that_are_not_finite_are_reported_by_layer_or_key(bare, caplog, name, place, message, value):
    numbers = np.fromfile(bare / name, "<f4")
    numbers[place] = value
    numbers.tofile(bare / name)

    if np.isnan(value):  # the sigmoid of an infinity is a number
        assert refusal(bare, RequestError).startswith("sample 0: the network's answer is [nan], not a finite number")
    else:
        assert opened(bare).item() in (0, 1)

    assert f"{bare}/{message}" in caplog.text


@pytest.mark.parametrize("text", ["NaN", "nan", "inf", "-Infinity", "1e39", "null", '"0.5"', "true"])
def test_statistics_that_are_not_numbers_are_refused(bare, text):
    file = bare / "dense.model.ntp.json"
    file.write_text(file.read_text().replace("0.5", text, 1))

    assert refusal(bare).startswith(f"{file}: ")


@pytest.fixture(scope="module")
def network():
    """The dense network as ONNX, which an export puts next to the model."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("ndonnx")
    graph = parse_graph(document(), "graph.json")
    weights = np.split(floats(3 * WIDTH + 1, 1), [WIDTH, 2 * WIDTH, 3 * WIDTH])
    arrays = dict(zip(("normal.gamma", "normal.beta", "logit.weight", "logit.bias"), weights, strict=True))
    arrays["logit.weight"] = arrays["logit.weight"].reshape(WIDTH, 1)
    statistics = {"normal.mean": np.full(WIDTH, 0.5, "f4"), "normal.var": np.full(WIDTH, 1.5, "f4")}
    return build_onnx(graph, arrays | statistics)


@pytest.mark.parametrize("damage", [*DAMAGE, "that of another model"])
def test_the_manifest_reveals_a_damaged_onnx_network_which_is_not_used_without_a_manifest(
    version, network, caplog, damage
):
    expected = opened(version)
    file = version / "dense.onnx"
    file.write_bytes(network)
    write_manifest(version, "ads", 1)
    if damage in DAMAGE:
        DAMAGE[damage](file)
    else:
        file.write_bytes(network.replace(b"hotrow_digest", b"hotrow_Digest"))

    assert refusal(version).startswith(f"{file}: ")

    (version / "manifest.json").unlink()
    with load_model(version, engine="onnx") as session:
        np.testing.assert_allclose(session.predict([0.25], [2, 7, 12], [0, 1, 2, 3]), expected, rtol=1e-5)
    assert damage in ("missing", "a folder") or f"{file}: " in caplog.text


PS = {
    "supportlonglong": True,
    "models": [
        {
            "model": "ads", "sparse_files": list(DIMS), "dense_file": "dense.model", "network_file": "graph.json",
            "gpucache": False,
        }
    ],
}  # fmt: skip


def write_ps(version):
    (version / "ps.json").write_text(json.dumps(PS, indent=1))


def open_ps(version):
    return read_ps_config(version / "ps.json")


READERS = {"graph.json": opened, "dense.model.ntp.json": opened, "manifest.json": opened, "ps.json": open_ps}

NOT_JSON = {
    "a comment": (lambda b: b.replace(b"{", b"{ // so it is\n", 1), "line 1 column 3: comments are not JSON"),
    "a comment of C": (lambda b: b.replace(b"{", b"{ /* so */", 1), "line 1 column 3: comments are not JSON"),
    "a comment of Python": (lambda b: b"# so it is\n" + b, "line 1 column 1: comments are not JSON"),
    "a trailing comma": (lambda b: b[:-1] + b",}", "a comma before the closing bracket"),
    "single quotes": (lambda b: b.replace(b'"', b"'"), "strings need double quotes"),
    "a byte order mark": (lambda b: b"\xef\xbb\xbf" + b, "byte order mark"),
    "another encoding": (lambda b: b.decode().encode("utf-16"), "not UTF-8: byte 0 is 0xff"),
    "a letter of Latin 1": (lambda b: b.replace(b"{", b'{"\xe9": 1, ', 1), "not UTF-8: byte 2 is 0xe9"),
    "a key twice": (lambda b: b.replace(b"{", b'{"a": 1, "a": 1, ', 1), 'the key "a" appears twice in one object'),
    "a number that is none": (lambda b: b.replace(b"{", b'{"a": NaN, ', 1), "NaN is not a finite number"),
    "a number too large": (lambda b: b.replace(b"{", b'{"a": 1e999, ', 1), "1e999 is not a finite number"),
    "a number too long": (lambda b: b.replace(b"{", b'{"a": ' + b"1" * 5000 + b", ", 1), "more digits than"),
    "too many brackets": (lambda b: b.replace(b"{", b'{"a": ' + b"[" * 100_000, 1), "nested too deeply"),
    "two documents": (lambda b: b + b, "Extra data"),
    "nothing but blanks": (lambda b: b"\n \n", "the file is empty"),
    "a list": (lambda b: b"[" + b + b"]", ""),
    "null": (lambda b: b"null", ""),
    "an unknown key": (lambda b: b.replace(b"{", b'{"colour": 1, ', 1), "colour: unknown key"),
}
#: What each reader must refuse; the rest is refused before a reader sees it.
OF_READERS = ("a key twice", "a list", "null", "an unknown key")
#: A manifest may have members of a later release.
MAY_HAVE_MORE = "manifest.json"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        pytest.param(name, *fault, id=f"{title}-{name}")
        for title, fault in NOT_JSON.items()
        for name in (READERS if title in OF_READERS else ["graph.json"])
        if (title, name) != ("an unknown key", MAY_HAVE_MORE)
    ],
)
def test_a_file_that_is_not_strict_json_is_refused_and_named(version, name, edit, message):
    write_ps(version)
    if name != "manifest.json":
        (version / "manifest.json").unlink()
    (version / name).write_bytes(edit((version / name).read_bytes().strip()))

    with pytest.raises(ServingError) as caught:
        READERS[name](version)

    assert str(caught.value).startswith(f"{version / name}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"), [("missing", "no such file"), ("a folder", "cannot be read: not a regular file")]
)
def test_a_parameter_server_without_its_file_is_refused(version, damage, message):
    write_ps(version)
    DAMAGE[damage](version / "ps.json")

    with pytest.raises(ConfigError) as caught:
        read_ps_config(version / "ps.json")

    assert str(caught.value) == f"{version / 'ps.json'}: {message}"


SINGLE = {"distributed": "<q3f", "localized": "<qQ3f"}


@pytest.mark.parametrize("layout", SINGLE)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("a byte more", "expected a multiple of {row} bytes (I64 keys, {layout} rows, 3 floats), found {found} bytes"),
        ("a byte less", "expected a multiple of {row} bytes (I64 keys, {layout} rows, 3 floats), found {found} bytes"),
        ("empty", "the file is empty"),
        ("missing", "no such file"),
        ("a folder", "no such file"),
    ],
)
def test_a_table_in_a_single_file_is_refused_when_damaged(tmp_path, layout, damage, message):
    row = struct.Struct(SINGLE[layout])
    file = tmp_path / "0_sparse_10.model"
    slot = [0] if layout == "localized" else []
    file.write_bytes(b"".join(row.pack(key, *slot, 0.5, 0.25, 0.125) for key in (3, 1, 4)))
    DAMAGE[damage](file)
    named = file / "key" if damage == "a folder" else file
    found = file.stat().st_size if file.exists() else 0

    with pytest.raises(ModelFileError) as caught:
        open_sparse(file, 3, "I64", layout)

    assert str(caught.value).startswith(f"{named}: {message.format(row=row.size, layout=layout, found=found)}")


def test_a_dense_file_swapped_with_a_single_file_table_is_refused(bare):
    """HugeCTR v3.0's form has three files in a folder, and only their names tell them apart."""
    row = struct.Struct("<qQ3f")
    for name in ("user", "item"):
        shutil.rmtree(bare / name)
        (bare / name).write_bytes(b"".join(row.pack(key, 0, *floats(3, key).tolist()) for key in KEYS[name]))
    opened(bare)

    exchange(bare / "dense.model", bare / "user")  # its 112 bytes could be four rows of 28

    message = refusal(bare)
    assert message.startswith(f"{bare / 'dense.model'}: expected 112 bytes (")
    assert message.endswith("found 140 bytes")


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_model_with_any_bytes_changed_is_either_opened_or_refused(tmp_path_factory, data):
    version = write_model(tmp_path_factory.mktemp("model"))
    (version / "manifest.json").unlink()
    path = version / data.draw(st.sampled_from(FILES))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)

    with suppress(ServingError):
        assert 0 <= opened(version).item() <= 1
