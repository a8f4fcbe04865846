"""The status document, which the status page and ``hotrow stats`` show, and the documents of several workers."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from serving.errors import UnknownModelError
from serving.frontend.client_texts import folders_of, without_folders
from serving.frontend.version import server_version
from serving.metrics import LATENCY_BUCKETS_S, Histogram, MetricSample, RequestMetrics
from serving.parameter_server.cache_state import CacheState
from serving.parameter_server.health import State
from serving.repository import ModelRepository, ServedModel

Document = dict[str, Any]
Tables = dict[tuple[str, str], dict[str, Document]]

#: The counts whose samples name the tiers of a table, fastest first: a GPU cache is asked before every other tier.
_HITS = ("hotrow_gpu_cache_hits", "hotrow_tier_hits")
#: The field of a tier by the metric that fills it.
_TIER_FIELDS = {
    **dict.fromkeys(_HITS, "hits"),
    **dict.fromkeys(("hotrow_gpu_cache_misses", "hotrow_tier_misses"), "misses"),
    **dict.fromkeys(("hotrow_gpu_cache_rows", "hotrow_tier_rows", "hotrow_tier_estimated_rows"), "rows"),
    **dict.fromkeys(("hotrow_gpu_cache_bytes", "hotrow_tier_bytes"), "bytes"),
    "hotrow_tier_errors": "errors",
    "hotrow_tier_up": "is_up",
    "hotrow_tier_state": "state",
    "hotrow_tier_fetch_seconds": "fetch_times",
}
#: Of a server, and of a table in a tier; the best first.
_STATES = get_args(State)
_TIER_STATES = [state.value for state in CacheState]
_TABLE_FIELDS = {"hotrow_lookup_keys": "keys", "hotrow_defaulted_keys": "defaulted_keys"}


class Status:
    """Makes status documents. Counts run since the start: the difference of two documents gives rates."""

    def __init__(self, repository: ModelRepository, metrics: RequestMetrics, worker: int = 0) -> None:
        """Describe one process, which is this worker of the server; its uptime begins now."""
        self._repository, self._metrics, self._worker = repository, metrics, worker
        self._folders = folders_of(repository.path)
        self._began_s = time.monotonic()

    def document(self) -> Document:
        """The status now. May be called from any thread; waits for GPUs."""
        models, unmatched, in_flight = self._requests()
        tables = _tables(tuple(self._repository.readings()))
        readiness = self._repository.readiness_of_all()
        for state in self._repository.index():
            reason = without_folders(state.reason, self._folders)
            shown = models.setdefault(state.name, _model(state.name))
            if state.state:  # a model that was never loaded has none
                version = {"version": state.version, "state": state.state, "reason": reason}
                shown["versions"].append({**version, **self._of_version(state.name, state.version, tables)})
        return {
            "server": "hotrow",
            "version": server_version(),
            "time_s": time.time(),
            "uptime_s": time.monotonic() - self._began_s,
            "is_ready": readiness.is_ready,
            "state": readiness.state,
            "memory_bytes": _resident_bytes(),
            "requests_in_flight": in_flight,
            "unmatched_requests": unmatched,
            "models": [models[name] for name in sorted(models)],
        }

    def _requests(self) -> tuple[dict[str, Document], dict[str, float], float]:
        """The counts of requests by model, of requests that name no served model, and of requests in flight."""
        models: dict[str, Document] = {}
        unmatched: dict[str, float] = {}
        in_flight = 0.0
        for sample in self._metrics.samples():
            labels, value = dict(sample.labels), sample.value
            name = labels.get("model", "")
            model = models.setdefault(name, _model(name))
            if sample.name == "hotrow_requests":
                model["requests"][labels["code"]] = value
            elif sample.name == "hotrow_samples":
                model["samples"] = value
            elif sample.name == "hotrow_request_seconds" and isinstance(value, Histogram):
                model["latency"] = value.document()
            elif sample.name == "hotrow_requests_in_flight" and not isinstance(value, Histogram):
                in_flight = value
        if "" in models:
            unmatched = models.pop("")["requests"]
        return models, unmatched, in_flight

    def _of_version(self, model: str, version: str, tables: Tables) -> Document:
        """The tables of a version, with the slots and the dimension of each, and its reader of updates.

        It has the names of the values that requests may have by name, and the outputs. A version that is not served has
        none.
        """
        try:
            served = self._repository.loaded(model, version)
        except UnknownModelError:
            return {"features": [], "outputs": [], "tables": [], "updates": []}
        counted = tables.get((model, str(served.config.of_tables.version)), {})
        shaped = [  # copies, because several versions may share tables, and counts of other workers are added to each
            {"name": table.name, "slots": table.slots, "dim": table.dim, **deepcopy(counted[table.name])}
            for table in served.config.tables
            if table.name in counted
        ]
        names = [] if served.features is None else list(served.features.names)
        outputs = [
            {"name": output.name, "kind": output.kind, "width": output.width} for output in served.config.outputs
        ]
        return {"features": names, "outputs": outputs, "tables": shaped, "updates": self._updates(served)}

    def _updates(self, served: ServedModel) -> Sequence[Document]:
        """What this process reads of a version's updates: one document or none."""
        if served.updates is None:
            return []
        document = served.updates.document()
        document["fault"] = without_folders(document["fault"], self._folders)
        return [{"worker": self._worker, **document}]


