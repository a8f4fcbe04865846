"""What a configuration says of a model on GPUs: its embedding cache and its dense network there."""

from typing import Literal

from serving.config.record import Record
from serving.dense.device_arithmetic import Precision

CacheKind = Literal["dynamic", "static", "uvm"]
CacheMode = Literal["exact", "asynchronous"]
CacheFill = Literal["always", "below_threshold"]


class GpuCacheConfig(Record):
    """One model's embedding caches: one per table and GPU, all alike. Without a GPU there is none, whatever is said.

    Attributes:
        wanted: ``gpucache``; None: the configuration does not say, so that there is one wherever a GPU is used.
        kind: ``"dynamic"``: rows come and go; ``"static"``: all rows, from the start on; ``"uvm"``: as dynamic, with
            the rows in page-locked host memory.
        size_ratio: the part of each table's rows that a cache has room for; a static one has room for all.
        key_bits: of the keys in a cache's lines. Lines of 32-bit keys take half the memory; they are for models of
            uint32 keys, whose two largest they cannot hold.
        fp8_rows: a static cache keeps its rows as 8-bit floats (e4m3) with a scale of their own.
        mode: ``"exact"``: an answer waits for the rows that are missing; ``"asynchronous"``: from
            ``hit_rate_threshold`` on it does not, they count as their table's default value, and are inserted later.
        hit_rate_threshold: a share of a request's keys, table by table; see ``mode`` and ``fill``.
        fill: in the exact mode, whether missing rows are put into the cache always, or only where the hit rate was
            below ``hit_rate_threshold``.
        worker_buffers: requests at a time on each GPU; another one waits.
        insertion_threads: most threads that insert rows later, in the asynchronous mode.
        refresh_ratio: the part of a cache that one step of a refresh reads anew; 0: caches are not refreshed.
        refresh_delay_s: one refresh so long after the start; 0: none.
        refresh_interval_s: a refresh as often as this; 0: none.
        refresher_buffers: most GPUs that are refreshed at a time.
        devices: the GPUs, each with its caches.
        fills_at_start: a cache is filled before the first request.
    """

    wanted: bool | None = None
    kind: CacheKind = "dynamic"
    size_ratio: float = 0.2
    key_bits: Literal[32, 64] = 64
    fp8_rows: bool = False
    mode: CacheMode = "exact"
    hit_rate_threshold: float = 0.9
    fill: CacheFill = "always"
    worker_buffers: int = 2
    insertion_threads: int = 16
    refresh_ratio: float = 0.0
    refresh_delay_s: float = 0.0
    refresh_interval_s: float = 0.0
    refresher_buffers: int = 1
    devices: tuple[int, ...] = (0,)
    fills_at_start: bool = True


class GpuNetworkConfig(Record):
    """How a model's dense network runs on a GPU. Without one it computes in float32, whatever is said.

    Attributes:
        precision: of the factors of its products: ``"fp32"``, ``"tf32"`` or ``"fp16"``; sums are of float32.
        captures_graphs: lookup and network are captured as CUDA graphs.
    """

    precision: Precision = "fp32"
    captures_graphs: bool = True
