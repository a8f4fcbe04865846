"""Checkpoints of PyTorch and safetensors, written by these libraries themselves."""

import json
import struct
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from serving.errors import MissingExtraError, ModelFileError
from serving.sources import open_checkpoint, open_table

WIDTHS = [torch.float32, torch.float16, torch.bfloat16]


def save_torch(tensors, path):
    torch.save(tensors, path)


def save_legacy(tensors, path):
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_safetensors(tensors, path):
    safetensors.torch.save_file(tensors, path)


SAVERS = [
    pytest.param(save_torch, "model.pt", id="pt"),
    pytest.param(save_legacy, "model.pth", id="pth of PyTorch 1.5"),
    pytest.param(save_safetensors, "model.safetensors", id="safetensors"),
]


def vectors_of(rows, batch_rows=7):
    batches = list(rows.batches(batch_rows))
    assert np.concatenate([keys for keys, _ in batches]).tolist() == list(range(rows.rows))
    assert all(vectors.dtype == np.float32 for _, vectors in batches)
    return np.concatenate([vectors for _, vectors in batches])


@pytest.mark.parametrize(("save", "name"), SAVERS)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_value_is_widened_exactly(tmp_path, save, name, dtype):
    tensor = torch.randn(20, 3).to(dtype)
    tensor[0] = torch.tensor([0.0, -0.0, 1e-7])
    save({"other": torch.arange(9), "ads": tensor}, tmp_path / name)

    rows = open_table("ads", tmp_path / name)

    assert (rows.rows, rows.dim, rows.keys) == (20, 3, None)
    assert vectors_of(rows).tobytes() == tensor.float().numpy().tobytes()


@pytest.mark.parametrize(("save", "name"), SAVERS)
@pytest.mark.parametrize(
    "tensor_name",
    [
        "ads",
        "ads.weight",
        "tables.ads.weight",
        "module._orig_mod.tables.ads",
        "embedding_bags.ads.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.ads.weight",
        "model.ec.embeddings.ads.weight",
    ],
)
def test_a_table_is_found_by_its_name_whatever_is_around_it(tmp_path, save, name, tensor_name):
    tensors = {tensor_name: torch.randn(4, 3), "ads2.weight": torch.randn(4, 3), "over_arch.bias": torch.randn(3)}
    save(tensors, tmp_path / name)

    assert vectors_of(open_table("ads", tmp_path / name)).tolist() == tensors[tensor_name].tolist()
    assert vectors_of(open_table("x", f"{tmp_path / name}#{tensor_name}")).tolist() == tensors[tensor_name].tolist()


@pytest.mark.parametrize("table", ["item.id", "Item.ID table", "ads.weight", "a.b.c"])
@pytest.mark.parametrize("form", ["{}", "{}.weight", "module.tables.{}.weight", "tables.{}"])
def test_a_table_whose_name_has_dots_is_found_too(tmp_path, table, form):
    save_torch({form.format(table): torch.ones(2, 3), "user.id.x": torch.ones(9, 9)}, tmp_path / "m.pt")

    assert open_table(table, tmp_path / "m.pt").rows == 2


@pytest.mark.parametrize(("there", "wanted"), [("item_id", "id"), ("m.id", "item.id"), ("item.weight", "weight")])
def test_a_table_is_not_found_by_a_part_of_its_name(tmp_path, there, wanted):
    save_torch({there: torch.ones(2, 3)}, tmp_path / "m.pt")

    with pytest.raises(ModelFileError, match=f"no table '{wanted}'"):
        open_table(wanted, tmp_path / "m.pt")


@pytest.mark.parametrize(("save", "name"), SAVERS)
def test_weights_of_layers_are_not_taken_for_tables(tmp_path, save, name):
    model = nn.ModuleDict({"ads": nn.EmbeddingBag(5, 3), "dense": nn.Linear(13, 4), "norm": nn.LayerNorm(4)})
    save(model.state_dict(), tmp_path / name)

    assert open_checkpoint(tmp_path / name).tables() == ["ads.weight"]


