"""One model in full: from a request's tensors to answers, or from keys to rows."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from serving.batch import Batch, check_batch, join_batches
from serving.calibration import look_up_calibration
from serving.candidates import read_document, read_shared
from serving.config import ModelConfig, read_inference_config, read_model_directory
from serving.defaults_watch import DefaultsWatch
from serving.errors import ConfigError, RequestError
from serving.features import FEATURES_FILE, FeatureReader, columns_of_frame, is_frame, open_features, slots_of
from serving.lookup import LookupResult, LookupSession
from serving.metrics import MetricSample
from serving.model.names import CANDIDATES
from serving.model.records import Output, default_outputs
from serving.option_values import DEFAULT_TOLERANCE, MAX_CANDIDATES, Engine, refuse_idle_calibration
from serving.outputs import (
    Asked,
    Ranking,
    answers_of,
    asking,
    checked_top_k,
    ranking,
    refuse_not_finite,
    wanted_outputs,
)
from serving.reading import read_batch, read_columns
from serving.required_keys import RequiredKeys
from serving.routes import LeastBusy, Prediction, open_routes
from serving.storage.store import Keys

_MOST_THREADS = 1024
_MOST_READERS = 16
#: What takes the place of options of ``/predict``.
_CALLS = {
    "outputs": "predict(features, outputs=[...])",
    "top_k": "rank(features, top_k, output)",
    "top_output": "rank(features, top_k, output)",
}

_log = logging.getLogger(__name__)


class ModelSession:
    """A model on one device or several. Several threads may use it at the same time.

    Attributes:
        config: the model.
        health: the outages of the model, and how its requests ended, which front ends report.
    """

    def __init__(self, config: ModelConfig, lookups: Sequence[LookupSession]) -> None:
        """Take at least one lookup; each is on another device."""
        self.config = config
        self.health = lookups[0].health
        self._lookups = tuple(lookups)
        self._releases: list[Callable[[], None]] = []

    @property
    def never_waits(self) -> bool:
        """See ``LookupSession.never_waits``."""
        return all(lookup.never_waits for lookup in self._lookups)

    @property
    def is_answering(self) -> bool:
        """Whether some device can still answer: a device whose work failed is not used again."""
        return len(self.failed_devices) < len(self._lookups)

    @property
    def failed_devices(self) -> list[str]:
        """The names of the devices that are not used again, because work on them failed."""
        failed = [lookup for lookup in self._lookups if not lookup.is_answering]
        return ["CPU" if session.device is None else session.device.name for session in failed]

    def readings(self) -> Iterator[MetricSample]:
        """Return the counters of its caches and of its requests for the metrics page."""
        for lookup in self._lookups:
            yield from lookup.readings()
        yield from self.request_readings()

    def request_readings(self) -> Iterator[MetricSample]:
        """Return what it counts of requests, without the caches, which versions may share."""
        yield from ()

    def on_close(self, release: Callable[[], None]) -> None:
        """Call ``release`` when the session is closed, after all releases that were added earlier."""
        self._releases.append(release)

    def close(self) -> None:
        """Release what was opened for this session. Closing twice is allowed.

        With GPU caches, requests in flight are answered first; see ``CachedLookupSession.close``. Without GPU caches,
        they may fail with UnknownModelError. All later requests fail with it.
        """
        with ExitStack() as releases:  # calls every release, also after one of them fails
            while self._releases:
                releases.callback(self._releases.pop())

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class LookupOnlySession(ModelSession):
    """A model without a dense network: from keys to rows."""

    def __init__(self, lookups: Sequence[LookupSession]) -> None:
        """Take at least one lookup; each request goes to the lookup with the fewest requests."""
        super().__init__(lookups[0].config, lookups)
        self._least_busy = LeastBusy(lookups, lambda lookup: lookup.is_answering)

    def lookup(self, keys: Sequence[Keys]) -> LookupResult:
        """See ``LookupSession.lookup``."""
        with self._least_busy.one() as lookup:
            return lookup.lookup(keys)

    def lookup_together(self, requests: Sequence[Sequence[Keys]]) -> list[LookupResult]:
        """Look up the keys of several requests as one request, and return the answer to each request.

        Raises:
            HotrowError: see ``LookupSession.lookup``; no request has an answer.
        """
        of_tables = list(zip(*requests, strict=True))
        together = self.lookup([np.concatenate(of_table) for of_table in of_tables])
        parts = [
            np.split(rows, list(accumulate(keys.size for keys in of_table))[:-1])
            for rows, of_table in zip(together.embeddings, of_tables, strict=True)
        ]
        defaulted = _defaulted_of_each(self._lookups[0], requests, together)
        return [LookupResult(rows, count) for rows, count in zip(zip(*parts, strict=True), defaulted, strict=True)]


class InferenceSession(ModelSession):
    """A model that answers requests. Several threads may use it at the same time.

    Attributes:
        config: the model.
        outputs: what requests can ask for.
        graph: its layer graph; only the inputs if the network is an ONNX file.
        engine: what runs the dense network: ``"numpy"``, ``"onnx"`` or ``"int8"`` on the CPU, ``"cuda"`` or
            ``"runner"`` on the device of the caches.
        features: reads its raw features; None: requests have keys.
        required_keys: the slots in which samples need keys.
        quantization: the error that the engine int8 measured when it was opened; None for other engines.
        embedding_cache: looks up its embeddings; the first embedding cache if there are several.
        max_candidates: the most samples of a request in which samples share rows; see ``read_shared``.
        health: the outages of the model, and how its requests ended, which front ends report.
    """

    def __init__(
        self,
        config_file: str | Path | ModelConfig,
        device_id: int,
        embedding_cache: LookupSession | Sequence[LookupSession],
        engine: Engine = "auto",
        threads: int = 1,
        calibration: str | Path | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
        max_candidates: int = MAX_CANDIDATES,
    ) -> None:
        """Open the dense network next to the embeddings.

        Args:
            config_file: the model's v3.0 inference JSON, its version directory, or its configuration.
            device_id: the same as the first embedding cache's.
            embedding_cache: what ``CreateEmbeddingCache`` returned for the same model. Or several of these, one per
                GPU: each batch goes to the embedding cache with the fewest batches in flight.
            engine: see ``open_network``.
            threads: how many threads work on one dense network call in ONNX Runtime.
            calibration: the samples on which the engine int8 is measured; see ``look_up_calibration``.
            tolerance: the largest error of a probability that the engine int8 may have on these samples.
            max_candidates: the most candidates of a request, answered in parts of ``max_batchsize`` samples. Requests
                may have up to ``max_batchsize`` candidates in any case, and no more if the network mixes samples.

        Raises:
            ConfigError: the configuration is invalid or does not match the embedding cache; the engine int8 has no
                calibration or exceeds the tolerance; another engine has a calibration; ``engine`` or ``threads`` is
                invalid.
            ModelFileError: the dense weights or the ONNX network are missing, damaged, or not the graph's.
            MissingExtraError: the engine, or the model's ONNX network, needs a package that is not installed.
        """
        caches = _checked_caches(embedding_cache)
        check_runtime("InferenceSession", engine, threads)
        self.embedding_cache = caches[0]
        config = _read_config(config_file, self.embedding_cache.config)
        super().__init__(config, caches)
        self.outputs = config.outputs
        self._default_outputs = tuple(default_outputs(config.outputs))
        self._readers: dict[frozenset[int], FeatureReader] = {}  # by the dense features that are needed
        _check_device(config, device_id, self.embedding_cache)
        for cache in caches:
            _check_model(config, cache)
        self.features = open_features(config)
        refuse_idle_calibration(calibration, engine)
        measure = None
        if engine == "int8":  # a calibration may exceed max_batchsize, and must not see defaults
            tiers = LookupSession(self.embedding_cache.server, self.embedding_cache.config)
            measure = look_up_calibration(tiers, config, calibration, tolerance)
        self.graph, network, routes = open_routes(config, caches, engine, threads, measure)
        if config.slot_keys == "shifted":
            _log.warning(
                "model %s: its graph has slot_size_array, so training may have shifted the keys of each slot. Then "
                "requests need shifted keys, and keys that begin at 0 in each slot get wrong rows. New exports of "
                "`hotrow train` take unshifted keys",
                config.name,
            )
        most = config.max_batchsize
        self.max_candidates = most if self.graph.mixes_samples else max(most, max_candidates)
        self.quantization = network.quantization
        self.engine = network.engine
        self._routes = LeastBusy(routes, lambda route: route.is_answering)
        self._defaults = DefaultsWatch(self.embedding_cache.server, config)
        self.required_keys = RequiredKeys(slots_of(config), self.graph.needs, self.features)

    def predict(
        self,
        dense_feature: Any,
        embeddingcolumns: Any = None,
        row_ptrs: Any = None,
        i64_input_key: bool | None = None,
        *,
        outputs: Sequence[str] | None = None,
    ) -> Any:
        """Predict from lists or arrays, which ``read_batch`` describes, or from raw features, see ``read``.

        ``rank`` returns the best candidates alone.

        Args:
            dense_feature: dense features, sample by sample; or the raw features, without other arguments. A raw feature
                with one value where others have several is the same for every sample.
            embeddingcolumns: keys.
            row_ptrs: CSR offsets of the slots into the keys; None: the keys are [B, S], one key per slot.
            i64_input_key: if given, must agree with the model's key type.
            outputs: the names of the outputs to answer; None: ``OUTPUT0``, or all outputs if the model's graph states
                them.

        Returns:
            the answer, float32[B, L]. If ``outputs`` are given, or the model states several outputs, a dictionary with
            the answer of each output by its name.

        Raises:
            RequestError: the tensors are not a request for this model, or it has no such output.
            StoreError: a tier did not answer, and no other tier holds one of the keys.
        """
        has_keys = embeddingcolumns is not None or row_ptrs is not None
        if has_keys and isinstance(dense_feature, Mapping):
            raise RequestError("raw features and keys came; a request has keys or raw features")
        if isinstance(dense_feature, Mapping) or (is_frame(dense_feature) and not has_keys):
            batch = self.read(dense_feature, outputs or ())
        elif self.features is not None and not has_keys:
            expected = "expected raw features by name, a data frame, or dense features with keys"
            raise RequestError(f"{expected}; got only {type(dense_feature).__name__}")
        elif i64_input_key is not None and i64_input_key != (self.config.key_type == "I64"):
            raise RequestError(f"i64_input_key={i64_input_key}, but the model's keys are {self.config.key_type}")
        else:
            given = read_batch(self.config, dense_feature, embeddingcolumns, row_ptrs)
            batch = asking(given, self.outputs, Asked(outputs or ()))
        values = self.predict_batch(batch).values
        if outputs is None and len(self._default_outputs) == 1:
            return values
        return answers_of(values, self.wanted(batch))

    def wanted(self, batch: Batch) -> Sequence[Output]:
        """Return the outputs that a request asks for."""
        return self._default_outputs if batch.wanted is None else batch.wanted

    def rank(self, features: Any, top_k: int, output: str = "") -> Ranking:
        """Return the best candidates of each user. Candidates with equal values stay in their order.

        Args:
            features: see ``read``; or a batch, which ``read`` or ``read_batch`` returned. Without ``CANDIDATES``, all
                samples are candidates of one user.
            top_k: how many candidates of each user to return.
            output: the name of the output that ranks them, which has one number for each sample. It may be left out if
                the model has only one such output.

        Raises:
            RequestError: see ``predict``; a user has fewer candidates, or the model has no such output.
        """
        asked = Asked((), checked_top_k(top_k), output)
        given = features if isinstance(features, Batch) else self._read(features, asked)
        batch = asking(given, self.outputs, asked)
        assert batch.top is not None
        if given.wanted is not None and batch.top.output not in given.wanted:
            raise RequestError(f"the batch was read for other outputs; read it for {batch.top.output.name!r}")
        return ranking(self.predict_batch(batch).values, batch, batch.top)

    def read(self, features: Any, outputs: Sequence[str] = ()) -> Batch:
        """Transform and check raw features.

        Args:
            features: a mapping of names to values, one for each sample (a list, an array, or for a list feature a list
                of lists); or a data frame of pandas, Polars or pyarrow. A feature that is absent is missing. In a
                mapping, a feature with one value where others have several is the same for every sample. With
                ``CANDIDATES``, how many candidates each user has, a feature may have a value for each user. Or the
                document ``{"context": {...}, "candidates": [{...}, ...]}`` with the features of a user and of each
                candidate.
            outputs: the names of the outputs that are asked for; empty: see ``predict``.

        Raises:
            RequestError: the model takes no raw features, a feature is unknown, a value cannot be used, or the model
                has no such output.
            MissingExtraError: a data frame needs pyarrow.
        """
        asked = Asked(outputs)
        return asking(self._read(features, asked), self.outputs, asked)

    def features_for(self, asked: Asked) -> FeatureReader | None:
        """Return what reads the raw features of a request; None if the model takes none.

        Raises:
            RequestError: the model has no such output.
        """
        return self.features_of(wanted_outputs(self.outputs, asked))

    def features_of(self, wanted: Sequence[Output] | None) -> FeatureReader | None:
        """Return what reads the raw features of a request for outputs; None: those of a request that names none.

        Numbers that none of these outputs depends on may be missing.
        """
        needs = self.graph.needs
        if self.features is None or wanted is None or any(output.name not in needs for output in wanted):
            return self.features
        needed = frozenset[int]().union(*(needs[output.name].dense for output in wanted))
        if len(needed) == self.config.dense_dim:
            return self.features
        reader = self._readers.get(needed)
        if reader is None:
            if len(self._readers) >= _MOST_READERS:
                self._readers.clear()
            reader = self._readers[needed] = self.features.without(set(range(self.config.dense_dim)) - needed)
        return reader

    def _read(self, features: Any, asked: Asked) -> Batch:
        reader = self.features_for(asked)
        if reader is None:
            raise RequestError(f"model {self.config.name!r} has no {FEATURES_FILE}, so it takes keys, not raw features")
        if not isinstance(features, Mapping):
            columns, samples = columns_of_frame(reader, features)
            if samples > self.config.max_batchsize:
                limit = f"{samples:,} rows, but the model takes at most {self.config.max_batchsize:,} in one call"
                raise RequestError(f"{limit}: slice the frame, or score a file with `hotrow predict --data`")
            return read_columns(self.config, reader, columns, samples)
        given = dict(features)
        for option, call in _CALLS.items():
            if option in given and option not in reader.names:
                raise RequestError(f"{option}: in Python, use session.{call}")
        if isinstance(given.get("context"), Mapping) or ("candidates" in given and "candidates" not in reader.names):
            return read_document(self.config, reader, given, self.max_candidates)
        counts = given.pop(CANDIDATES, None)
        return read_shared(self.config, reader, reader.named_columns(given), counts, self.max_candidates)

    def request_readings(self) -> Iterator[MetricSample]:
        """See ``ModelSession.request_readings``."""
        if self.features is not None:
            yield from self.features.readings((("model", self.config.name), ("version", str(self.config.version))))

    def predict_batch(self, batch: Batch) -> Prediction:
        """Predict from a checked batch.

        Returns:
            the answer. It has the columns of all outputs. Only those that the batch asks for are checked.

        Raises:
            RequestError: ``batch`` is no Batch, it has fewer samples than the graph can work on, a sample has no key
                where the network needs one, or the answer to a sample is not a finite number.
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            DeviceFaultError: work on the GPU failed, now or earlier, and there is no other GPU.
        """
        check_batch(batch)
        if too_few := self.graph.too_few(batch.samples):
            raise RequestError(too_few)
        self.required_keys.check(batch, batch.wanted)
        with self._routes.one() as route:
            prediction = route.predict(batch)
        if batch.bags is not None and self.embedding_cache.device is not None:
            keys = [of_table.keys for of_table in batch.tables]  # as they came: a device counts those of each sample
            [count] = _defaulted_of_each(self.embedding_cache, [keys], prediction)
            prediction = replace(prediction, defaulted_keys=count)
        self._defaults.note(batch, prediction.defaulted_keys)
        refuse_not_finite(prediction.values, self.wanted(batch), batch, self.config, self.features)
        return prediction

    def predict_batches(self, batches: Sequence[Batch]) -> list[Prediction]:
        """Predict several checked batches as one, and return the answer to each batch.

        An answer's last bits may differ from those of ``predict_batch``, because matrix products of another size may
        add in another order.

        Args:
            batches: together at most ``max_batchsize`` samples, of a model whose samples do not mix.

        Raises:
            RequestError, StoreError, DeviceFaultError: see ``predict_batch``; no batch has an answer.
        """
        joined = join_batches(batches)
        for batch in batches:
            self.required_keys.check(batch, batch.wanted)
        wanted = batches[0].wanted if len({batch.wanted for batch in batches}) == 1 else None
        together = self.predict_batch(replace(joined, wanted=wanted or ()))
        parts = np.split(together.values, list(accumulate(batch.samples for batch in batches))[:-1])
        for part, batch in zip(parts, batches, strict=True):
            refuse_not_finite(part, self.wanted(batch), batch, self.config, self.features)
        keys = [[table.keys for table in batch.tables] for batch in batches]
        defaulted = _defaulted_of_each(self.embedding_cache, keys, together)
        return [Prediction(part, count) for part, count in zip(parts, defaulted, strict=True)]

    def refresh_embedding_cache(self) -> None:
        """Read all cached rows from the tiers again, for example after another process has changed rows there.

        Raises:
            StoreError: a tier did not answer; the remaining rows stay as they were.
        """
        for cache in self._lookups:
            cache.refresh()

    def __repr__(self) -> str:
        """Return the model and what runs its dense network."""
        return f"InferenceSession({self.config.summary}; {self.engine})"


def _defaulted_of_each(
    lookup: LookupSession, requests: Sequence[Sequence[Keys]], together: LookupResult | Prediction
) -> list[int]:
    """Return how many keys of each request got a default; in the asynchronous mode without late keys.

    Args:
        lookup: has the model's tables.
        requests: the keys of each request, one int64[N] per table.
        together: the answer to all requests.

    Raises:
        StoreError: a tier did not answer, and no other tier holds one of the keys.
    """
    counts = [0] * len(requests)
    for table, found in together.incomplete if together.defaulted_keys else ():
        of_requests = [keys[table] for keys in requests]
        if found is None:
            name = lookup.config.full_name(lookup.config.tables[table])
            distinct, places = np.unique(np.concatenate(of_requests), return_inverse=True)
            found = lookup.server.contains(name, distinct)[places]
        begin = 0
        for at, keys in enumerate(of_requests):
            end = begin + keys.size
            counts[at] += keys.size - int(np.count_nonzero(found[begin:end]))
            begin = end
    return counts


def check_runtime(source: str, engine: Any, threads: Any) -> None:
    """Check how the dense network will run, before anything is loaded; ConfigError names ``source``."""
    if engine not in get_args(Engine):
        raise ConfigError(source, "engine", f"expected auto, numpy, onnx or int8, got {engine!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(source, "threads", f"expected a whole number from 1 to {_MOST_THREADS}, got {threads!r}")


def _read_config(config: str | Path | ModelConfig, of_cache: ModelConfig) -> ModelConfig:
    if isinstance(config, ModelConfig):
        return config
    path = Path(config)
    if path.is_dir():
        return read_model_directory(path)
    return read_inference_config(path, of_cache.name, of_cache.key_type == "I64")


def _checked_caches(given: Any) -> tuple[LookupSession, ...]:
    caches = tuple(given) if isinstance(given, Sequence) else (given,)
    for cache in caches:
        if not isinstance(cache, LookupSession):
            reason = f"expected what CreateEmbeddingCache returned, got {type(cache).__name__}"
            raise ConfigError("InferenceSession", "embedding_cache", reason)
    if not caches:
        raise ConfigError("InferenceSession", "embedding_cache", "expected at least one, got none")
    return caches


def _check_device(config: ModelConfig, device_id: int, cache: LookupSession) -> None:
    if device_id != cache.device_id:
        reason = f"device_id {device_id}, but the embedding cache was created for device {cache.device_id}"
        raise ConfigError(config.source, "", reason)


def _check_model(config: ModelConfig, cache: LookupSession) -> None:
    if any(getattr(config, name) != getattr(cache.config, name) for name in ("tables", "key_type", "dense_dim")):
        reason = f"the embedding cache is of another model, {cache.config.name!r} from {cache.config.source}"
        raise ConfigError(config.source, "", reason)
