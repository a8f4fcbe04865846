import re

import numpy as np
import pytest

from serving.errors import ConfigError, ModelFileError
from serving.importers import plan_import


def test_a_plan_has_the_networks_tables_in_the_order_of_its_inputs(network, tables):
    plan = plan_import(network, "mean", {"users": tables["users"], "ads": tables["ads"]}, combiners={"ads": "sum"})

    assert [(table.name, table.slots, table.combiner) for table in plan.tables] == [
        ("ads", 2, "sum"),
        ("users", 1, "mean"),
    ]
    assert (plan.dense.name, plan.dense.sizes) == ("dense", (3,))
    graph = plan.graph()
    assert (graph.dense_top, graph.dense_dim, graph.label_dim) == ("dense", 3, 1)
    assert [(one.table, one.top, one.slots, one.dim, one.combiner) for one in graph.embeddings] == [
        ("ads", "ads", 2, 4, "sum"),
        ("users", "users", 1, 4, "mean"),
    ]


def test_a_flat_input_has_as_many_slots_as_rows_of_the_table_fit(network, tables):
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


def test_names_that_the_graph_adds_do_not_meet_those_of_the_network(sketch_of, tables, tmp_path):
    path = sketch_of({"dense": (2, 4), "dense_keys": (4,)}).write(tmp_path / "names.onnx")

    plan = plan_import(path, "sum", {"dense": tables["ads"], "dense_keys": tables["users"]})

    assert [one.table for one in plan.graph().embeddings] == ["dense", "dense_keys"]


def test_the_plan_says_what_a_request_brings_and_where_rows_come_from(network, tables):
    lines = list(plan_import(network, "sum", tables).describe())

    assert lines == [
        f"network {network}: 3 dense features (dense), answers [B, 1]",
        f"table ads: 2 slots, sum; 30 rows of 4 from {tables['ads']}, row numbers are the keys",
        f"table users: 1 slot, sum; 20 rows of 4 from {tables['users']}, row numbers are the keys",
    ]