def test_a_table_in_a_torchrec_collection_is_preferred(tmp_path):
    save_torch(
        {"ebc.embedding_bags.ads.weight": torch.ones(2, 3), "over.ads.weight": torch.ones(9, 9)}, tmp_path / "m.pt"
    )

    assert open_table("ads", tmp_path / "m.pt").dim == 3


def test_tensors_in_inner_dictionaries_have_dotted_names(tmp_path):
    checkpoint = {"epoch": 3, "model": {"ads.weight": torch.ones(2, 3)}, "optimizer": {"state": {0: torch.ones(2)}}}
    save_torch(checkpoint, tmp_path / "m.pt")

    assert open_checkpoint(tmp_path / "m.pt").names() == ["model.ads.weight", "optimizer.state.0"]


def test_a_dictionary_inside_itself_is_read_once(tmp_path):
    tensors = {"inner": {"ads": torch.ones(2, 3)}}
    tensors["inner"]["outer"] = tensors
    for _ in range(40):
        tensors = {"left": tensors, "right": tensors}
    torch.save(tensors, tmp_path / "model.pt")

    assert open_checkpoint(tmp_path / "model.pt").names() == [".".join(["left"] * 40 + ["inner.ads"])]


def test_rows_of_a_view_are_read_in_its_order(tmp_path):
    tensor = torch.randn(3, 20).T  # not contiguous
    save_torch({"ads": tensor}, tmp_path / "m.pt")

    assert vectors_of(open_table("ads", tmp_path / "m.pt")).tolist() == tensor.tolist()


