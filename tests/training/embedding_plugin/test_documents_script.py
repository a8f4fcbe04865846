"""The document's first script, with its printed numbers."""

import numpy as np
import pytest
import torch

from training import embedding_plugin as hugectr_tf_ops_v2

VOCABULARY_SIZE, SLOT_NUM, EMBEDDING_VECTOR_SIZE = 8, 3, 4
TABLE = np.arange(1, 33, dtype=np.float32).reshape(VOCABULARY_SIZE, EMBEDDING_VECTOR_SIZE)
KEYS = torch.tensor(
    [
        [[0, -1], [1, -1], [2, 6]],
        [[0, -1], [1, -1], [-1, -1]],
        [[0, -1], [1, -1], [6, -1]],
        [[0, -1], [1, -1], [2, -1]],
    ]
)
FIRST = [
    [[1, 2, 3, 4], [5, 6, 7, 8], [34, 36, 38, 40]],
    [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]],
    [[1, 2, 3, 4], [5, 6, 7, 8], [25, 26, 27, 28]],
    [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]],
]
PRINTED = [[0.90024936, 1.9002494, 2.9002495, 3.9002495], [4.9002495, 5.9002495, 6.9002495, 7.9002495]]
# The document shows the first two of these rows for the plugin, and the others only for TensorFlow.
SECOND = [
    [*PRINTED, [33.800995, 35.800995, 37.800995, 39.800995]],
    [*PRINTED, [0, 0, 0, 0]],
    [*PRINTED, [24.900497, 25.900497, 26.900497, 27.900497]],
    [*PRINTED, [8.900497, 9.900497, 10.900497, 11.900497]],
]
FLOAT32 = 2e-7  # float32's seventh digit


def coo(keys):
    """What the document makes of keys [batch_size, slot_num, max_nnz]."""
    reshape_keys = keys.reshape(-1, keys.shape[-1])
    indices = (reshape_keys != -1).nonzero()
    return indices.T, reshape_keys[tuple(indices.T)]


def create(embedding_type, update_type="Local"):
    return hugectr_tf_ops_v2.create_embedding(
        init_value=TABLE,
        opt_hparams=[0.1, 0.9, 0.99, 1e-3],
        name_="embedding_verification",
        max_vocabulary_size_per_gpu=VOCABULARY_SIZE,
        slot_num=SLOT_NUM,
        embedding_vec_size=EMBEDDING_VECTOR_SIZE,
        embedding_type=embedding_type,
        max_nnz=2,
        update_type=update_type,
    )


def test_both_embeddings_give_the_printed_numbers_and_those_of_pytorch():
    hugectr_tf_ops_v2.reset()
    hugectr_tf_ops_v2.init(
        visible_gpus=[0], seed=0, key_type="int64", value_type="float", batch_size=4, batch_size_eval=4
    )
    names = [create("distributed"), create("localized", update_type="Global")]
    row_indices, values = coo(KEYS)
    bp_trigger = torch.nn.Parameter(torch.tensor(1.0))

    for name in names:
        each_replica = hugectr_tf_ops_v2.broadcast_then_convert_to_csr(name, row_indices, values, T=[torch.int32] * 1)
        forward = hugectr_tf_ops_v2.fprop(name, 0, each_replica, bp_trigger, is_training=True)
        assert forward.tolist() == FIRST
        [gradient] = torch.autograd.grad(forward.sum(), bp_trigger)
        assert gradient == 0
        second = hugectr_tf_ops_v2.fprop(name, 0, each_replica, bp_trigger, is_training=True)
        np.testing.assert_allclose(second.detach(), SECOND, rtol=FLOAT32)
        np.testing.assert_allclose(second.detach().reshape(12, 4), of_pytorch(row_indices, values), rtol=1e-6)

    assert names == ["embedding_verification", "embedding_verification_1"]


def of_pytorch(row_indices, values):
    """Return the second forward pass of a plain embedding in float64, with TensorFlow's Adam."""
    table = torch.from_numpy(TABLE).double().requires_grad_()

    def forward():
        return torch.zeros(12, 4, dtype=torch.float64).index_add(0, row_indices[0], table[values])

    forward().sum().backward()
    first, second = 0.1 * table.grad, 0.01 * table.grad.square()
    with torch.no_grad():
        table -= 0.1 * (1 - 0.99) ** 0.5 / (1 - 0.9) * first / (second.sqrt() + 1e-3)
    return forward().detach()


@pytest.mark.parametrize("gpus", [[0], [0, 1], [0, 1, 3, 4]])
@pytest.mark.parametrize("form", ["coo", "flat coo", "csr"])
def test_replicas_that_share_a_batch_give_the_numbers_of_one(gpus, form, trigger):
    hugectr_tf_ops_v2.init(visible_gpus=gpus, batch_size=4, batch_size_eval=4)
    name = create("distributed")
    samples = 4 // len(gpus)

    def forward():
        row_indices, values = coo(KEYS)
        if form == "csr":
            vectors = []
            for replica in range(len(gpus)):
                rows, keys = coo(KEYS[replica * samples : (replica + 1) * samples])
                counts = torch.bincount(rows[0], minlength=samples * SLOT_NUM)
                row_offset = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
                padded = torch.cat([keys, torch.full((3,), 5)])  # what comes after nnz does not count
                vectors.append(
                    hugectr_tf_ops_v2.fprop_experimental(
                        name, torch.tensor(replica), row_offset, padded, torch.tensor(len(keys)), trigger
                    )
                )
            return torch.cat(vectors)
        if form == "flat coo":
            row_indices = row_indices[0]
        each = hugectr_tf_ops_v2.broadcast_then_convert_to_csr(
            name, row_indices, values, T=[torch.int32] * len(gpus), is_training=True
        )
        of_replicas = [
            hugectr_tf_ops_v2.fprop(name, replica, each if replica else each[0], trigger)
            for replica in range(len(gpus))
        ]
        return torch.cat(of_replicas)

    first = forward()
    first.sum().backward()

    assert first.tolist() == FIRST
    np.testing.assert_allclose(forward().detach(), SECOND, rtol=FLOAT32)
