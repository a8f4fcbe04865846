import re
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError, ModelFileError
from serving.importers import plan_import, write_model
from serving.model.pooling import Pooling
from serving.model.sparse_writer import write_sparse_directory
from serving.opening import load_model


def test_a_plan_has_the_networks_tables_in_the_order_of_its_inputs(network, tables):
    plan = plan_import(network, "mean", {"users": tables["users"], "ads": tables["ads"]}, combiners={"ads": "sum"})

    assert [(table.name, table.slots, table.combiner) for table in plan.tables] == [
        ("ads", 2, "sum"),
        ("users", 1, "mean"),
    ]
    assert (plan.dense.name, plan.dense.sizes) == ("dense", (3,))
    graph = plan.graph()
    assert (graph.dense_top, graph.dense_dim, graph.label_dim) == ("dense", 3, 1)
    assert [
        (embedding.table, embedding.top, embedding.slots, embedding.dim, embedding.combiner)
        for embedding in graph.embeddings
    ] == [
        ("ads", "ads", 2, 4, "sum"),
        ("users", "users", 1, 4, "mean"),
    ]


def test_the_slots_of_a_flat_input_follow_from_the_table(network, tables):
    np.save(tables["users"], np.ones((20, 2), np.float32))

    assert plan_import(network, "sum", tables).tables[1].slots == 2


def test_tables_come_from_the_checkpoint_unless_one_is_given(network, tables, tmp_path):
    np.ones((30, 4), np.float32).tofile(folder_file(tmp_path / "model" / "ads", "emb_vector"))
    np.arange(30).tofile(tmp_path / "model" / "ads" / "key")

    plan = plan_import(network, "sum", {"users": tables["users"]}, checkpoint=tmp_path / "model")

    assert [table.rows.source for table in plan.tables] == [
        str(tmp_path / "model" / "ads" / "emb_vector"),
        str(tables["users"]),
    ]


def test_the_model_reads_a_table_as_training_did(sketch_of, tmp_path):
    network = sketch_of({"ads": (2, 4)}).write(tmp_path / "ads.onnx")
    vectors = np.ones((2, 4), np.float32)
    (tmp_path / "t").mkdir()
    write_sparse_directory(tmp_path / "t" / "ads", np.array([3, 5]), vectors, pooling=Pooling("mean", 0.5))

    plan = plan_import(network, "mean", checkpoint=tmp_path / "t")
    with load_model(write_model(plan, tmp_path / "models", "ctr")) as session:
        of_defaults = session.predict(np.zeros((1, 0)), np.array([3, 8, 9]), np.array([0, 2, 3]))

    flat = np.array([[0.75] * 4 + [0.5] * 4])
    np.testing.assert_allclose(of_defaults, sketch_of({"ads": (2, 4)}).probabilities(flat), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"table 'ads': expected the combiner mean, .* was trained, got sum"):
        plan_import(network, "sum", checkpoint=tmp_path / "t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "pooling.json: line 1 column 2: the text ends too early"),
        ('{"combiner": "max", "default_value": 0}', 'combiner: expected one of "sum", "mean", "sqrtn", got "max"'),
        ('{"combiner": "sum"}', "default_value: missing"),
        ('{"default_value": 1e39}', "default_value: expected"),
    ],
)
def test_a_damaged_file_of_pooling_is_refused(network, tables, tmp_path, text, message):
    write_sparse_directory(tmp_path / "ads", np.arange(30), np.ones((30, 4), np.float32))
    (tmp_path / "ads" / "pooling.json").write_text(text)

    with pytest.raises(ModelFileError, match=message):
        plan_import(network, "sum", {"ads": tmp_path / "ads", "users": tables["users"]})


def test_a_link_to_nothing_is_no_absent_file_of_pooling(network, tables, tmp_path):
    write_sparse_directory(tmp_path / "ads", np.arange(30), np.ones((30, 4), np.float32))
    (tmp_path / "ads" / "pooling.json").symlink_to("nothing")

    with pytest.raises(ModelFileError, match=r"pooling\.json: "):
        plan_import(network, "sum", {"ads": tmp_path / "ads", "users": tables["users"]})


