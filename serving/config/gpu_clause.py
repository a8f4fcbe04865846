"""The keys of a model in a ``ps.json`` that shape its GPU cache, or its dense network on a GPU."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from serving.config.gpu_records import CacheFill, CacheKind, CacheMode, GpuCacheConfig, GpuNetworkConfig
from serving.config.precision import ONE_PRECISION, precision_of
from serving.config.scalars import (
    MOST_BUFFERS,
    MOST_THREADS,
    Count,
    GpuIndex,
    KeyBits,
    Magnitude,
    Seconds,
    Share,
    Switch,
    Whole,
)
from serving.config.validation import Clause


class GpuClause(Clause):
    """What HPS's ``models`` say of GPUs (source: HPS's configuration, HugeCTR v24.06). No effect without one.

    Attributes:
        gpucache: whether there is a cache. HPS's default is true, so is this one.
        gpucacheper: the part of each table's rows that it holds; above 0, where there is one.
        hit_rate_threshold: in the asynchronous mode, the hit rate from which an answer does not wait for missing rows;
            in the exact one, v3.0's: that below which a cache is given the rows that it lacked, where it is stated, and
            always where it is not.
        embedding_cache_type: ``dynamic``, ``static`` or ``uvm``; ``stochastic`` is ``dynamic``, as it is in HPS.
        embedding_cache_mode: Hotrow's own: whether answers may be made of default values while rows are on their way.
            HPS's are: its mode is the asynchronous one.
        embedding_cache_key_bits: Hotrow's own: of the keys in a cache's lines; 32 for models of uint32 keys alone.
        use_static_table: an older name of the type static.
        num_of_worker_buffer_in_pool: requests at a time on each GPU.
        num_of_refresher_buffer_in_pool: GPUs that are refreshed at a time.
        cache_refresh_percentage_per_iteration: the part of a cache that one step of a refresh reads anew.
        refresh_delay: seconds from the start to one refresh.
        refresh_interval: seconds between refreshes; HPS cuts fractions off.
        deployed_device_list: the GPUs.
        init_ec: whether a cache is filled at the start.
        thread_pool_size: most threads that insert rows later, in the asynchronous mode.
        fp8_quant: a static cache keeps 8-bit floats.
        enable_pagelock: where HPS keeps the rows of a static cache; Hotrow's type ``uvm`` keeps them so.
        mixed_precision: an older name of ``use_mixed_precision``.
        use_mixed_precision: whether the dense network computes in half precision.
        enable_tf32_compute: Hotrow's own here, the name is that of HugeCTR's solver: whether products of float32 may be
            computed in TF32.
        use_cuda_graph: whether lookup and dense network are captured as CUDA graphs.

    The attributes behind these have no effect on a GPU either: ``scaler`` scales gradients, of which there are none
    here; cuBLAS searches its algorithms itself; there is one implementation of the cache; contexts are TensorFlow's
    and TensorRT's.
    """

    gpucache: Switch = True
    gpucacheper: Share = 0.2
    hit_rate_threshold: Share = 0.9
    embedding_cache_type: Literal["dynamic", "static", "uvm", "stochastic"] = "dynamic"
    embedding_cache_mode: CacheMode = "exact"
    embedding_cache_key_bits: KeyBits = 64
    use_static_table: Switch = False
    num_of_worker_buffer_in_pool: Annotated[Count, Field(le=MOST_BUFFERS)] = 2
    num_of_refresher_buffer_in_pool: Annotated[Count, Field(le=MOST_BUFFERS)] = 1
    cache_refresh_percentage_per_iteration: Share = 0.0
    refresh_delay: Seconds = 0.0
    refresh_interval: Seconds = 0.0
    deployed_device_list: Annotated[list[GpuIndex], Field(min_length=1)] = Field(default_factory=lambda: [0])
    init_ec: Switch = True
    thread_pool_size: Annotated[Whole, Field(le=MOST_THREADS)] = 16
    fp8_quant: Switch = False
    enable_pagelock: Switch = False
    mixed_precision: Switch = False
    use_mixed_precision: Switch = False
    enable_tf32_compute: Annotated[Switch, ONE_PRECISION] = False
    use_cuda_graph: Switch = True

    scaler: Magnitude | None = None
    use_algorithm_search: Switch | None = None
    use_context_stream: Switch | None = None
    use_hctr_cache_implementation: Switch | None = None

    @property
    def kind(self) -> CacheKind:
        """Of the cache."""
        if self.use_static_table and "embedding_cache_type" not in self.model_fields_set:
            return "static"
        return "dynamic" if self.embedding_cache_type == "stochastic" else self.embedding_cache_type

    @property
    def _fill(self) -> CacheFill:
        # HPS's default is of its asynchronous mode: only who states a threshold means one here.
        is_stated = "hit_rate_threshold" in self.model_fields_set
        return "below_threshold" if is_stated and self.embedding_cache_mode == "exact" else "always"

    @field_validator("gpucacheper")
    @classmethod
    def _has_room(cls, size_ratio: float, info: ValidationInfo) -> float:
        if not size_ratio and info.data.get("gpucache"):
            raise ValueError("expected above 0 to 1, got 0: gpucache false asks for no cache")
        return size_ratio

    @model_validator(mode="after")
    def _gpu_keys_agree(self) -> Self:
        kind, devices = self.kind, self.deployed_device_list
        if self.use_static_table and kind != "static":
            raise ValueError(f"use_static_table: true, but embedding_cache_type is {self.embedding_cache_type!r}")
        if self.fp8_quant and kind != "static":
            raise ValueError(f"fp8_quant: only a cache of the type static keeps 8-bit floats, this one is {kind}")
        if self.enable_pagelock and kind == "static":
            raise ValueError(
                "enable_pagelock: the rows of a static cache lie in the GPU's memory; those of the "
                "embedding_cache_type uvm lie in page-locked host memory"
            )
        if self.embedding_cache_mode == "asynchronous" and kind == "static":
            raise ValueError("embedding_cache_mode: a static cache has every row, none is inserted later")
        if len(set(devices)) < len(devices):
            raise ValueError(f"deployed_device_list: expected each GPU once, got {devices}")
        return self

    def cache_record(self) -> GpuCacheConfig:
        """The embedding cache."""
        return GpuCacheConfig(
            wanted=self.gpucache,
            kind=self.kind,
            size_ratio=self.gpucacheper,
            key_bits=self.embedding_cache_key_bits,
            fp8_rows=self.fp8_quant,
            mode=self.embedding_cache_mode,
            hit_rate_threshold=float(self.hit_rate_threshold),
            fill=self._fill,
            worker_buffers=self.num_of_worker_buffer_in_pool,
            insertion_threads=max(self.thread_pool_size, 1),
            refresh_ratio=self.cache_refresh_percentage_per_iteration,
            refresh_delay_s=self.refresh_delay,
            refresh_interval_s=self.refresh_interval,
            refresher_buffers=self.num_of_refresher_buffer_in_pool,
            devices=tuple(self.deployed_device_list),
            fills_at_start=self.init_ec,
        )

    def network_record(self) -> GpuNetworkConfig:
        """The dense network."""
        return GpuNetworkConfig(
            precision=precision_of(self.use_mixed_precision or self.mixed_precision, self.enable_tf32_compute),
            captures_graphs=self.use_cuda_graph,
        )
