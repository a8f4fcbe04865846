"""``sok.dump`` and ``sok.load``: one folder per variable, which any number of processes can read.

A folder has HugeCTR's directory format, so ``hotrow import`` reads it too. A variable without a name is called
``variable_<index in the list>``.
"""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.errors import ModelFileError
from serving.model.sparse_file import open_sparse
from training import arguments
from training.embedding.table_folders import write_tables
from training.processes import Processes
from training.sok.dynamic_variable import DynamicVariable
from training.sok.lookup import AnyVariable
from training.sok.variable import PART_ROWS, Floats, Ints, Variable


def dump(path: str | PathLike[str], dump_vars: Any) -> None:
    """Write the rows of variables, without the states of optimizers. Every process calls it, and the first one writes.

    Args:
        path: the folder, which is complete or absent. It replaces an existing folder as a whole.
        dump_vars: a variable or a list of variables, also those of layers.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name, a variable has no rows yet, or ``path`` is the current folder or
            a folder above it.
        OutputError: the file system refuses.
    """
    folder, variables = _replaced("dump", path), _by_name("dump", dump_vars)
    rows = torch.tensor([variable.row_count for variable in variables.values()])
    for name, count in zip(variables, _processes(variables).total("numbers of rows", rows), strict=True):
        if not count:
            raise ValueError(f"dump: variable {name!r} has no rows yet")
    write_tables(_processes(variables), folder, {name: variable.own_rows() for name, variable in variables.items()})


def incremental_dump(path: str | PathLike[str], dump_vars: Any, since: Any) -> dict[str, int]:
    """Write the rows that changed after a step. Every process calls it, and the first one writes.

    Args:
        path: see ``dump``. A variable without changed rows has no folder.
        dump_vars: a ``DynamicVariable`` or a list of them.
        since: ``DynamicVariable.step`` at the last dump. With several variables, a list with the step of each. Every
            variable counts its own steps, and begins at 0 in a new process. Rows that no optimizer has updated yet
            count as changed.

    Returns:
        the number of rows of each variable.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name, a variable has no step of its own in ``since``, a step is negative
            or still to come, or ``path`` is the current folder or a folder above it.
        OutputError: the file system refuses.
    """
    folder, variables = _replaced("incremental_dump", path), _by_name("incremental_dump", dump_vars)
    listed = since if isinstance(since, list | tuple) else [since]
    if len(listed) != len(variables):
        expected = f"since as a list with the step of each of {len(variables)} variables"
        raise ValueError(f"incremental_dump: expected {expected}, got {since!r}")
    rows = {}
    for (name, variable), step in zip(variables.items(), listed, strict=True):
        if not isinstance(variable, DynamicVariable):
            came = f"{name!r}, a {type(variable).__name__}"
            raise TypeError(f"incremental_dump: expected variables of the type DynamicVariable, got {came}")
        arguments.whole("incremental_dump", "since", step)
        if not 0 <= step <= variable.step:
            expected = f"since from 0 to {variable.step}, the last step of variable {name!r} in this process"
            raise ValueError(f"incremental_dump: expected {expected}, got {step}")
        rows[name] = variable.own_rows(step)
    return write_tables(_processes(variables), folder, rows)


def load(path: str | PathLike[str], load_vars: Any) -> None:
    """Read the rows of variables. Every process calls it, and keeps its own rows.

    A ``Variable`` gets all its rows. Other variables get more rows, and rows that they have are replaced. So a dump and
    the incremental dumps after it may be read one after the other.

    Args:
        path: what ``dump`` or ``incremental_dump`` wrote, in any number of processes.
        load_vars: a variable or a list of variables. If one of them has no name, they must be all that were written.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name.
        ModelFileError: a file is missing or damaged, or has rows that the variable cannot have. Nothing has changed.
    """
    path, variables = _read_path("load", path), _by_name("load", load_vars)
    stored = sorted(folder.name for folder in path.glob("[!.]*") if folder.is_dir())
    if not all(variable.name for variable in variables.values()) and len(stored) != len(variables):
        expected = f"{len(variables)} folders, because a variable without a name is found by its place"
        raise ModelFileError(path, f"expected {expected}, found {', '.join(stored) or 'none'}")
    opened: list[tuple[AnyVariable, Iterator[tuple[Ints, Floats]]]] = []
    for name, variable in variables.items():
        if name not in stored:
            raise ModelFileError(path, f"expected a folder {name!r}, found {', '.join(stored) or 'none'}")
        model = open_sparse(path / name, variable.dimension)
        parts = model.batches(PART_ROWS)  # checks every key
        variable.check_stored(path / name / "key", np.concatenate(list(model.key_batches(PART_ROWS))))
        opened.append((variable, parts))
    for variable, parts in opened:
        for keys, vectors in parts:
            mine = variable.placement.owns(keys)
            variable.set_rows(keys[mine], vectors[mine])


def _replaced(call: str, path: Any) -> Path:
    """Return the folder that a dump replaces, or raise ValueError if the current folder would go with it."""
    folder = _read_path(call, path).resolve()
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"{call}: expected a folder to replace, got {str(path)!r}, which contains the current folder")
    return folder


def _read_path(call: str, path: Any) -> Path:
    return arguments.path(call, "path", path)


def _by_name(call: str, variables: Any) -> dict[str, AnyVariable]:
    listed = list(variables) if isinstance(variables, list | tuple) else [variables]
    if not listed:
        raise ValueError(f"{call}: expected at least one variable, got none")
    named: dict[str, AnyVariable] = {}
    for number, variable in enumerate(listed):
        if not isinstance(variable, Variable | DynamicVariable):
            raise TypeError(f"{call}: expected variables of sok, got {type(variable).__name__}")
        name = variable.name or f"variable_{number}"
        if name in named:
            raise ValueError(f"{call}: expected variables of different names, got two called {name!r}")
        named[name] = variable
    return named


def _processes(variables: dict[str, AnyVariable]) -> Processes:
    return next(iter(variables.values())).placement.processes