class TestRefused:
    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_an_unknown_name_with_the_nearest_names(self, tmp_path, save, name):
        save({"bags.adds.weight": torch.ones(2, 3), "bags.users.weight": torch.ones(2, 3)}, tmp_path / name)

        with pytest.raises(ModelFileError, match=r"no table 'ads'; nearest are 'bags\.adds\.weight'"):
            open_table("ads", tmp_path / name)
        with pytest.raises(ModelFileError, match=r"no table 'bags\.user\.weight'; nearest are 'bags\.users\.weight'"):
            open_table("ads", f"{tmp_path / name}#bags.user.weight")
        with pytest.raises(ModelFileError, match=r"no table 'xyz'; found 'bags\.adds\.weight', 'bags\.users"):
            open_table("xyz", tmp_path / name)

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    def test_a_name_that_matches_two_tensors(self, tmp_path, save, name):
        save({"a.ads.weight": torch.ones(2, 3), "b.ads.weight": torch.zeros(2, 3)}, tmp_path / name)

        with pytest.raises(
            ModelFileError, match=r"several entries may be the table 'ads': 'a\.ads\.weight', 'b\.ads\.weight'; name"
        ):
            open_table("ads", tmp_path / name)

    @pytest.mark.parametrize(("save", "name"), SAVERS)
    @pytest.mark.parametrize(
        ("tensor", "expected"),
        [
            (torch.ones(3, 2, dtype=torch.float64), r"got float64 \[3, 2\]"),
            (torch.ones(3, 2, dtype=torch.int64), r"got int64 \[3, 2\]"),
            (torch.ones(3, 2, dtype=torch.int8), r"got (I8|int8) \[3, 2\]"),
            (torch.ones(3), r"got float32 \[3\]"),
            (torch.ones(()), r"got float32 \[\]"),
            (torch.ones(0, 2), r"got float32 \[0, 2\]"),
        ],
        ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{list(value.shape)}",
    )
    def test_a_tensor_that_is_not_a_matrix_of_floats(self, tmp_path, save, name, tensor, expected):
        save({"ads": tensor}, tmp_path / name)

        with pytest.raises(ModelFileError, match=f"{name}#ads: expected float32, float16 or bfloat16.*{expected}"):
            open_table("ads", f"{tmp_path / name}#ads")

    def test_a_pickle_that_would_run_code(self, tmp_path):
        torch.save(nn.EmbeddingBag(3, 2), tmp_path / "model.pt")

        with pytest.raises(
            ModelFileError, match=r"holds more than tensors.*torch\.save\(model\.state_dict\(\), file\)"
        ):
            open_checkpoint(tmp_path / "model.pt")

    @pytest.mark.parametrize(
        "value", [torch.ones(2, 3), {"epoch": 3}, [torch.ones(2, 3)]], ids=["tensor", "number", "list"]
    )
    def test_a_pytorch_file_without_named_tensors(self, tmp_path, value):
        torch.save(value, tmp_path / "model.pt")

        with pytest.raises(ModelFileError, match="expected a dictionary of tensors"):
            open_checkpoint(tmp_path / "model.pt")

    def test_a_sparse_tensor(self, tmp_path):
        torch.save({"ads": torch.eye(3).to_sparse()}, tmp_path / "model.pt")

        with pytest.raises(ModelFileError, match=r"got Tensor, torch\.sparse_coo, on cpu: float32 \[3, 3\]"):
            open_table("ads", tmp_path / "model.pt")

    def test_a_tensor_without_values(self, tmp_path):
        torch.save({"ads": torch.ones(3, 3, device="meta")}, tmp_path / "model.pt")

        with pytest.raises(
            ModelFileError, match=r"all in the file, got Tensor, torch\.strided, on meta: float32 \[3, 3\]"
        ):
            open_table("ads", tmp_path / "model.pt")

    def test_a_tensor_expanded_from_fewer_values(self, tmp_path):
        """A small file could otherwise ask for more rows than any disk has."""
        torch.save({"ads": torch.ones(1, 3).expand(10**12, 3)}, tmp_path / "model.pt")

        with pytest.raises(ModelFileError, match=r"model\.pt#ads: expected a tensor that stores every value"):
            open_table("ads", tmp_path / "model.pt")

    def test_a_shard_of_a_tensor(self, tmp_path):
        """A process can read it only if its class was imported before."""
        import torch.distributed.tensor as distributed

        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
        )
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            shard = distributed.distribute_tensor(torch.ones(4, 3), mesh, [distributed.Shard(0)])
            torch.save({"ads": shard}, tmp_path / "model.pt")
        finally:
            torch.distributed.destroy_process_group()

        with pytest.raises(ModelFileError, match=r"got DTensor, torch\.strided, on cpu: float32 \[4, 3\]"):
            open_table("ads", tmp_path / "model.pt")

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (b"", "an empty file"),
            (b"P", "the byte b'P'"),
            (b"some text", "9 bytes, which begin with b'some tex'"),
            (b"PK\x03\x04 half", "a file that is cut short or damaged"),
        ],
        ids=["empty", "a letter", "text", "half a zip"],
    )
    def test_a_file_that_is_no_pytorch_file(self, tmp_path, content, found):
        (tmp_path / "model.pt").write_bytes(content)

        with pytest.raises(ModelFileError) as caught:
            open_checkpoint(tmp_path / "model.pt")

        assert str(caught.value) == f"{tmp_path / 'model.pt'}: expected a PyTorch file, found {found}"

    def test_a_pickle_without_a_tensor(self, tmp_path):
        (tmp_path / "model.pt").write_bytes(b"\x80\x02}q\x00.")

        with pytest.raises(ModelFileError, match=r"model\.pt: "):
            open_checkpoint(tmp_path / "model.pt")

    def test_a_truncated_pytorch_file(self, tmp_path):
        save_torch({"ads": torch.ones(1000, 3)}, tmp_path / "model.pt")
        content = (tmp_path / "model.pt").read_bytes()
        for size in (len(content) // 2, len(content) - 1):
            (tmp_path / "model.pt").write_bytes(content[:size])

            with pytest.raises(ModelFileError, match=r"model\.pt: expected a PyTorch file, found"):
                open_checkpoint(tmp_path / "model.pt")

    def test_a_pytorch_file_where_pytorch_is_not_installed(self, tmp_path, monkeypatch):
        save_torch({"ads": torch.ones(2, 3)}, tmp_path / "model.pt")
        monkeypatch.setitem(sys.modules, "torch", None)

        with pytest.raises(MissingExtraError, match=r"needs the package 'torch': pip install 'hotrow\[train\]'"):
            open_checkpoint(tmp_path / "model.pt")

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_a_folder_whose_index_is_a_pickle(self, tmp_path):
        from torch.distributed import checkpoint  # takes a second

        checkpoint.save({"ads": torch.ones(2, 3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)

        with pytest.raises(
            ModelFileError, match=r"a folder of torch\.distributed\.checkpoint.* dcp_to_torch FOLDER FILE"
        ):
            open_checkpoint(tmp_path / "dcp")


def header(**entry):
    return {"ads": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **entry}}


def test_a_tensor_that_save_model_writes_under_one_of_its_names_is_found_under_all(tmp_path):
    model = torch.nn.Module()
    model.clicked, model.shown, model.other = (torch.nn.EmbeddingBag(5, 3) for _ in range(3))
    model.shown.weight = model.clicked.weight
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))

    checkpoint = open_checkpoint(tmp_path / "m.safetensors")

    assert sorted(checkpoint.tables()) == ["clicked.weight", "other.weight", "shown.weight"]
    for name in ("clicked", "shown", "other"):
        rows = open_table(name, tmp_path / "m.safetensors")
        np.testing.assert_array_equal(rows.read(0, 5), getattr(model, name).weight.detach().numpy())


