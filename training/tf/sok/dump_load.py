"""``sok.dump``, ``sok.incremental_dump`` and ``sok.load``."""

from os import PathLike
from typing import Any

from serving.model.sparse_writer import write_table_folders
from training.calls import dumps
from training.tf.sok.variables import DynamicVariable, LayerVariable, Variable

_KINDS = (Variable, DynamicVariable, LayerVariable)


def dump(path: str | PathLike[str], dump_vars: Any) -> None:
    """Write the rows of variables, without the states of optimizers.

    Args:
        path: the folder, which is complete or absent. It replaces an existing folder as a whole.
        dump_vars: a variable or a list of variables, also those of layers.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name, a variable has no rows yet, or ``path`` is the current folder or
            a folder above it.
        OutputError: the file system refuses.
    """
    folder, variables = dumps.replaced_folder("dump", path), dumps.by_name("dump", dump_vars, _KINDS)
    dumps.require_rows("dump", {name: variable.row_count for name, variable in variables.items()})
    write_table_folders(folder, {name: variable.own_rows() for name, variable in variables.items()})


def incremental_dump(path: str | PathLike[str], dump_vars: Any, since: Any) -> dict[str, int]:
    """Write the rows that changed after a step.

    Args:
        path: see ``dump``. A variable without changed rows has no folder.
        dump_vars: a ``DynamicVariable`` or a list of them.
        since: ``DynamicVariable.step`` at the last dump. With several variables, a list with the step of each. Rows
            that no optimizer has updated yet count as changed.

    Returns:
        the number of rows of each variable.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name, a variable has no step of its own in ``since``, a step is negative
            or still to come, or ``path`` is the current folder or a folder above it.
        OutputError: the file system refuses.
    """
    call = "incremental_dump"
    folder, variables = dumps.replaced_folder(call, path), dumps.by_name(call, dump_vars, _KINDS)
    steps = dumps.steps_since(call, variables, since, DynamicVariable)
    return write_table_folders(folder, {name: variable.own_rows(step) for name, variable, step in steps})


def load(path: str | PathLike[str], load_vars: Any) -> None:
    """Read the rows of variables.

    A ``Variable`` gets all its rows. Other variables get more rows, and rows that they have are replaced. So a dump and
    the incremental dumps after it may be read one after the other.

    Args:
        path: what ``dump`` or ``incremental_dump`` wrote, also that of PyTorch's ``training.sok``.
        load_vars: a variable or a list of variables. If one of them has no name, they must be all that were written.

    Raises:
        TypeError: an argument is of another type.
        ValueError: two variables have the same name.
        ModelFileError: a file is missing or damaged, or has rows that the variable cannot have. Nothing has changed.
    """
    dumps.load("load", path, dumps.by_name("load", load_vars, _KINDS))
