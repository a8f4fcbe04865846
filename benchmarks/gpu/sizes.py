"""How much is measured: all of it for a GPU, or a little of everything, to see that it runs and is right."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Args:
    slots: of the cache that is queried.
    pool_keys: keys to ask for; batches are slices of them.
    rounds: how many times each contender is timed.
    copy_bytes: what is copied to learn the bandwidth.
    dims: of all but predictions; of latencies the first.
    row_dtypes, hit_rates: of queries and of pooled lookups by form.
    batches: of queries.
    bags, samples: of pooled lookups of fp32 rows.
    form_bag, form_samples, form_slots: of pooled lookups by form, in as many tables as there are at most, and of their
        caches all together.
    looked_up: keys of lookups that do not pool, over all tables.
    tables: of both.
    table_slots: of each table's cache there, all together.
    write_batches: keys of a query beside writes.
    small_batches: keys of the queries whose latency is measured.
    host_calls: over which the host's part of a launch is taken.
    model_rows, predicted_samples: of the model whose predictions are timed, and of the requests.
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
