"""``sok.dump`` and ``sok.load`` of variables in several processes."""

from os import PathLike
from typing import Any

import torch

from training.calls import dumps
from training.embedding.table_folders import write_tables
from training.processes import Processes
from training.sok.dynamic_variable import DynamicVariable
from training.sok.lookup import AnyVariable
from training.sok.variable import Variable


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
    folder, variables = dumps.replaced_folder("dump", path), _by_name("dump", dump_vars)
    rows = torch.tensor([variable.row_count for variable in variables.values()])
    counts = _processes(variables).total("numbers of rows", rows).tolist()
    dumps.require_rows("dump", dict(zip(variables, counts, strict=True)))
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
    folder, variables = dumps.replaced_folder("incremental_dump", path), _by_name("incremental_dump", dump_vars)
    steps = dumps.steps_since("incremental_dump", variables, since, DynamicVariable)
    rows = {name: variable.own_rows(step) for name, variable, step in steps}
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
    dumps.load("load", path, _by_name("load", load_vars))


def _by_name(call: str, variables: Any) -> dict[str, AnyVariable]:
    return dumps.by_name(call, variables, (Variable, DynamicVariable))


def _processes(variables: dict[str, AnyVariable]) -> Processes:
    return next(iter(variables.values())).placement.processes
