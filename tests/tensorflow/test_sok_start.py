"""``init`` and ``Init``, and how many replicas may begin."""

import numpy as np
import pytest
import tensorflow as tf

from training.errors import SessionError
from training.tf import deeprec, embedding_plugin, sok
from training.tf import horovod as hvd


def test_every_call_needs_init(fresh):
    calls = [
        lambda: sok.Variable(np.ones((2, 2))),
        lambda: sok.DynamicVariable(2),
        lambda: sok.All2AllDenseEmbedding(8, 2, 1, 1),
        lambda: sok.lookup_sparse([], []),
    ]
    for call in calls:
        with pytest.raises(SessionError, match=r"call sok\.init first"):
            call()


def test_a_second_init_of_the_legacy_api_is_refused(fresh):
    assert sok.Init(global_batch_size=8) == "OK"

    with pytest.raises(SessionError, match="Init was called before"):
        sok.Init(global_batch_size=8)


@pytest.mark.parametrize(
    ("named", "error"), [({"global_batch_size": 0}, ValueError), ({"global_batch_size": "8"}, TypeError)]
)
def test_wrong_arguments_of_init_are_refused(fresh, named, error):
    with pytest.raises(error, match="global_batch_size"):
        sok.Init(**named)


def test_first_weights_depend_on_the_seed(fresh):
    ids = tf.RaggedTensor.from_row_lengths([7, 8], [1, 1])
    vectors = []
    for seed in (3, 3, 4):
        from training.tf.sok import initialize

        initialize._start = None
        tf.random.set_seed(seed)
        sok.init()
        vectors.append(sok.lookup_sparse(sok.DynamicVariable(4), ids).numpy())

    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert (vectors[0] != vectors[2]).all()


def test_several_replicas_are_refused_with_the_way_that_works(fresh):
    class TwoReplicas:
        num_replicas_in_sync = 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "get_strategy", TwoReplicas)
        with pytest.raises(
            RuntimeError, match=r"expected one replica, .* got 2; PyTorch's training.sok trains in several"
        ):
            sok.init()


@pytest.mark.parametrize("name", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"])
def test_several_processes_are_refused_with_the_way_that_works(fresh, monkeypatch, name):
    monkeypatch.setenv(name, "8")

    calls = [
        sok.init,
        hvd.init,
        lambda: embedding_plugin.init(visible_gpus=[0]),
        lambda: deeprec.embedding_column(deeprec.categorical_column_with_embedding("a"), 2),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"expected one process, got {name}=8; PyTorch's training\.sok trains"):
            call()


def test_the_calls_of_horovod_are_those_of_one_process(fresh):
    hvd.init()

    assert (hvd.size(), hvd.rank(), hvd.local_rank()) == (1, 0, 0)
    assert hvd.allreduce(tf.constant(3.0)) == 3
    hvd.broadcast_variables([tf.Variable(1.0)], root_rank=0)


def test_one_worker_of_a_multi_worker_strategy_trains(fresh):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ids = tf.RaggedTensor.from_row_lengths([1, 2], [1, 1])

    with strategy.scope():
        sok.Init(global_batch_size=2)
        variable = sok.Variable(np.ones((3, 2)))
        optimizer = tf.keras.optimizers.SGD(1.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(variable, ids, combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        return loss

    assert float(strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step), axis=None)) == 4
    np.testing.assert_array_equal(variable.numpy(), [[1, 1], [0, 0], [0, 0]])
