"""A session: steps, evaluation, files, and what it refuses."""

import json
import os
import resource
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError, ModelFileError
from serving.hugectr import CreateEmbeddingCache, CreateParameterServer, InferenceSession
from serving.model.sparse_file import open_sparse
from tests.training.hugectr.conftest import samples_of, write_data
from training.data import read_norm, read_raw, write_norm, write_raw
from training.errors import DataError, DivergedError, SessionError
from training.hugectr import DataReader32, DataReader64, Session, solver_parser_helper
from training.samples import Samples

pytestmark = pytest.mark.usefixtures("data")

RULES = {
    "Adam": {"type": "Adam", "adam_hparam": {"learning_rate": 0.01}},
    "LazyAdam": {"type": "Adam", "update_type": "LazyGlobal", "adam_hparam": {"learning_rate": 0.01}},
    "Nesterov": {"type": "Nesterov", "nesterov_hparam": {"learning_rate": 0.01, "momentum_factor": 0.9}},
    "MomentumSGD": {
        "type": "MomentumSGD",
        "update_type": "Global",
        "momentum_sgd_hparam": {"learning_rate": 0.01, "momentum_factor": 0.9},
    },
    "SGD": {"type": "SGD", "sgd_hparam": {"learning_rate": 0.01}},
}


def solver(**settings):
    return solver_parser_helper(**({"batchsize": 64, "batchsize_eval": 128, "repeat_dataset": False} | settings))


def train_file(session, file_list):
    """Train on all batches of a file list, and return the losses."""
    session.get_data_reader_train().set_source(file_list)
    losses = []
    while session.train():
        losses.append(session.get_current_loss())
    return losses


def files_of(prefix):
    """The content of the files that a session wrote, by their names after the prefix."""
    folder, start = Path(prefix).parent, Path(prefix).name
    return {path.name.removeprefix(start): path.read_bytes() for path in folder.glob(f"{start}*")}


@pytest.mark.parametrize(("rule", "key_type"), list(zip(RULES, cycle(["uint32", "int64"]), strict=False)))
def test_a_resumed_training_continues_bit_for_bit(graph, write_graph, rule, key_type):
    write_data(key_type)
    graph["optimizer"] = RULES[rule]
    config = write_graph(graph)
    wide_keys = key_type == "int64"
    whole = Session(solver(i64_input_key=wide_keys), config)
    train_file(whole, "file_list.0.txt")
    whole.download_params_to_files("half", 1)

    resumed = Session(
        solver(
            i64_input_key=wide_keys,
            model_file="half_dense_1.model",
            dense_opt_states_file="half_opt_dense_1.model",
            embedding_files=["half0_sparse_1.model", "half1_sparse_1.model"],
            sparse_opt_states_file=["half0_opt_sparse_1.model", "half1_opt_sparse_1.model"],
        ),
        config,
    )
    expected, found = train_file(whole, "file_list.1.txt"), train_file(resumed, "file_list.1.txt")

    assert expected == found
    assert len(found) == 400 // 64
    whole.download_params_to_files("whole", 2)
    resumed.download_params_to_files("resumed", 2)
    assert files_of("whole") == files_of("resumed")


