"""Embedding lookup, the first half of a prediction: from a batch's keys to pooled vectors, one tensor per table."""

from serving.lookup.devices import DeviceChoice, open_devices, open_lookups, warn_of_idle_caches
from serving.lookup.session import LookupResult, LookupSession
from serving.option_values import check_device_name

__all__ = [
    "DeviceChoice",
    "LookupResult",
    "LookupSession",
    "check_device_name",
    "open_devices",
    "open_lookups",
    "warn_of_idle_caches",
]
