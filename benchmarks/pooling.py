"""Bags of 20 keys, summed by one thread, against FBGEMM's tables for the CPU.

    python -m benchmarks.pooling [--quick] [--json FILE]

The peers are ``SplitTableBatchedEmbeddingBagsCodegen`` for float32 rows and the inference form,
``IntNBitTableBatchedEmbeddingBagsCodegen``, for float32 and int8 rows. They get row numbers. Hotrow gets keys, so it
has to find each row first: a bucket of its index is one more cache line from memory, and the next key's lines are
fetched ahead. Rows are far more than the caches hold. Keys are uniform, or follow Zipf's law.

``lines`` is the ratio of both speeds against the ratio of the cache lines that both layouts read for a uniform key. In
float32 Hotrow reads 2 lines where the peer reads 1 at dimension 16, and 9 where it reads 8 at dimension 128.

``make bench`` installs the peer, ``fbgemm-gpu-cpu``.

Targets: at least the peer's rows per second, or 0.9 of what the lines allow.
"""

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import HostTable, set_lookup_threads

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from fbgemm_gpu.tbe.utils import quantize_embs
except ImportError:
    raise SystemExit("benchmarks.pooling needs fbgemm-gpu-cpu, which `make bench` installs") from None

BAG, BAGS, LINE_BYTES = 20, 1024, 64
ROWS = {16: 4_000_000, 64: 2_000_000, 128: 1_000_000}
ZIPF = 1.2
LOAD_ROWS = 1 << 16


def main():
    arguments = parse_arguments(__doc__)
    torch.set_num_threads(1)
    set_lookup_threads(1)
    rounds, batches = (1, 1) if arguments.quick else (9, 16)
    records = []
    for dim, rows in ROWS.items():
        records += compare(dim, 10_000 if arguments.quick else rows, rounds, batches)
    publish(records, arguments.json)


def compare(dim, rows, rounds, batches):
    """Records of one dimension, by row type, peer and distribution."""
    records = []
    for dtype, form in (("fp32", "training"), ("fp32", "inference"), ("int8", "inference")):
        rng = np.random.default_rng(dim)
        weights = rng.normal(size=(rows, dim)).astype(np.float32)
        ours, peer = our_pooling(weights, dtype), peer_pooling(weights, dtype, form)
        batch = draw(rng, rows, "uniform")
        np.testing.assert_allclose(ours(*batch), peer(*batch), rtol=1e-5, atol=1e-4 if dtype == "fp32" else 0.5)
        for keys in ("uniform", "zipf"):
            calls = [[draw(rng, rows, keys) for _ in range(batches)] for _ in range(rounds + 1)]
            pairs = take_turns(ours, peer, calls)[1:]  # the first warms up
            speeds = [tuple(batches * BAGS * BAG / seconds / 1e6 for seconds in pair) for pair in pairs]
            params = {"dim": dim, "rows": rows, "type": dtype, "peer": form, "keys": keys}
            records.append(Record.of("pooling.rows_per_s", params, "M/s", speeds))
            if keys == "uniform":
                allowed = lines(dim, dtype, is_ours=False) / lines(dim, dtype, is_ours=True)
                of_allowed = [(one / other, allowed) for one, other in speeds]
                records.append(Record.of("pooling.lines", params, "", of_allowed))
    return records


def lines(dim, dtype, *, is_ours):
    """The cache lines that one key needs on average: of a row that begins anywhere, and of a bucket."""
    width = 4 * dim if dtype == "fp32" else dim + 4
    is_aligned = width % LINE_BYTES == 0
    of_row = width / LINE_BYTES if is_aligned else 1 + (width - 4) / LINE_BYTES
    return of_row + is_ours


def our_pooling(weights, dtype):
    """A function of a batch that pools in a host table of these rows."""
    rows, dim = weights.shape
    table = HostTable(dim, rows, row_dtype=dtype)
    for first in range(0, rows, LOAD_ROWS):
        numbers = np.arange(first, min(rows, first + LOAD_ROWS))
        table.insert(keys_of(numbers), weights[numbers])
    row_ptrs, out = np.arange(0, BAGS * BAG + 1, BAG), np.empty((BAGS, dim), np.float32)

    def pool(keys, _numbers):
        table.fetch_pooled(keys, row_ptrs, out, "sum")
        return out

    return pool


def peer_pooling(weights, dtype, form):
    """A function of a batch that pools in a table of FBGEMM's."""
    rows, dim = weights.shape
    offsets = torch.arange(0, BAGS * BAG + 1, BAG)
    if form == "training":
        specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)]
        table = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_SGD, pooling_mode=PoolingMode.SUM
        )
        table.split_embedding_weights()[0].copy_(torch.from_numpy(weights))
    else:
        kind = SparseType.FP32 if dtype == "fp32" else SparseType.INT8
        table = IntNBitTableBatchedEmbeddingBagsCodegen(
            [("t", rows, dim, kind, EmbeddingLocation.HOST)],
            pooling_mode=PoolingMode.SUM,
            device="cpu",
            bounds_check_mode=BoundsCheckMode.NONE,
            output_dtype=SparseType.FP32,
        )
        table.initialize_weights()
        codes, scales = quantize_embs(torch.from_numpy(weights), kind)
        table.assign_embedding_weights([(codes, scales)])
        offsets = offsets.int()

    def pool(_keys, numbers):
        with torch.no_grad():
            return table(numbers if form == "training" else numbers.int(), offsets).numpy()

    return pool


def keys_of(numbers):
    """Keys without an order."""
    return numbers * 1_000_003 + 12_345


def draw(rng, rows, keys):
    """A batch: our keys, and the row numbers of the peer."""
    drawn = rng.integers(0, rows, BAGS * BAG) if keys == "uniform" else rng.zipf(ZIPF, BAGS * BAG)
    numbers = (drawn * 2_654_435_761) % rows
    return keys_of(numbers), torch.from_numpy(numbers)


if __name__ == "__main__":
    main()
