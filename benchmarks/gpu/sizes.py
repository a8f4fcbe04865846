"""How much is measured: everything on a GPU, or a little of each measurement to check the answers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Args:
    slots: slots of the queried cache.
    pool_keys: keys of the queries; batches are slices of them.
    rounds: how often each contender is timed.
    copy_bytes: bytes copied to measure the bandwidth.
    dims: dims of all measurements except predictions; latencies use the first.
    row_dtypes, hit_rates: for queries and for pooled lookups by form.
    batches: keys of a query.
    bags, samples: for pooled lookups of fp32 rows.
    form_bag, form_samples, form_slots: for pooled lookups by form, in the largest number of tables; the slots are
        those of all caches together.
    looked_up: keys of lookups without pooling, over all tables.
    tables: for lookups with and without pooling.
    table_slots: slots of their caches, all together.
    write_batches: keys of a query during writes.
    small_batches: keys of the queries whose latency is measured.
    host_calls: launches per measurement of the host's time.
    model_rows, predicted_samples: rows of the timed model, and samples of its requests.
    """

    slots: int = 1 << 24
    pool_keys: int = 1 << 22
    rounds: int = 11
    copy_bytes: int = 1 << 32
    dims: tuple[int, ...] = (32, 64, 128)
    row_dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16", "int8", "fp8")
    batches: tuple[int, ...] = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 20)
    hit_rates: tuple[float, ...] = (1.0, 0.9)
    bags: tuple[int, ...] = (1, 4, 20)
    samples: tuple[int, ...] = (1 << 10, 1 << 14)
    form_bag: int = 20
    form_samples: int = 1 << 11
    form_slots: int = 1 << 23
    looked_up: tuple[int, ...] = (1 << 16, 1 << 19, 1 << 20)
    tables: tuple[int, ...] = (1, 26)
    table_slots: int = 1 << 24
    write_batches: tuple[int, ...] = (1 << 16, 1 << 19)
    small_batches: tuple[int, ...] = (1 << 10, 1 << 13, 1 << 16)
    host_calls: int = 2000
    model_rows: int = 1_000_000
    predicted_samples: tuple[int, ...] = (1, 64, 1024)


QUICK = Sizes(
    slots=3000,
    pool_keys=512,
    rounds=2,
    copy_bytes=1 << 14,
    dims=(32,),
    row_dtypes=("fp32", "int8"),
    batches=(24, 128),
    bags=(1, 4),
    samples=(8,),
    form_bag=4,
    form_samples=8,
    form_slots=1500,
    looked_up=(100,),
    tables=(1, 3),
    table_slots=1500,
    write_batches=(40, 100),
    small_batches=(24,),
    host_calls=4,
    model_rows=300,
    predicted_samples=(1, 8),
)
