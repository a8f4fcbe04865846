"""The two training programs of HugeCTR's documentation. Only the import and the sizes of batches are different."""

import pytest

pytestmark = pytest.mark.usefixtures("data")

NON_EPOCH_MODE = """
from training.hugectr import Session, solver_parser_helper, get_learning_rate_scheduler
json_file = "graph.json"
solver_config = solver_parser_helper(seed = 0,
                                    batchsize = 64,
                                    batchsize_eval = 128,
                                    model_file = "",
                                    embedding_files = [],
                                    vvgpu = [[0,1,2,3,4,5,6,7]],
                                    use_mixed_precision = True,
                                    scaler = 1024,
                                    i64_input_key = False,
                                    use_algorithm_search = True,
                                    use_cuda_graph = True,
                                    repeat_dataset = True)
lr_sch = get_learning_rate_scheduler(json_file)
sess = Session(solver_config, json_file)
sess.start_data_reading()
for i in range(301):
    lr = lr_sch.get_next()
    sess.set_learning_rate(lr)
    sess.train()
    if (i%100 == 0):
        loss = sess.get_current_loss()
        print("[HUGECTR][INFO] iter: {}; loss: {}".format(i, loss))
    if (i%100 == 0 and i != 0):
        sess.check_overflow()
        sess.copy_weights_for_evaluation()
        for _ in range(solver_config.max_eval_batches):
            sess.eval()
        metrics = sess.get_eval_metrics()
        print("[HUGECTR][INFO] iter: {}, {}".format(i, metrics))
sess.download_params_to_files("./", 10000)
"""

EPOCH_MODE = """
from training.hugectr import Session, solver_parser_helper, get_learning_rate_scheduler
json_file = "graph.json"
temp_dir = "./temp_embedding_dir"
dataset = [("file_list."+str(i)+".txt", "file_list."+str(i)+".keyset") for i in range(5)]
solver_config = solver_parser_helper(seed = 0,
                                    batchsize = 64,
                                    batchsize_eval =128,
                                    model_file = "",
                                    embedding_files = [],
                                    vvgpu = [[0]],
                                    use_mixed_precision = False,
                                    scaler = 1.0,
                                    i64_input_key = False,
                                    use_algorithm_search = True,
                                    use_cuda_graph = True,
                                    repeat_dataset = False)
lr_sch = get_learning_rate_scheduler(json_file)
sess = Session(solver_config, json_file, True, temp_dir)
data_reader_train = sess.get_data_reader_train()
data_reader_eval = sess.get_data_reader_eval()
data_reader_eval.set_source("file_list.5.txt")
model_oversubscriber = sess.get_model_oversubscriber()
iteration = 0
for file_list, keyset_file in dataset:
    data_reader_train.set_source(file_list)
    model_oversubscriber.update(keyset_file)
    while True:
        lr = lr_sch.get_next()
        sess.set_learning_rate(lr)
        good = sess.train()
        if good == False:
            break
        if iteration % 10 == 0:
            sess.check_overflow()
            sess.copy_weights_for_evaluation()
            data_reader_eval = sess.get_data_reader_eval()
            good_eval = True
            j = 0
            while good_eval:
                if j >= solver_config.max_eval_batches:
                    break
                good_eval = sess.eval()
                j += 1
            if good_eval == False:
                data_reader_eval.set_source()
            metrics = sess.get_eval_metrics()
            print("[HUGECTR][INFO] iter: {}, metrics: {}".format(iteration, metrics))
        iteration += 1
    print("[HUGECTR][INFO] trained with data in {}".format(file_list))
sess.download_params_to_files("./", iteration)
"""


def run(program):
    """Run a program, and return its variables."""
    names = {}
    exec(program, names)
    return names


def test_non_epoch_mode(graph, write_graph, capsys, tmp_path):
    write_graph(graph)

    names = run(NON_EPOCH_MODE)

    [(metric, area)] = names["metrics"]
    assert metric == "AUC"
    assert area > 0.7
    assert names["loss"] < 0.65
    assert capsys.readouterr().out.count("[HUGECTR][INFO] iter:") == 4 + 3
    assert sorted(path.name for path in tmp_path.glob("*_10000.model")) == [
        "0_opt_sparse_10000.model",
        "0_sparse_10000.model",
        "1_opt_sparse_10000.model",
        "1_sparse_10000.model",
        "_dense_10000.model",
        "_opt_dense_10000.model",
    ]


def test_epoch_mode(graph, write_graph, capsys, tmp_path):
    write_graph(graph)
    (tmp_path / "temp_embedding_dir").mkdir()

    names = run(EPOCH_MODE)

    assert names["iteration"] == 5 * (400 // 64)
    [(metric, area)] = names["metrics"]
    assert metric == "AUC"
    assert area > 0.6
    assert (tmp_path / f"0_sparse_{names['iteration']}.model").exists()
    del names["sess"], names["model_oversubscriber"]
    assert list((tmp_path / "temp_embedding_dir").iterdir()) == []