def test_tables_of_the_checkpoint_that_no_input_takes_are_told_of(network, tables, tmp_path):
    for name in ("ads", "user", "item"):
        np.arange(30).tofile(folder_file(tmp_path / "model" / name, "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / name / "emb_vector")

    plan = plan_import(network, "sum", {"users": tables["users"]}, checkpoint=tmp_path / "model")

    assert plan.unused == ("item", "user")
    assert list(plan.describe())[-1] == "not used, as no input is called so: 'item', 'user'"


def folders(path, **dims):
    """A checkpoint of tables by name."""
    for name, dim in dims.items():
        np.arange(30).tofile(folder_file(path / name, "key"))
        np.ones((30, dim), np.float32).tofile(path / name / "emb_vector")
    return path


def test_dense_features_that_an_unused_table_would_fill_are_warned_of(sketch_of, tmp_path, caplog):
    path = sketch_of({"adz": (16,), "users": (4,)}).write(tmp_path / "net.onnx")

    plan = plan_import(path, "sum", checkpoint=folders(tmp_path / "model", ads=8, users=4, other=5))

    assert plan.dense.name == "adz"
    [message] = caplog.messages
    assert message == (
        f"{path}: input 'adz' [B, 16] is taken for dense features, as no table is called so; "
        "should one of these feed it: 'ads'?"
    )


def test_dense_features_that_no_unused_table_would_fill_are_not(sketch_of, tmp_path, caplog):
    path = sketch_of({"dense": (13,), "users": (4,)}).write(tmp_path / "net.onnx")

    plan_import(path, "sum", checkpoint=folders(tmp_path / "model", ads=8, users=4))

    assert caplog.messages == []


class TestRefused:
    @pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
    def test_an_input_whose_table_is_misspelt_and_not_that_of_the_dense_features(self, sketch_of, tmp_path, sizes):
        path = sketch_of({"dense": (13,), "adz": sizes}).write(tmp_path / "net.onnx")

        with pytest.raises(ModelFileError, match="no table 'adz'; nearest are 'ads'"):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", ads=4))

    def test_inputs_of_which_any_may_be_the_dense_features(self, sketch_of, tmp_path):
        path = sketch_of({"dense": (13,), "users": (8,)}).write(tmp_path / "net.onnx")

        with pytest.raises(
            ConfigError, match=r"no table for 'dense' \[B, 13\], 'users' \[B, 8\]; .*model there is 'xyz'"
        ):
            plan_import(path, "sum", checkpoint=folders(tmp_path / "model", xyz=4))

    def test_a_table_for_no_input(self, network, tables):
        with pytest.raises(
            ConfigError, match=r"table 'add': no input of the network is called so; did you mean 'ads'\?"
        ):
            plan_import(network, "sum", {**tables, "add": tables["ads"]})

    def test_inputs_for_no_table(self, network, tables):
        with pytest.raises(
            ConfigError, match=r"no table for 'ads' \[B, 2, 4\]; only one input, \[B, F\], may have none"
        ):
            plan_import(network, "sum", {"users": tables["users"]})
        with pytest.raises(ConfigError, match=r"no table for 'dense' \[B, 3\], 'users' \[B, 4\]; only one"):
            plan_import(network, "sum", {"ads": tables["ads"]})

    def test_an_input_for_no_table_of_the_checkpoint_with_what_comes_nearest(self, network, tables, tmp_path):
        np.arange(30).tofile(folder_file(tmp_path / "model" / "adds", "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / "adds" / "emb_vector")

        with pytest.raises(ModelFileError, match=r"model: no table 'ads'; nearest are 'adds'"):
            plan_import(network, "sum", {"users": tables["users"]}, checkpoint=tmp_path / "model")

    def test_a_network_without_a_table(self, sketch_of, tmp_path):
        path = sketch_of({"user": (4,)}).write(tmp_path / "dense.onnx")
        np.arange(30).tofile(folder_file(tmp_path / "model" / "users", "key"))
        np.ones((30, 4), np.float32).tofile(tmp_path / "model" / "users" / "emb_vector")

        with pytest.raises(ConfigError, match="no table for any of its inputs"):
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

    def test_a_combiner_for_no_table(self, network, tables):
        with pytest.raises(ConfigError, match=r"combiner: no table is called 'dense'; there are 'ads', 'users'"):
            plan_import(network, "sum", tables, combiners={"dense": "mean"})

    @pytest.mark.parametrize("size", [0, -1, 2**31])
    def test_a_batch_of_no_size_that_can_be(self, network, tables, size):
        with pytest.raises(ConfigError, match=f"max_batchsize: expected 1 to 2147483647, got {size}"):
            plan_import(network, "sum", tables, max_batchsize=size)

    def test_keys_that_come_twice(self, network, tables, tmp_path):
        np.savez(tmp_path / "ads.npz", keys=np.array([1, 2, 1]), vectors=np.ones((3, 4), np.float32))

        with pytest.raises(ModelFileError, match="key 1 is in row 0 and again in row 2"):
            plan_import(network, "sum", {**tables, "ads": tmp_path / "ads.npz"})

    def test_a_name_that_no_table_may_have(self, sketch_of, tables, tmp_path):
        path = sketch_of({"ads/bag:0": (2, 4)}).write(tmp_path / "ads.onnx")

        with pytest.raises(
            ConfigError,
            match=r"ads\.onnx: input 'ads/bag:0': a table .* letters, digits.*; export .* other input_names",
        ):
            plan_import(path, "sum", {"ads/bag:0": tables["ads"]})

    def test_a_name_that_a_file_of_the_version_has(self, sketch_of, tables, tmp_path):
        path = sketch_of({"graph.json": (2, 4)}).write(tmp_path / "ads.onnx")

        with pytest.raises(
            ConfigError, match=r"ads\.onnx: inputs: a table cannot be called 'graph\.json': a file is; export"
        ):
            plan_import(path, "sum", {"graph.json": tables["ads"]})

    def test_answers_that_are_logits(self, sketch, tables, tmp_path):
        path = sketch.write(tmp_path / "logits.onnx", sigmoid=False)

        with pytest.raises(ModelFileError, match="are no probabilities; if they are logits, say so"):
            plan_import(path, "sum", tables)
        assert plan_import(path, "sum", tables, logits=True).graph().label_dim == 1

    def test_a_network_that_answers_with_no_finite_number(self, sketch, tables, tmp_path):
        sketch.weight[:] = np.nan

        with pytest.raises(ModelFileError, match="tried on 4 samples: its answer is no finite number"):
            plan_import(sketch.write(tmp_path / "nan.onnx"), "sum", tables)

    def test_a_network_that_answers_in_another_shape_than_it_says(self, sketch, tables, tmp_path):
        path = sketch.write(tmp_path / "two.onnx", output_shape=["B", 2])

        with pytest.raises(ModelFileError, match=r"two\.onnx: "):
            plan_import(path, "sum", tables)
