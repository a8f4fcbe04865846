"""The GPU settings of a model: its embedding caches, and the precision of its dense network."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from serving.config.clause import (
    AS_TUPLE,
    MOST_THREADS,
    Buffers,
    Clause,
    GpuIndex,
    KeyBits,
    LineKeys,
    Record,
    Seconds,
    Share,
    Switch,
    Whole,
)
from serving.dense.device_arithmetic import Precision

CacheKind = Literal["dynamic", "static", "uvm"]
CacheMode = Literal["exact", "asynchronous"]


# HPS never finished its type stochastic and uses dynamic.
_KIND = BeforeValidator(lambda kind: "dynamic" if kind == "stochastic" else kind)


class GpuCacheConfig(Clause):
    """A model's embedding caches, one per table and GPU. ``docs/configuration.md`` describes each JSON key.

    Attributes:
        wanted: ``gpucache``. None means that the key is absent, so every GPU in use has caches.
        fill: in the exact mode, insert missing rows always, or only below ``hit_rate_threshold``.
    """

    wanted: Switch | None = Field(default=None, validation_alias="gpucache")
    kind: Annotated[CacheKind, _KIND] = Field(default="dynamic", validation_alias="embedding_cache_type")
    size_ratio: Share = Field(default=0.2, validation_alias="gpucacheper")
    key_bits: KeyBits = Field(default=64, validation_alias="embedding_cache_key_bits")
    line_keys: LineKeys = Field(default=15, validation_alias="embedding_cache_line_keys")
    fp8_rows: Switch = Field(default=False, validation_alias="fp8_quant")
    mode: CacheMode = Field(default="exact", validation_alias="embedding_cache_mode")
    hit_rate_threshold: Share = 0.9
    fill: Literal["always", "below_threshold"] = Field(default="always", validation_alias="(fill)")
    worker_buffers: Buffers = Field(default=2, validation_alias="num_of_worker_buffer_in_pool")
    insertion_threads: Annotated[Whole, Field(le=MOST_THREADS), AfterValidator(lambda threads: max(threads, 1))] = (
        Field(default=16, validation_alias="thread_pool_size")
    )
    refresh_ratio: Share = Field(default=0.0, validation_alias="cache_refresh_percentage_per_iteration")
    refresh_delay_s: Seconds = Field(default=0.0, validation_alias="refresh_delay")
    refresh_interval_s: Seconds = Field(default=0.0, validation_alias="refresh_interval")
    refresher_buffers: Buffers = Field(default=1, validation_alias="num_of_refresher_buffer_in_pool")
    devices: Annotated[tuple[GpuIndex, ...], Field(min_length=1), AS_TUPLE] = Field(
        default=(0,), validation_alias="deployed_device_list"
    )
    fills_at_start: Switch = Field(default=True, validation_alias="init_ec")

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Let only an explicit threshold limit the exact mode, because HPS's default is for its asynchronous mode."""
        is_exact = given.get("embedding_cache_mode", "exact") == "exact"
        return {**given, "fill": "below_threshold"} if "hit_rate_threshold" in given and is_exact else given

    @field_validator("size_ratio")
    @classmethod
    def _has_room(cls, size_ratio: float, info: ValidationInfo) -> float:
        if not size_ratio and info.data.get("wanted"):
            raise ValueError("expected more than 0 and at most 1, got 0: for no cache, set gpucache to false")
        return size_ratio

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.fp8_rows and self.kind != "static":
            raise ValueError(f"fp8_quant: only a static cache keeps 8-bit floats, got {self.kind}")
        if self.mode == "asynchronous" and self.kind == "static":
            raise ValueError("embedding_cache_mode: a static cache has every row from the start and inserts none later")
        if self.key_bits == 32 and self.line_keys == 7:
            raise ValueError("embedding_cache_line_keys: lines of 32-bit keys have 15 keys, got 7")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"deployed_device_list: expected each GPU once, got {list(self.devices)}")
        return self


class GpuNetworkConfig(Record):
    """How a model's dense network runs on a GPU. On the CPU it computes in float32.

    Attributes:
        precision: the precision of the factors of products. Sums are float32.
        captures_graphs: capture lookup and network as CUDA graphs.
    """

    precision: Precision = "fp32"
    captures_graphs: bool = True


def _one_precision(is_tf32: bool, info: ValidationInfo) -> bool:
    half = next((key for key in ("use_mixed_precision", "mixed_precision") if info.data.get(key)), None)
    if is_tf32 and half is not None:
        raise ValueError(f"true, but {half} asks for half precision, and TF32 is for float32: expected only one")
    return is_tf32


ONE_PRECISION = AfterValidator(_one_precision)
"""Refuse ``enable_tf32_compute`` together with earlier keys that ask for half precision."""


def precision_of(is_half: bool, is_tf32: bool) -> Precision:
    """Return the precision of a network's products."""
    return "fp16" if is_half else "tf32" if is_tf32 else "fp32"
