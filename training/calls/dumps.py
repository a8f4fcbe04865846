"""The folders of ``sok.dump`` and ``sok.load``: one per variable, which any number of processes can read.

A folder has HugeCTR's directory format, so ``hotrow import`` reads it too. A variable without a name is called
``variable_<index in the list>``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.host import first_outside
from serving.errors import ModelFileError
from serving.model.sparse_file import open_sparse
from training import arguments

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
#: Rows that are read or written at a time.
PART_ROWS = 65_536


class StoredVariable(Protocol):
    """A variable whose rows a dump writes and a load reads."""

    @property
    def stored_name(self) -> str | None:
        """The name of its folder, or None."""

    @property
    def dimension(self) -> int:
        """D."""

    def owns(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys int64[N] have their row in this process, bool[N]."""

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Raise ModelFileError if the variable cannot have stored rows with these keys."""

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Add or replace rows of this process."""


class SteppedVariable(StoredVariable, Protocol):
    """A variable that knows in which step each row was updated."""

    @property
    def step(self) -> int:
        """The last step in which a row was updated; 0: none."""


Stepped = TypeVar("Stepped", bound=SteppedVariable)


def replaced_folder(call: str, path: Any) -> Path:
    """Return the folder that a dump replaces, or raise ValueError if the current folder would go with it."""
    folder = arguments.path(call, "path", path).resolve()
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"{call}: expected a folder to replace, got {str(path)!r}, which contains the current folder")
    return folder


def by_name(call: str, variables: Any, kinds: tuple[type[Any], ...]) -> dict[str, Any]:
    """Return variables of these types by the name of their folder."""
    given = list(variables) if isinstance(variables, list | tuple) else [variables]
    if not given:
        raise ValueError(f"{call}: expected at least one variable, got none")
    named: dict[str, Any] = {}
    for number, variable in enumerate(given):
        if not isinstance(variable, kinds):
            came = f"{type(variable).__name__}{' of Keras' * type(variable).__module__.startswith('keras.')}"
            raise TypeError(f"{call}: expected variables of sok, got {came}")
        name = variable.stored_name or f"variable_{number}"
        if name in named:
            raise ValueError(f"{call}: expected variables of different names, got two called {name!r}")
        named[name] = variable
    return named


def require_rows(call: str, counts: Mapping[str, int]) -> None:
    """Raise ValueError if a variable has no rows yet."""
    for name, count in counts.items():
        if not count:
            raise ValueError(f"{call}: variable {name!r} has no rows yet")


def require_all_keys(path: Any, keys: Ints, rows: int) -> None:
    """Raise ModelFileError if stored keys, which are distinct, are not 0 to ``rows`` - 1."""
    if len(keys) != rows or first_outside(keys, 0, rows - 1) < rows:
        came = f"{len(keys):,} rows with keys from {keys.min()} to {keys.max()}"
        raise ModelFileError(path, f"expected {rows:,} rows with keys from 0 to {rows - 1}, found {came}")


def steps_since(
    call: str, variables: Mapping[str, Any], since: Any, kind: type[Stepped]
) -> list[tuple[str, Stepped, int]]:
    """Return the name, the variable and the step of its last dump, for each variable."""
    given = since if isinstance(since, list | tuple) else [since]
    if len(given) != len(variables):
        expected = f"since as a list with the step of each of {len(variables)} variables"
        raise ValueError(f"{call}: expected {expected}, got {since!r}")
    checked = []
    for (name, variable), step in zip(variables.items(), given, strict=True):
        if not isinstance(variable, kind):
            came = f"{name!r}, a {type(variable).__name__}"
            raise TypeError(f"{call}: expected variables of the type DynamicVariable, got {came}")
        arguments.whole(call, "since", step)
        if not 0 <= step <= variable.step:
            expected = f"since from 0 to {variable.step}, the last step of variable {name!r} in this process"
            raise ValueError(f"{call}: expected {expected}, got {step}")
        checked.append((name, variable, step))
    return checked


def load(call: str, path: Any, variables: Mapping[str, StoredVariable]) -> None:
    """Read the rows of variables.

    Raises:
        ModelFileError: a file is missing or damaged, or has rows that the variable cannot have. Nothing has changed.
    """
    path = arguments.path(call, "path", path)
    stored = sorted(folder.name for folder in path.glob("[!.]*") if folder.is_dir())
    if not all(variable.stored_name for variable in variables.values()) and len(stored) != len(variables):
        expected = f"{len(variables)} folders, because a variable without a name is found by its place"
        raise ModelFileError(path, f"expected {expected}, found {', '.join(stored) or 'none'}")
    opened: list[tuple[StoredVariable, Iterator[tuple[Ints, Floats]]]] = []
    for name, variable in variables.items():
        if name not in stored:
            raise ModelFileError(path, f"expected a folder {name!r}, found {', '.join(stored) or 'none'}")
        model = open_sparse(path / name, variable.dimension)
        parts = model.batches(PART_ROWS)  # checks every key
        variable.check_stored(path / name / "key", np.concatenate(list(model.key_batches(PART_ROWS))))
        opened.append((variable, parts))
    for variable, parts in opened:
        for keys, vectors in parts:
            mine = variable.owns(keys)
            variable.set_rows(keys[mine], vectors[mine])