@pytest.mark.parametrize(("key_type", "sizes"), [("uint32", (4 + 4, 4 + 8 + 16)), ("int64", (8 + 4, 8 + 8 + 16))])
def test_sparse_models_are_single_files_with_the_rows_of_training(graph, write_graph, key_type, sizes):
    write_data(key_type)
    session = Session(solver(i64_input_key=key_type == "int64"), write_graph(graph))
    train_file(session, "file_list.0.txt")

    session.download_params_to_files("out", 7)

    trained = Samples.joined(list(read_norm("file_list.0.txt", key_type)))[: 400 // 64 * 64]
    wide, deep = trained.bags.split([2, 3])
    for bags, name, size in zip((wide, deep), ("out0_sparse_7.model", "out1_sparse_7.model"), sizes, strict=True):
        assert Path(name).stat().st_size == size * len(np.unique(bags.keys))
    wide_type = "I64" if key_type == "int64" else "I32"
    for bags, name, dim, layout in ((wide, "out0", 1, "distributed"), (deep, "out1", 4, "localized")):
        model = open_sparse(f"{name}_sparse_7.model", dim, wide_type, layout)
        [(keys, _)] = model.batches(10_000)
        assert set(keys.tolist()) == set(bags.keys.tolist())
        if layout == "localized":
            slots = keys // 30 - 2  # the conftest gives each slot 30 keys
            np.testing.assert_array_equal(model.slot_ids, slots)


def test_params_num_counts_the_rows(graph, write_graph):
    session = Session(solver(), write_graph(graph))
    dense = 16 * 8 + 8 + 2 * 8 + 8 + 1
    assert session.get_params_num() == dense

    train_file(session, "file_list.0.txt")

    session.download_params_to_files("out", 1)
    rows = [Path("out0_sparse_1.model").stat().st_size // 8, Path("out1_sparse_1.model").stat().st_size // 28]
    assert session.get_params_num() == dense + rows[0] + 4 * rows[1]


def test_an_untrained_session_writes_tables_without_rows_and_starts_from_them(graph, write_graph):
    config = write_graph(graph)
    Session(solver(), config).download_params_to_files("out", 1)

    assert Path("out0_sparse_1.model").stat().st_size == 0
    session = Session(
        solver(
            embedding_files=["out0_sparse_1.model", "out1_sparse_1.model"],
            sparse_opt_states_file=["out0_opt_sparse_1.model", "out1_opt_sparse_1.model"],
        ),
        config,
    )
    assert train_file(session, "file_list.0.txt")


def test_hugectrs_inference_serves_what_was_written(graph, write_graph):
    layers = graph["layers"]  # with one table, which HugeCTR's ``predict`` demands
    layers[0]["sparse"] = [{**layers[0]["sparse"][1], "slot_num": 5, "max_feature_num_per_sample": 16}]
    layers[4]["leading_dim"], layers[5]["bottom"] = 20, ["flat2", "dense"]
    del layers[3], layers[1]
    session = Session(solver(max_eval_batches=1000), write_graph(graph))
    train_file(session, "file_list.0.txt")
    session.download_params_to_files("out", 1)
    [(_, area)] = session.evaluation("predictions.txt", "labels.txt")
    layers[-1] = {"name": "sigmoid", "type": "Sigmoid", "bottom": "fc2", "top": "sigmoid"}
    graph["inference"] = {"dense_model_file": "out_dense_1.model", "sparse_model_file": "out0_sparse_1.model"}
    config = write_graph(graph, "inference.json")

    with CreateParameterServer([config], ["m"], False) as server:
        serving = InferenceSession(config, 0, CreateEmbeddingCache(server, 0, False, 0.2, config, "m", False))
        data = Samples.joined(list(read_norm("file_list.5.txt", "uint32")))
        answer = serving.predict(data.dense.reshape(-1), data.bags.keys, data.bags.row_ptrs)

    predictions, labels = np.loadtxt("predictions.txt", np.float32), np.loadtxt("labels.txt")
    np.testing.assert_allclose(np.asarray(answer).reshape(-1), predictions, rtol=1e-5)
    np.testing.assert_array_equal(data.labels[:, 0], labels)
    ordered = (predictions[labels == 1][:, None] > predictions[labels == 0]).mean()
    ties = (predictions[labels == 1][:, None] == predictions[labels == 0]).mean()
    assert area == pytest.approx(ordered + ties / 2, abs=1e-4)  # two logits may have the same probability in float32


def test_evaluation_covers_the_data_or_max_eval_batches_and_begins_again(graph, write_graph):
    config = write_graph(graph)
    for batches, rows in ((2, 256), (100, 400)):  # 400 samples in batches of 128: the last one is smaller
        session = Session(solver(max_eval_batches=batches), config)
        first = session.evaluation("first.txt", "labels.txt")
        assert session.evaluation("second.txt", "labels.txt") == first
        assert Path("first.txt").read_text(encoding="utf-8").count("\n") == rows
        assert files_of("first.txt")[""] == files_of("second.txt")[""]


def test_a_regression_has_an_rmse_and_predictions_in_the_unit_of_its_label(graph, write_graph):
    graph["layers"][-1] |= {"type": "MeanSquaredErrorLoss", "mean": [2.0], "std": [4.0]}
    session = Session(solver(), write_graph(graph))
    train_file(session, "file_list.0.txt")

    [(name, rmse)] = session.evaluation("predictions.txt", "labels.txt")

    predictions, labels = np.loadtxt("predictions.txt"), np.loadtxt("labels.txt")
    assert (name, rmse) == ("RMSE", pytest.approx(np.sqrt(np.square(predictions - labels).mean()), rel=1e-5))


def test_predictions_read_back_as_the_same_floats(graph, write_graph):
    session = Session(solver(), write_graph(graph))
    train_file(session, "file_list.0.txt")
    session.evaluation("first.txt", "labels.txt")
    numbers = np.loadtxt("first.txt", np.float32)

    assert [f"{number:.9g}" for number in numbers] == Path("first.txt").read_text(encoding="utf-8").split()
    assert len(np.unique(numbers)) > 300


def test_evaluation_repeats_the_data_in_non_epoch_mode(graph, write_graph):
    session = Session(solver(repeat_dataset=True, max_eval_batches=4), write_graph(graph))
    session.start_data_reading()

    session.evaluation("first.txt", "labels.txt")

    expected = read_norm("file_list.5.txt", "uint32")
    labels = np.concatenate([part.labels[:, 0] for part in expected])
    assert np.loadtxt("labels.txt").tolist() == [*labels, *labels[: 4 * 128 - 400]]


def test_training_repeats_the_data_in_non_epoch_mode_with_whole_batches(graph, write_graph):
    config = write_graph(graph)
    repeating = Session(solver(repeat_dataset=True, batchsize=300), config)
    repeating.start_data_reading()
    repeating.start_data_reading()  # does nothing
    once = Samples.joined(list(read_norm("file_list.0.txt", "uint32")))
    twice = Samples.joined([once, once, once])
    write_norm("three.norm", twice.labels, twice.dense, twice.bags, "uint32", "None")
    long = Session(solver(batchsize=300), config)

    expected = train_file(long, "three.norm")
    found = []
    for _ in range(4):
        assert repeating.train()
        found.append(repeating.get_current_loss())

    assert found == expected


def test_dense_weights_are_evaluated_as_of_the_last_copy(graph, write_graph):
    session = Session(solver(batchsize_eval=400), write_graph(graph))

    def area():
        session.get_data_reader_eval().set_source()
        assert session.eval()
        return session.get_eval_metrics()

    first = area()
    session.set_learning_rate(0.0)  # only the statistics of BatchNorm move
    train_file(session, "file_list.0.txt")
    before_rows = area()
    session.copy_weights_for_evaluation()
    after = area()

    assert before_rows != first  # rows count at once: a new row is not the default vector
    assert after != before_rows


def test_the_learning_rate_is_the_documents_until_it_is_set(graph, write_graph):
    graph["optimizer"]["adam_hparam"] |= {"warmup_steps": 100}
    config = write_graph(graph)
    implicit, explicit, other = (Session(solver(), config) for _ in range(3))
    explicit.set_learning_rate(0.01)
    other.set_learning_rate(0.02)

    losses = [train_file(session, "file_list.0.txt") for session in (implicit, explicit, other)]

    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_several_labels_have_a_metric_each(graph, write_graph):
    layers = graph["layers"]
    layers[0]["label"] = {"top": ["click", "buy"], "label_dim": [1, 1]}
    layers[-1:] = [
        {"name": "loss1", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "click"], "top": "loss1"},
        {"name": "fc3", "type": "InnerProduct", "bottom": "dropout1", "top": "fc3", "fc_param": {"num_output": 1}},
        {"name": "loss2", "type": "BinaryCrossEntropyLoss", "bottom": ["fc3", "buy"], "top": "loss2"},
    ]
    samples = Samples.joined(list(read_norm("file_list.0.txt", "uint32")))
    labels = np.concatenate([samples.labels, np.roll(samples.labels, 1)], axis=1)
    write_norm("two.norm", labels, samples.dense, samples.bags, "uint32", "Sum")
    layers[0] |= {"source": "two.norm", "eval_source": "two.norm"}
    session = Session(solver(), write_graph(graph))
    assert session.train()

    metrics = session.evaluation("predictions.txt", "labels.txt")

    assert [name for name, _ in metrics] == ["AUC click", "AUC buy"]
    np.testing.assert_array_equal(np.loadtxt("labels.txt"), labels)


def test_raw_files_are_read_too(graph, write_graph):
    rng = np.random.default_rng(0)
    numbers, keys = rng.integers(0, 9, (200, 2)), rng.integers(0, 30, (200, 5))
    write_raw("data.bin", rng.integers(0, 2, (200, 1)), numbers, keys)
    graph["layers"][0] |= {"format": "Raw", "source": "data.bin", "slot_size_array": [30] * 5}
    session = Session(solver(), write_graph(graph))

    assert session.train()

    with pytest.raises(ConfigError, match=r"graph.json: layers\[0\].format: keys of Raw files are uint32"):
        Session(solver(i64_input_key=True), write_graph(graph))
    [samples] = read_raw("data.bin", 1, 2, 5, slot_sizes=[30] * 5)
    assert len(samples) == 200


def test_devices_and_precisions_warn_once_and_change_nothing(graph, write_graph, caplog):
    config = write_graph(graph)
    plain = Session(solver(), config)
    caplog.clear()

    fancy = Session(
        solver(vvgpu=[[0, 1, 2, 3], [4, 5]], use_mixed_precision=True, scaler=1024, enable_tf32_compute=True), config
    )
    found = train_file(fancy, "file_list.0.txt")

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CPU in float32" in caplog.text
    assert found == train_file(plain, "file_list.0.txt")


def test_keys_have_the_type_of_the_solver(graph, write_graph):
    config = write_graph(graph)
    assert type(Session(solver(), config).get_data_reader_train()) is DataReader32
    assert type(Session(solver(i64_input_key=True), config).get_data_reader_eval()) is DataReader64


def test_a_session_without_evaluation_data(graph, write_graph):
    del graph["layers"][0]["eval_source"]
    session = Session(solver(), write_graph(graph))

    assert session.eval()
    assert session.get_eval_metrics() == []
    with pytest.raises(ConfigError, match=r"graph.json: layers\[0\].eval_source: missing"):
        session.evaluation()
    with pytest.raises(ConfigError, match="set_source needs a name"):
        session.get_data_reader_eval().set_source()
    session.get_data_reader_eval().set_source("file_list.5.txt")
    assert session.evaluation()


def test_a_session_without_training_data(graph, write_graph):
    del graph["layers"][0]["source"]
    config = write_graph(graph)

    with pytest.raises(ConfigError, match=r"graph.json: layers\[0\].source: missing"):
        Session(solver(), config).train()
    with pytest.raises(ConfigError, match=r"graph.json: layers\[0\].source: missing"):
        Session(solver(repeat_dataset=True), config).start_data_reading()


def test_calls_in_the_wrong_mode_or_too_early(graph, write_graph):
    config = write_graph(graph)
    epoch, endless = Session(solver(), config), Session(solver(repeat_dataset=True), config)

    for call, message in (
        (epoch.start_data_reading, "start_data_reading is for non-epoch mode"),
        (endless.train, "call start_data_reading first"),
        (endless.eval, "call start_data_reading first"),
        (endless.get_data_reader_train().set_source, "set_source is for epoch mode"),
        (epoch.get_current_loss, "no step has been taken"),
        (epoch.get_model_oversubscriber, "use_model_oversubscriber True"),
    ):
        with pytest.raises(SessionError, match=message):
            call()


def test_damaged_data_names_its_record_and_is_no_end_of_data(graph, write_graph):
    session = Session(solver(batchsize=10), write_graph(graph))
    content = bytearray(Path("part0.1.norm").read_bytes())
    content[-1] ^= 1
    Path("part0.1.norm").write_bytes(content)

    with pytest.raises(DataError, match=r"part0.1.norm record 199: "):
        train_file(session, "file_list.0.txt")
    with pytest.raises(SessionError, match=r"reading file_list.0.txt failed"):
        session.train()
    assert train_file(session, "file_list.1.txt")


def test_missing_and_empty_data(graph, write_graph):
    config = write_graph(graph)
    with pytest.raises(DataError, match=r"file_list.9.txt: no such file"):
        Session(solver(), config).get_data_reader_train().set_source("file_list.9.txt")
    write_norm(
        "empty.norm",
        np.empty((0, 1)),
        np.empty((0, 2)),
        Samples.joined(list(read_norm("file_list.0.txt", "uint32"))).bags[:0],
        "uint32",
        "Sum",
    )
    graph["layers"][0]["source"] = "empty.norm"
    endless = Session(solver(repeat_dataset=True), write_graph(graph))
    endless.start_data_reading()
    with pytest.raises(DataError, match=r"empty.norm: no samples"):
        endless.train()
    with pytest.raises(DataError, match=r"empty.norm: no samples"):
        Session(solver(), write_graph(graph)).train()


def test_epoch_mode_says_that_less_than_a_batch_is_not_trained(graph, write_graph, caplog):
    session = Session(solver(batchsize=401), write_graph(graph))

    assert not session.train()

    [message] = [message for message in caplog.messages if "file_list.0.txt" in message]
    assert message.startswith("file_list.0.txt: 400 samples, but a batch has 401: epoch mode leaves out an incomplete")


def test_every_batch_is_checked_before_it_is_trained(graph, write_graph):
    labels, dense, slots = samples_of(0)
    dense[399, 1] = np.nan
    write_norm("nan.norm", labels, dense, slots, "uint32")
    graph["layers"][0]["source"] = "nan.norm"
    session = Session(solver(batchsize=400), write_graph(graph))

    with pytest.raises(DataError, match=r"nan.norm column dense\[1\] record 399: expected a finite number, found nan"):
        session.train()


def test_data_that_does_not_fit_the_graph(graph, write_graph):
    graph["layers"][0]["sparse"][0]["max_feature_num_per_sample"] = 1
    session = Session(solver(), write_graph(graph))

    with pytest.raises(ConfigError, match="at most 1 keys are allowed"):
        session.train()


def test_a_loss_that_is_not_finite_stops(graph, write_graph):
    graph["optimizer"] = RULES["SGD"]
    session = Session(solver(), write_graph(graph))
    session.set_learning_rate(1e30)

    with pytest.raises(DivergedError, match="the loss is not finite at step"):
        train_file(session, "file_list.0.txt")


@pytest.mark.parametrize("rate", [-1, float("nan"), float("inf"), "0.1", True])
def test_learning_rates_that_are_none(graph, write_graph, rate):
    with pytest.raises(ConfigError, match=r"Session.set_learning_rate: lr: expected a number of at least 0, got"):
        Session(solver(), write_graph(graph)).set_learning_rate(rate)


def test_arguments_of_the_session(graph, write_graph, tmp_path):
    config = write_graph(graph)
    for arguments, message in (
        (({"seed": 0}, config), "Session: solver_config: expected what solver_parser_helper returned, got dict"),
        ((solver(), "missing.json"), "missing.json: no such file"),
        ((solver(repeat_dataset=True), config, True), "use_model_oversubscriber: needs epoch mode"),
        ((solver(), config, True, str(tmp_path / "absent")), "temp_embedding_dir: .*absent: no folder can be made"),
        ((solver(embedding_files=["a"]), config), "embedding_files: expected 2 files, one per table, got 1"),
        ((solver(sparse_opt_states_file=["a", "b"]), config), "sparse_opt_states_file: needs embedding_files"),
    ):
        with pytest.raises(ConfigError, match=message):
            Session(*arguments)


def test_keys_of_parquet_files_are_int64(graph, write_graph):
    graph["layers"][0]["format"] = "Parquet"

    with pytest.raises(ConfigError, match=r"layers\[0\].format: keys of Parquet files are int64, so i64_input_key is"):
        Session(solver(), write_graph(graph))


@pytest.mark.parametrize("iteration", [0, -1, True, 1.5])
def test_iterations_begin_at_one(graph, write_graph, iteration):
    with pytest.raises(ConfigError, match="iter: expected a whole number of at least 1"):
        Session(solver(), write_graph(graph)).download_params_to_files("out", iteration)


def test_one_file_of_evaluation_is_not_enough(graph, write_graph):
    with pytest.raises(ConfigError, match="a file of predictions and a file of labels"):
        Session(solver(), write_graph(graph)).evaluation("predictions.txt")


def test_folders_that_do_not_exist(graph, write_graph):
    session = Session(solver(), write_graph(graph))

    with pytest.raises(ModelFileError, match=r"absent/out: cannot be written: no such file"):
        session.download_params_to_files("absent/out", 1)
    with pytest.raises(ModelFileError, match=r"absent/predictions.txt: cannot be written"):
        session.evaluation("absent/predictions.txt", "labels.txt")


@pytest.mark.parametrize("most_bytes", [100, 700, 1000])
def test_a_full_disk_leaves_no_file(graph, write_graph, most_bytes):
    session = Session(solver(), write_graph(graph))
    train_file(session, "file_list.0.txt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        with pytest.raises(ModelFileError, match=r"^full.*_1\.model.*: cannot be written: File too large"):
            session.download_params_to_files("full", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert not files_of("full")
    assert not list(Path().glob(".*"))


def test_a_folder_in_the_place_of_a_file_leaves_no_file(graph, write_graph):
    session = Session(solver(), write_graph(graph))
    Path("out1_sparse_1.model").mkdir()

    with pytest.raises(ModelFileError, match=r"out1_sparse_1.model: cannot be written: it is a folder"):
        session.download_params_to_files("out", 1)

    assert [path.name for path in Path().glob("out*")] == ["out1_sparse_1.model"]


class TestFilesToStartFrom:
    @pytest.fixture
    def config(self, graph, write_graph):
        config = write_graph(graph)
        session = Session(solver(), config)
        train_file(session, "file_list.0.txt")
        session.download_params_to_files("out", 1)
        return config

    SPARSE = ("out0_sparse_1.model", "out1_sparse_1.model")
    STATES = ("out0_opt_sparse_1.model", "out1_opt_sparse_1.model")

    def refused(self, config, message, **settings):
        with pytest.raises(ModelFileError, match=message):
            Session(solver(**settings), config)

    def test_missing_files(self, config):
        self.refused(config, "no.model: no such file", model_file="no.model")
        self.refused(config, "no.model: cannot be read", dense_opt_states_file="no.model")
        self.refused(config, "no.model: no such file", embedding_files=["no.model", self.SPARSE[1]])
        states = ["no.model", self.STATES[1]]
        self.refused(config, "no.model: cannot be read", embedding_files=self.SPARSE, sparse_opt_states_file=states)

    def test_pipes(self, config):
        os.mkfifo("pipe")
        message = "pipe: .*not a regular file"
        self.refused(config, message, model_file="pipe")
        self.refused(config, message, dense_opt_states_file="pipe")
        self.refused(config, message, embedding_files=["pipe", self.SPARSE[1]])
        states = ["pipe", self.STATES[1]]
        self.refused(config, message, embedding_files=self.SPARSE, sparse_opt_states_file=states)

    def test_a_dead_link_is_not_a_missing_file(self, config):
        steps = Path("out_opt_dense_1.model.json")
        steps.unlink()
        steps.symlink_to("gone")
        message = f"{steps}: cannot be read: a link to a file that does not exist"
        self.refused(config, message, dense_opt_states_file="out_opt_dense_1.model")

    def test_files_of_another_size(self, config):
        for name in (*self.SPARSE[1:], *self.STATES[1:], "out_dense_1.model", "out_opt_dense_1.model"):
            Path(name).write_bytes(Path(name).read_bytes()[:-1])
        self.refused(config, "out_dense_1.model: expected .* bytes", model_file="out_dense_1.model")
        states = "out_opt_dense_1.model"
        self.refused(config, f"{states}: expected .* 2 states of Adam", dense_opt_states_file=states)
        self.refused(config, "out1_sparse_1.model: expected a multiple of 28 bytes", embedding_files=self.SPARSE)

    def test_states_of_another_size(self, config):
        Path(self.STATES[0]).write_bytes(Path(self.STATES[0]).read_bytes()[:-1])
        message = f"{self.STATES[0]}: the block that begins at row .*: expected 4 bytes, found 3"
        self.refused(config, message, embedding_files=self.SPARSE, sparse_opt_states_file=self.STATES)

    def test_states_of_more_or_fewer_rows(self, config):
        one = Path(self.SPARSE[0])
        rows = one.read_bytes()
        for content, message in ((rows + b"\x01" * 8, "61 rows .* those of 60"), (rows[:8], "1 rows .* those of 60")):
            one.write_bytes(content)
            self.refused(config, message, embedding_files=self.SPARSE, sparse_opt_states_file=self.STATES)
        one.write_bytes(b"")
        message = f"{self.STATES[0]}: expected the states of 0 rows, found those of key"
        self.refused(config, message, embedding_files=self.SPARSE, sparse_opt_states_file=self.STATES)

    def test_damaged_dense_states(self, config):
        content = Path("out_opt_dense_1.model").read_bytes()
        Path("out_opt_dense_1.model").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.refused(config, "out_opt_dense_1.model: expected CRC-32", dense_opt_states_file="out_opt_dense_1.model")

    def test_states_of_other_rows(self, config):
        content = Path(self.SPARSE[0]).read_bytes()
        Path(self.SPARSE[0]).write_bytes(content[8:] + content[:8])
        message = "out0_opt_sparse_1.model: row 0: the states of key"
        self.refused(config, message, embedding_files=self.SPARSE, sparse_opt_states_file=self.STATES)

    def test_a_repeated_key(self, config):
        content = Path(self.SPARSE[0]).read_bytes()
        Path(self.SPARSE[0]).write_bytes(content + content[:8])
        self.refused(config, "is in row 0 and again in row", embedding_files=self.SPARSE)

    def test_states_of_another_optimizer(self, config, graph, write_graph):
        states = "out_opt_dense_1.model"
        steps = Path(f"{states}.json")
        steps.write_text(steps.read_text(encoding="utf-8").replace("Adam", "Ftrl"), encoding="utf-8")
        self.refused(config, "expected the states of Adam, found those of Ftrl", dense_opt_states_file=states)
        steps.write_text('{"optimizer": "Adam"}', encoding="utf-8")
        self.refused(config, f"{states}.json: step: ", dense_opt_states_file=states)

    def test_rows_with_the_states_of_another_optimizer(self, graph, write_graph, config):
        """Nesterov has as many states as MomentumSGD, so the sizes of the files fit."""
        graph["optimizer"] = RULES["Nesterov"]
        session = Session(solver(), write_graph(graph))
        train_file(session, "file_list.0.txt")
        session.download_params_to_files("out", 1)
        graph["optimizer"] = RULES["MomentumSGD"]

        message = f"{self.STATES[0]}: expected the states of momentum_sgd, found those of nesterov"
        files = {"embedding_files": self.SPARSE, "sparse_opt_states_file": self.STATES}
        self.refused(write_graph(graph), message, **files)

    def test_hugectrs_dense_states_have_no_steps(self, config):
        Path("out_opt_dense_1.model.json").unlink()

        session = Session(solver(dense_opt_states_file="out_opt_dense_1.model"), config)

        session.download_params_to_files("again", 1)
        assert Path("again_opt_dense_1.model").read_bytes() == Path("out_opt_dense_1.model").read_bytes()
        written = json.loads(Path("again_opt_dense_1.model.json").read_text(encoding="utf-8"))
        assert (written["optimizer"], written["step"]) == ("Adam", 0)

    def test_init_params_replaces_the_dense_weights(self, config):
        session = Session(solver(), config)
        session.init_params("")
        session.init_params("out_dense_1.model")

        session.download_params_to_files("again", 1)

        assert Path("again_dense_1.model").read_bytes() == Path("out_dense_1.model").read_bytes()
