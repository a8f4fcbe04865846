"""The calibration batch of the engine int8: one request in a file, looked up in the model's tables."""

import logging
from pathlib import Path

import numpy as np

from serving.batch import INT32_MAX
from serving.config import ModelConfig
from serving.dense.calibration import Calibration
from serving.errors import ConfigError, ModelFileError, RequestError
from serving.lookup import LookupSession
from serving.model.names import DENSE, KEYS, ROW_PTRS
from serving.model.numpy_faults import UNREADABLE, unreadable
from serving.model.regular_file import is_absent, open_regular
from serving.model.version_writer import CALIBRATION_FILE
from serving.reading import read_batch

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 30


def look_up_calibration(
    lookup: LookupSession, model: ModelConfig, file: str | Path | None, tolerance: float
) -> Calibration:
    """Read a calibration batch and look its keys up.

    Args:
        lookup: the model's embeddings.
        model: the model.
        file: a ``.npz`` of one request with any number of samples. Its arrays have the names on the wire, ``DES``
            (optional if F is 0), ``CATCOLUMN`` and ``ROWINDEX``, in the forms of ``read_batch``. None:
            ``calibration.npz`` next to the model's graph.
        tolerance: the largest error of a probability to accept, above 0 and at most 1.
    """
    if not 0 < tolerance <= 1:
        raise ConfigError("engine int8", "tolerance", f"expected more than 0 and at most 1, got {tolerance!r}")
    path = model.network_files()[0].parent / CALIBRATION_FILE if file is None else Path(file)
    if file is None and is_absent(path):
        reason = (
            f"the engine int8 needs samples to measure its error on: give a calibration file ({_FORM}), or put it here"
        )
        raise ConfigError(str(path), "", reason)
    try:
        # The limit applies to requests only.
        config = lookup.config.model_copy(update={"max_batchsize": INT32_MAX})
        batch = read_batch(config, **_read(path, lookup.config))
    except RequestError as err:
        raise ModelFileError(path, str(err)) from err
    looked_up = lookup.lookup_pooled(batch)
    keys = batch.joined.keys.size
    if keys and looked_up.defaulted_keys == keys:
        raise ModelFileError(path, f"none of its {keys} keys is in the model's tables")
    if looked_up.defaulted_keys > keys / 2:  # default values round far better than real rows
        _log.warning(
            "%s: %d of its %d keys are in no table; is it for this model?", path, looked_up.defaulted_keys, keys
        )
    return Calibration(batch.dense, looked_up.embeddings, tolerance)


def refuse_shared_calibration(file: str | Path | None, models: int) -> None:
    """Raise ConfigError if one calibration file is given for several models: their requests differ."""
    if file is not None and models > 1:
        reason = f"is one file for {models} models: put a {CALIBRATION_FILE} next to the graph of each model instead"
        raise ConfigError(str(file), "", reason)


_FORM = f".npz with the arrays {DENSE}, {KEYS} and {ROW_PTRS} of one request, some 500 samples"


def _read(path: Path, config: ModelConfig) -> dict[str, np.ndarray | None]:
    """Return the arguments of ``read_batch``."""
    try:
        with open_regular(path, _MOST_BYTES) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ModelFileError(path, f"expected a {_FORM}; this is one array")
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError as err:
        raise ModelFileError(path, "no such file") from err
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}; expected a {_FORM}") from err
    except (MemoryError, *UNREADABLE) as err:
        raise ModelFileError(path, unreadable(path, f"a {_FORM}", err)) from err
    required = {KEYS, ROW_PTRS} | ({DENSE} if config.dense_dim else set())
    if not required <= arrays.keys() <= required | {DENSE}:
        raise ModelFileError(
            path, f"expected the arrays {', '.join(sorted(required))}, got {', '.join(arrays) or 'none'}"
        )
    return {"dense": arrays.get(DENSE), "keys": arrays[KEYS], "row_ptrs": arrays[ROW_PTRS]}