def merged_status(documents: Iterable[Document]) -> Document:
    """One document of several workers: the others are added to the first document, which is returned.

    Counts add up, except those of updates: each worker that reads them has its own entry. A state is the worst of all.
    """
    merged, *others = documents
    for other in others:
        merged["uptime_s"] = max(merged["uptime_s"], other["uptime_s"])
        merged["is_ready"] &= other["is_ready"]
        merged["state"] = max(merged["state"], other["state"], key=_STATES.index)
        _add(merged, other, ("memory_bytes", "requests_in_flight"))
        _add_counts(merged["unmatched_requests"], other["unmatched_requests"])
        for model, same in _pairs(merged["models"], other["models"], "name"):
            _add(model, same, ("samples",))
            _add_counts(model["requests"], same["requests"])
            _add_times(model["latency"], same["latency"])
            for version, same_version in _pairs(model["versions"], same["versions"], "version"):
                if _badness(same_version) > _badness(version):
                    version |= {"state": same_version["state"], "reason": same_version["reason"]}
                version["updates"] += same_version["updates"]
                for table, same_table in _pairs(version["tables"], same_version["tables"], "name"):
                    _add(table, same_table, ("keys", "defaulted_keys"))
                    for tier, same_tier in _pairs(table["tiers"], same_table["tiers"], "name"):
                        _add(tier, same_tier, ("hits", "misses", "errors"))
                        tier["is_up"] &= same_tier["is_up"]
                        tier["state"] = max(tier["state"], same_tier["state"], key=_TIER_STATES.index)
                        if tier["fetch_times"] and same_tier["fetch_times"]:
                            _add_times(tier["fetch_times"], same_tier["fetch_times"])
            model["versions"].sort(key=lambda version: int(version["version"] or 0))
    merged["models"].sort(key=lambda model: str(model["name"]))
    return merged


def merged_index(indexes: Iterable[list[Document]]) -> list[Document]:
    """One repository index of several workers, by name and version; each state is the worst of all workers."""
    merged: dict[tuple[str, int], Document] = {}
    for entry in chain.from_iterable(indexes):
        place = entry["name"], int(entry["version"] or 0)
        if place not in merged or _badness(entry) > _badness(merged[place]):
            merged[place] = entry
    return [merged[place] for place in sorted(merged)]


def _badness(version: Document) -> tuple[bool, bool]:
    return version["state"] != "READY", bool(version["reason"])


def _pairs(ours: list[Document], theirs: Iterable[Document], key: str) -> Iterator[tuple[Document, Document]]:
    """The entries of two lists that have the same ``key``; entries that only ``theirs`` has are added to ``ours``."""
    by_key = {entry[key]: entry for entry in ours}
    for entry in theirs:
        if entry[key] in by_key:
            yield by_key[entry[key]], entry
        else:
            ours.append(entry)


def _add(ours: Document, theirs: Document, fields: Iterable[str]) -> None:
    for name in fields:
        ours[name] += theirs[name]


def _add_counts(ours: dict[str, float], theirs: dict[str, float]) -> None:
    for name, count in theirs.items():
        ours[name] = ours.get(name, 0) + count


def _add_times(ours: Document, theirs: Document) -> None:
    ours["counts"] = [sum(pair) for pair in zip(ours["counts"], theirs["counts"], strict=True)]
    ours["sum_s"] += theirs["sum_s"]


def _model(name: str) -> Document:
    """A model without requests."""
    return {
        "name": name,
        "requests": {},
        "samples": 0,
        "latency": Histogram(LATENCY_BUCKETS_S).document(),
        "versions": [],
    }


def _tables(samples: Iterable[MetricSample]) -> Tables:
    """The counts of every table by model and version, then by name."""
    found: Tables = {}
    for sample in sorted(samples, key=_tiers_first):
        labels = dict(sample.labels)
        if "table" not in labels:
            continue
        of_version = found.setdefault((labels["model"], labels["version"]), {})
        table = of_version.setdefault(labels["table"], {"keys": 0, "defaulted_keys": 0, "tiers": []})
        if sample.name in _TABLE_FIELDS:
            table[_TABLE_FIELDS[sample.name]] = sample.value
        elif sample.name in _TIER_FIELDS:
            _fill(table, labels.get("tier") or labels["device"], sample)
    return found


def _tiers_first(sample: MetricSample) -> int:
    """Sorts the samples that name the tiers before all others."""
    return _HITS.index(sample.name) if sample.name in _HITS else len(_HITS)


def _fill(table: Document, name: str, sample: MetricSample) -> None:
    """Set the field of one tier that ``sample`` counts."""
    tier = next((entry for entry in table["tiers"] if entry["name"] == name), None)
    if tier is None:
        tier = dict.fromkeys(("rows", "bytes", "fetch_times")) | {"hits": 0, "misses": 0, "errors": 0}
        tier |= {"name": name, "is_up": True, "state": "serving", "rows_are_estimated": False}
        table["tiers"].append(tier)
    value: Any = sample.value.document() if isinstance(sample.value, Histogram) else sample.value
    if sample.name == "hotrow_tier_up":
        value = bool(value)
    elif sample.name == "hotrow_tier_state":
        value = dict(sample.labels)["state"]
    tier[_TIER_FIELDS[sample.name]] = value
    if sample.name == "hotrow_tier_estimated_rows":
        tier["rows_are_estimated"] = True


def _resident_bytes() -> int:
    """RAM of this process, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