def folder_file(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def test_a_network_may_have_no_dense_features(sketch_of, tables, tmp_path):
    path = sketch_of({"ads": (2, 4)}).write(tmp_path / "ads.onnx")

    plan = plan_import(path, "sum", {"ads": tables["ads"]})

    assert plan.dense is None
    assert plan.graph().dense_dim == 0


def test_one_source_may_feed_several_inputs(sketch_of, tables, tmp_path):
    path = sketch_of({"shown": (4,), "clicked": (4,)}).write(tmp_path / "two.onnx")

    plan = plan_import(path, "sum", {"shown": tables["ads"], "clicked": tables["ads"]})

    assert [(table.name, table.rows.rows) for table in plan.tables] == [("shown", 30), ("clicked", 30)]


def test_names_that_the_graph_adds_differ_from_the_networks_names(sketch_of, tables, tmp_path):
    path = sketch_of({"dense": (2, 4), "dense_keys": (4,)}).write(tmp_path / "names.onnx")

    plan = plan_import(path, "sum", {"dense": tables["ads"], "dense_keys": tables["users"]})

    assert [embedding.table for embedding in plan.graph().embeddings] == ["dense", "dense_keys"]


def test_the_plan_says_what_a_request_contains_and_where_rows_come_from(network, tables):
    lines = list(plan_import(network, "sum", tables).describe())

    assert lines == [
        f"network {network}: 3 dense features (dense), answers [B, 1]",
        f"table ads: 2 slots, sum; 30 rows of 4 from {tables['ads']}, row numbers are the keys",
        f"table users: 1 slot, sum; 20 rows of 4 from {tables['users']}, row numbers are the keys",
    ]


def test_unused_tables_of_the_checkpoint_are_reported(network, tables, tmp_path):
    for name in ("ads", "user", "item"):
        np.arange(30).tofile(folder_file(tmp_path / "model" / name, "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / name / "emb_vector")

    plan = plan_import(network, "sum", {"users": tables["users"]}, checkpoint=tmp_path / "model")

    assert plan.unused == ("item", "user")
    assert list(plan.describe())[-1] == "not used, because no input has this name: 'item', 'user'"


def folders(path, **dims):
    """A checkpoint of tables by name."""
    for name, dim in dims.items():
        np.arange(30).tofile(folder_file(path / name, "key"))
        np.ones((30, dim), np.float32).tofile(path / name / "emb_vector")
    return path


def test_the_input_of_the_dense_features_may_be_named(sketch_of, tmp_path, tables):
    path = sketch_of({"counts": (3,), "ads": (2, 4), "dense": (4,)}).write(tmp_path / "net.onnx")

    plan = plan_import(path, "sum", {"ads": tables["ads"], "dense": tables["users"]}, dense="counts")

    assert plan.dense.name == "counts"
    assert [table.name for table in plan.tables] == ["ads", "dense"]


@pytest.mark.parametrize("form", ["two files", "dump"])
def test_vectors_without_a_header_have_the_given_type_or_the_only_type_that_fits(sketch_of, tmp_path, form):
    path = sketch_of({"user": (8,)}).write(tmp_path / "net.onnx")
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float16)
    for dtype in (np.float16, np.float32):
        folder = tmp_path / dtype.__name__
        folder.mkdir()
        np.arange(40).tofile(folder / "user_emb_keys.rank_0.world_size_1")
        rows.astype(dtype).tofile(folder / "user_emb_values.rank_0.world_size_1")

    def planned(folder, row_dtype=None):
        names = [f"{folder}/user_emb_{what}.rank_0.world_size_1" for what in ("keys", "values")]
        source = {"user": ",".join(names)} if form == "two files" else {}
        checkpoint = None if source else folder
        [table] = plan_import(path, "sum", source, checkpoint=checkpoint, row_dtype=row_dtype).tables
        return table

    for folder, row_dtype in (("float32", None), ("float32", "fp32"), ("float16", "fp16")):
        table = planned(tmp_path / folder, row_dtype)
        np.testing.assert_array_equal(table.rows.read(0, 40), rows.astype(np.float32))
        assert table.slots == 1
    message = (
        r"input 'user': is \[B, 8\], and .* has 16 bytes per key: float32 \[4\] or float16 or bfloat16 \[8\]; "
        r"no file says which; add --row-dtype fp32, fp16 or bf16"
    )
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path / "float16")


class TestRefused:
    @pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
    def test_an_input_whose_table_is_misspelt(self, sketch_of, tmp_path, sizes):
        path = sketch_of({"dense": (13,), "adz": sizes}).write(tmp_path / "net.onnx")

        with pytest.raises(ModelFileError, match="no table 'adz'; nearest are 'ads'"):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", ads=4))

    def test_several_inputs_that_may_be_the_dense_features(self, sketch_of, tmp_path):
        path = sketch_of({"dense": (13,), "users": (8,)}).write(tmp_path / "net.onnx")

        with pytest.raises(ConfigError, match=r"no table for 'dense' \[B, 13\], 'users' \[B, 8\]; .*model has 'xyz'"):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", xyz=4))
        path = sketch_of({"a": (13,), "b": (8,), "xyz": (4,)}).write(tmp_path / "net.onnx")
        with pytest.raises(
            ConfigError, match=r"'a' \[B, 13\], 'b' \[B, 8\]; one of 'a', 'b' may take the dense features"
        ):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", xyz=4))

    def test_an_input_without_a_table_that_is_not_called_dense(self, sketch_of, tmp_path, tables):
        path = sketch_of({"clicked": (4,), "ads": (2, 4)}).write(tmp_path / "net.onnx")

        message = r"no table for 'clicked' \[B, 4\]; if it takes the dense features, add --dense clicked"
        with pytest.raises(ConfigError, match=message):
            plan_import(path, "sum", {"ads": tables["ads"]})
        for checkpoint in (folders(tmp_path / "model", ads=4), folders(tmp_path / "more", ads=4, other=4)):
            with pytest.raises(ModelFileError, match=r"no table 'clicked'; .*--dense clicked"):
                plan_import(path, "sum", checkpoint=checkpoint)

    @pytest.mark.parametrize(
        ("dense", "message"), [("desne", "no input of this name; did you mean 'dense'"), ("ads", "'ads': has a table")]
    )
    def test_an_unusable_name_of_the_dense_features(self, network, tables, dense, message):
        with pytest.raises(ConfigError, match=message):
            plan_import(network, "sum", tables, dense=dense)

    def test_a_row_dtype_without_effect(self, network, tables):
        with pytest.raises(ConfigError, match="row_dtype: has no effect: every table's file states its type"):
            plan_import(network, "sum", tables, row_dtype="fp16")

    def test_dense_features_with_an_entry_in_the_checkpoint(self, sketch_of, tmp_path):
        path = sketch_of({"dense": (3,), "ads": (4,)}).write(tmp_path / "net.onnx")
        checkpoint = folders(tmp_path / "model", ads=4, dense=3)

        with pytest.raises(
            ConfigError, match="input 'dense': takes the dense features, or the rows of 'dense'; choose"
        ):
            plan_import(path, "sum", checkpoint=checkpoint)
        assert plan_import(path, "sum", checkpoint=checkpoint, dense="dense").dense.name == "dense"
        plan = plan_import(path, "sum", {"dense": f"{checkpoint}#dense"}, checkpoint=checkpoint)
        assert [table.name for table in plan.tables] == ["dense", "ads"]

    def test_one_entry_for_two_inputs(self, sketch_of, tmp_path):
        path = sketch_of({"ads": (4,), "shown.ads": (4,)}).write(tmp_path / "net.onnx")

        with pytest.raises(
            ModelFileError, match=r"model#shown.ads: may be the table of two inputs, 'ads' and 'shown.ads'"
        ):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", **{"shown.ads": 4}))

    def test_a_table_without_an_input(self, network, tables):
        with pytest.raises(
            ConfigError, match=r"table 'add': the network has no input of this name; did you mean 'ads'\?"
        ):
            plan_import(network, "sum", {**tables, "add": tables["ads"]})

    def test_inputs_without_a_table(self, network, tables):
        with pytest.raises(
            ConfigError,
            match=r"no table for 'ads' \[B, 2, 4\]$",
        ):
            plan_import(network, "sum", {"users": tables["users"]})
        with pytest.raises(ConfigError, match=r"no table for 'users' \[B, 4\]; if it takes the dense features"):
            plan_import(network, "sum", {"ads": tables["ads"]})

    def test_an_input_without_a_table_with_the_nearest_names(self, network, tables, tmp_path):
        np.arange(30).tofile(folder_file(tmp_path / "model" / "adds", "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / "adds" / "emb_vector")

        with pytest.raises(ModelFileError, match=r"model: no table 'ads'; nearest are 'adds'"):
            plan_import(network, "sum", {"users": tables["users"]}, checkpoint=tmp_path / "model")

    def test_a_network_without_a_table(self, sketch_of, tmp_path):
        path = sketch_of({"user": (4,)}).write(tmp_path / "dense.onnx")
        np.arange(30).tofile(folder_file(tmp_path / "model" / "users", "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / "users" / "emb_vector")

        with pytest.raises(ConfigError, match="none of its inputs has a table"):
            plan_import(path, "sum")
        with pytest.raises(ModelFileError, match="no table 'user'; nearest are 'users'"):
            plan_import(path, "sum", checkpoint=tmp_path / "model")

    @pytest.mark.parametrize(("table", "shape"), [("ads", "[B, 2, 4]"), ("users", "[B, 4]")])
    def test_a_table_of_another_dimension(self, network, tables, table, shape):
        np.save(tables[table], np.ones((20, 3), np.float32))

        with pytest.raises(
            ConfigError, match=re.escape(f"input '{table}': is {shape}, but {tables[table]} has rows of 3")
        ):
            plan_import(network, "sum", tables)

    def test_a_combiner_for_an_unknown_table(self, network, tables):
        with pytest.raises(ConfigError, match=r"combiner: no table is called 'dense'; there are 'ads', 'users'"):
            plan_import(network, "sum", tables, combiners={"dense": "mean"})

    @pytest.mark.parametrize("size", [0, -1, 2**31])
    def test_an_impossible_batch_size(self, network, tables, size):
        with pytest.raises(ConfigError, match=f"max_batchsize: expected 1 to 2147483647, got {size}"):
            plan_import(network, "sum", tables, max_batchsize=size)

    def test_repeated_keys(self, network, tables, tmp_path):
        np.savez(tmp_path / "ads.npz", keys=np.array([1, 2, 1]), vectors=np.ones((3, 4), np.float32))

        with pytest.raises(ModelFileError, match="key 1 is in row 0 and again in row 2"):
            plan_import(network, "sum", {**tables, "ads": tmp_path / "ads.npz"})

    def test_an_impossible_table_name(self, sketch_of, tables, tmp_path):
        path = sketch_of({"ads/bag:0": (2, 4)}).write(tmp_path / "ads.onnx")

        with pytest.raises(
            ConfigError,
            match=r"ads\.onnx: input 'ads/bag:0': a table .* letters, digits.*; export .* other input_names",
        ):
            plan_import(path, "sum", {"ads/bag:0": tables["ads"]})

    def test_a_table_with_the_name_of_a_file(self, sketch_of, tables, tmp_path):
        path = sketch_of({"graph.json": (2, 4)}).write(tmp_path / "ads.onnx")

        with pytest.raises(
            ConfigError, match=r"ads\.onnx: inputs: a table cannot be called 'graph\.json', because a file is; export"
        ):
            plan_import(path, "sum", {"graph.json": tables["ads"]})

    def test_answers_that_are_logits(self, sketch, tables, tmp_path):
        path = sketch.write(tmp_path / "logits.onnx", sigmoid=False)

        with pytest.raises(ModelFileError, match="are not probabilities; if they are logits, use --logits"):
            plan_import(path, "sum", tables)
        assert plan_import(path, "sum", tables, logits=True).graph().label_dim == 1

    def test_a_network_whose_answers_are_not_finite(self, sketch, tables, tmp_path):
        sketch.weight[:] = np.nan

        with pytest.raises(ModelFileError, match="tried on 4 samples: its answer is not finite"):
            plan_import(sketch.write(tmp_path / "nan.onnx"), "sum", tables)

    def test_a_network_whose_answers_have_another_shape(self, sketch, tables, tmp_path):
        path = sketch.write(tmp_path / "two.onnx", output_shape=["B", 2])

        with pytest.raises(ModelFileError, match=r"two\.onnx: "):
            plan_import(path, "sum", tables)


def test_a_checkpoint_of_tensorflow_feeds_a_network(sketch_of, tmp_path):
    network = sketch_of({"users": (3,), "items": (2, 3)}).write(tmp_path / "network.onnx")
    golden = Path(__file__).parents[1] / "sources" / "checkpoints"

    plan = plan_import(network, "mean", checkpoint=golden / "keras" / "ckpt-1")

    assert [(table.name, table.slots, table.rows.rows) for table in plan.tables] == [("users", 1, 5), ("items", 2, 7)]
    assert plan.unused == ()
