"""The settings of a session, and the learning rates."""

import pytest

from serving.errors import ConfigError
from training.hugectr import SolverParser, get_learning_rate_scheduler, solver_parser_helper


def test_defaults_are_hugectrs():
    solver = solver_parser_helper()

    assert isinstance(solver, SolverParser)
    assert (solver.seed, solver.max_eval_batches, solver.batchsize_eval, solver.batchsize) == (0, 100, 2048, 2048)
    assert (solver.model_file, solver.dense_opt_states_file) == ("", "")
    assert (list(solver.embedding_files), list(solver.sparse_opt_states_file)) == ([], [])
    assert [list(gpus) for gpus in solver.vvgpu] == [[0]]
    assert (solver.use_mixed_precision, solver.enable_tf32_compute, solver.scaler) == (False, False, 1.0)
    assert (solver.i64_input_key, solver.use_algorithm_search, solver.use_cuda_graph) == (False, True, True)
    assert solver.repeat_dataset is True
    assert (solver.kafka_brockers, solver.model_name) == ("", "")


def test_settings_are_read_only():
    with pytest.raises(AttributeError):
        solver_parser_helper().batchsize = 1


def test_one_file_needs_no_list():
    assert solver_parser_helper(embedding_files="a.model").embedding_files == ("a.model",)
    assert solver_parser_helper(embedding_files="").embedding_files == ()


@pytest.mark.parametrize("scaler", [128, 256, 512, 1024])
def test_scalers_of_mixed_precision(scaler):
    assert solver_parser_helper(use_mixed_precision=True, scaler=scaler).scaler == scaler


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", -1, "at least 0"),
        ("seed", 1.5, "whole number"),
        ("batchsize", 0, "at least 1"),
        ("batchsize", True, "at least 1"),
        ("batchsize_eval", "64", "at least 1"),
        ("max_eval_batches", 0, "at least 1"),
        ("model_file", None, "expected a path"),
        ("dense_opt_states_file", 3, "expected a path"),
        ("kafka_brockers", ["127.0.0.1:9092"], "expected a text"),
        ("model_name", None, "expected a text"),
        ("embedding_files", [""], "a path or a list of paths"),
        ("sparse_opt_states_file", 3, "a path or a list of paths"),
        ("vvgpu", [], "a list of GPU numbers"),
        ("vvgpu", [[]], "a list of GPU numbers"),
        ("vvgpu", [0], "a list of GPU numbers"),
        ("vvgpu", [[-1]], "a list of GPU numbers"),
        ("use_cuda_graph", 1, "True or False"),
        ("repeat_dataset", "no", "True or False"),
        ("scaler", 2, "expected 1 with use_mixed_precision False"),
    ],
)
def test_settings_that_are_refused(setting, value, message):
    with pytest.raises(ConfigError, match=f"solver_parser_helper: {setting}: .*{message}.*, got "):
        solver_parser_helper(**{setting: value})


def test_mixed_precision_needs_a_scaler():
    with pytest.raises(ConfigError, match="scaler: expected 128 or 256 or 512 or 1024 with use_mixed_precision True"):
        solver_parser_helper(use_mixed_precision=True)


def test_the_scheduler_counts_steps(graph, write_graph):
    """The numbers are those of HugeCTR's documentation: 24, 8000 warm-up steps, decay from 48000 in 24000 steps."""
    graph["optimizer"] = {
        "type": "SGD",
        "sgd_hparam": {"learning_rate": 24, "warmup_steps": 8000, "decay_start": 48000, "decay_steps": 24000},
    }
    scheduler = get_learning_rate_scheduler(write_graph(graph))
    assert (scheduler.get_lr(), scheduler.get_step()) == (24, 0)

    rates = [scheduler.get_next() for _ in range(72_001)]

    expected = {1: 0.003, 4000: 12, 8000: 24, 48000: 24, 48001: 23.99800004, 60000: 6, 72000: 0, 72001: 0}
    assert {step: rates[step - 1] for step in expected} == pytest.approx(expected)
    assert (scheduler.get_lr(), scheduler.get_step()) == (rates[-1], 72_001)


def test_any_optimizer_has_a_schedule(graph, write_graph):
    scheduler = get_learning_rate_scheduler(write_graph(graph))

    assert [scheduler.get_next() for _ in range(3)] == [0.01, 0.01, 0.01]


def test_a_document_that_is_missing():
    with pytest.raises(ConfigError, match=r"no.json: no such file"):
        get_learning_rate_scheduler("no.json")