def test_metadata_in_a_safetensors_file_is_not_a_table(tmp_path):
    safetensors.torch.save_file(
        {"ads": torch.ones(2, 3)}, tmp_path / "m.safetensors", metadata={"format": "pt", "users": "nothing"}
    )

    assert open_checkpoint(tmp_path / "m.safetensors").names() == ["ads"]


class TestSafetensorsRefused:
    """Files that the library itself does not write."""

    @pytest.mark.parametrize(
        ("document", "data", "expected"),
        [
            (header(), 23, r"#ads: expected at least \d+ bytes, found \d+: the file is truncated"),
            (header(data_offsets=[0, 16]), 16, r"#ads: expected 24 bytes for float32 \[2, 3\], found offsets of 16"),
            (header(data_offsets=[8, 32]), 32, r"#ads: expected the tensor to begin at byte .*, where the one before"),
            (header(), 32, r"expected .* bytes, found .*: bytes of no tensor follow"),
            (header(data_offsets=[24, 0]), 24, r"#ads: expected at least"),
            (header(data_offsets=[-4, 20]), 24, r"header: ads\.data_offsets\[0\]: expected"),
            (header(data_offsets=[0]), 24, r"header: ads\.data_offsets: expected a begin and an end, got 1"),
            (header(shape=[2, -3]), 24, r"header: ads\.shape\[1\]: expected"),
            (header(shape="2x3"), 24, r"header: ads\.shape: expected a list"),
            (header(more=1), 24, r"header: ads\.more: unknown key"),
            ({"ads": [0, 24]}, 24, r"header: ads: expected an object"),
            ([], 24, r"header: expected an object"),
        ],
        ids=str,
    )
    def test_a_header_that_does_not_describe_the_data(self, tmp_path, document, data, expected):
        text = json.dumps(document).encode()
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))

        with pytest.raises(ModelFileError, match=r"m\.safetensors.*" + expected):
            open_table("ads", f"{tmp_path}/m.safetensors#ads")

    @pytest.mark.parametrize(
        "content",
        [b"", b"1234567", struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 2**60) + b"{}", b"\x02" + bytes(7) + b"{,"],
    )
    def test_a_file_without_a_header(self, tmp_path, content):
        (tmp_path / "m.safetensors").write_bytes(content)

        with pytest.raises(ModelFileError, match=r"m\.safetensors: not a safetensors file"):
            open_checkpoint(tmp_path / "m.safetensors")

    def test_a_header_that_is_not_text(self, tmp_path):
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2) + b"\xff\xfe")

        with pytest.raises(ModelFileError, match="the header is not UTF-8"):
            open_checkpoint(tmp_path / "m.safetensors")
