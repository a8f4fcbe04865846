"""The gradient of a table as a tensor that knows its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import BagLookup, TrainingTable, merge_gradients
from training.embedding.eager import eager

Places = NDArray[np.int64]

_MOST_PLACES = 2**24  # that a float32 can count


@dataclass(frozen=True, slots=True, eq=False)
class GradientRows:
    """The rows of a gradient.

    Attributes:
        table: has the rows.
        count: U, the number of rows.
        lookup: finds the rows; None: they are the rows of several processes.
        is_shard: other processes have other rows of the gradient.
    """

    table: TrainingTable
    count: int
    lookup: BagLookup | None
    is_shard: bool = False


class TableGradient(torch.Tensor):  # type: ignore[misc]
    """The gradient float32[U, D] of the rows of a table, or what was computed from such gradients.

    An operation by element aligns gradients of different rows: rows without a gradient have zeros, as in the gradient
    of a parameter. Every other operation refuses gradients of different rows.

    If processes share the rows, norms are refused: each process would see another norm, and clipping would make the
    other parameters differ. Collectives are refused, because they would mix the rows of different keys.

    Attributes:
        rows: the rows that the elements belong to, one ``GradientRows`` per table.
        is_by_row: the first dimension has the rows of one table.
        is_alias: another tensor has the same elements.
        is_joined: other parameters have some of the elements.
    """

    rows: tuple[GradientRows, ...]
    is_by_row = False
    is_alias = False
    is_joined = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # __torch_dispatch__ sees every operation

    @classmethod
    def of(
        cls, elements: torch.Tensor, rows: tuple[GradientRows, ...], is_by_row: bool = True, is_alias: bool = False
    ) -> Self:
        """Return the elements as a gradient of rows."""
        gradient: Self = elements.as_subclass(cls)
        gradient.rows, gradient.is_by_row, gradient.is_alias = rows, is_by_row, is_alias
        return gradient

    def plain(self) -> torch.Tensor:
        """Return the elements as a tensor that does not know its rows."""
        with torch._C._DisableTorchDispatch():
            elements: torch.Tensor = self.as_subclass(torch.Tensor)
        return elements

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """See ``torch.Tensor.numpy``."""
        array: NDArray[Any] = self.plain().numpy(force=force)
        return array

    def tolist(self) -> Any:
        """See ``torch.Tensor.tolist``."""
        return self.plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the elements."""
        copied: Self = memo.setdefault(id(self), self.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the elements without their rows, which another process may not have."""
        return self.plain().__reduce_ex__(protocol)

    @classmethod
    @eager
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with elements of the same rows, and remember the rows of the result."""
        named, act = kwargs or {}, _act_of(function)
        given = list(tensors_in([*args, *named.values()]))
        gradients = [one for one in given if isinstance(one, cls)]
        is_shard = any(rows.is_shard for one in gradients for rows in one.rows)
        if is_shard:
            _refuse_shards(act.name, is_collective="c10d" in function.namespace)
        targets = [args[place] if place < len(args) else named.get(name) for place, name in act.written]
        if len(gradients) < len(given):
            for one in targets:
                _refuse_lost_rows(act.name, one, [*args, *named.values()], gradients)
        written = [one for one in tensors_in(targets) if isinstance(one, cls)]
        rows, places = _rows_of(act, [*written, *gradients])
        if places:
            aligned = {id(one): cls.of(_at(one.plain(), places[one.rows[0]]), rows) for one in gradients}
            return _aligned(function, args, named, aligned, written)
        with torch._C._DisableTorchDispatch():
            result = function(*args, **named)
        if is_shard and any(one.dim() == 0 and one.is_floating_point() for one in tensors_in([result])):
            _refuse_shards(act.name, is_number=True)
        is_joined = any(one.is_joined for one in gradients)
        if not act.by_element:
            is_joined |= any(not isinstance(one, cls) and one.dim() for one in given)
        shapes = [one.shape for one in gradients if one.is_by_row] if act.keeps_rows and len(rows) == 1 else []

        def as_gradient(one: Any) -> Any:
            if isinstance(one, list | tuple):
                return type(one)(map(as_gradient, one))
            if type(one) is not torch.Tensor or one.dim() == 0:
                return one
            gradient = cls.of(one, rows, one.shape in shapes, act.is_alias)
            gradient.is_joined = is_joined
            return gradient

        return as_gradient(result)

    def become(self, name: str, other: "TableGradient") -> None:
        """Take the elements of another gradient, which may have more rows."""
        with torch._C._DisableTorchDispatch():
            if other.shape == self.shape:
                self.copy_(other)
            elif self.is_alias:
                _refuse(name, other.rows, "the result has more rows, and another tensor has the elements; use +")
            else:
                self.set_(other)
        self.rows = other.rows


def _aligned(
    function: Any,
    args: Sequence[Any],
    named: dict[str, Any],
    aligned: dict[int, TableGradient],
    written: Sequence[TableGradient],
) -> Any:
    """Compute by element with gradients that have been aligned, by the id of the argument."""
    in_order = [aligned.get(id(one), one) for one in args]
    result = function(*in_order, **{name: aligned.get(id(one), one) for name, one in named.items()})
    for one in written:
        one.become(_act_of(function).name, result)
    return written[0] if written else result


def gradient_of(value: torch.Tensor, table: TrainingTable, like: TableGradient | None = None) -> TableGradient:
    """Return a value as the gradient of a table.

    Args:
        value: was computed from gradients of the table.
        table: has the rows.
        like: a value that does not know its rows has those of this gradient; None: such a value is refused.

    Raises:
        TypeError: the value does not know its rows, or has those of other tables.
        ValueError: it has another shape or dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"table {table.name!r}: grad: expected a tensor, got {type(value).__name__}")
    came = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    known: Sequence[GradientRows] = like.rows if like is not None else ()
    if isinstance(value, TableGradient):
        known = [one for one in value.rows if one.table is table and (like is not None or one.lookup is not None)]
    if not known:
        expected = "what was computed from grad of this table, which knows its rows"
        raise TypeError(f"table {table.name!r}: grad: expected {expected}, got {type(value).__name__} {came}")
    [rows] = known
    if value.dtype != torch.float32 or value.shape not in ((rows.count, table.dim), (max(rows.count, 1), table.dim)):
        raise ValueError(f"table {table.name!r}: grad: expected float32[{rows.count}, {table.dim}], got {came}")
    if isinstance(value, TableGradient) and value.is_by_row:
        return value
    elements = value.plain() if isinstance(value, TableGradient) else value
    return TableGradient.of(elements, (rows,), is_alias=True)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield tensors, also those inside lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@dataclass(frozen=True, slots=True)
class _Act:
    """What an operation of PyTorch does.

    Attributes:
        name: the operation's.
        written: the place and name of each argument that is written.
        by_element: an element of the result depends on one element of each argument.
        keeps_rows: a result of the shape of an argument has the argument's rows in their places.
        is_alias: the result has the elements of an argument.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    by_element: bool
    keeps_rows: bool
    is_alias: bool


@cache
def _act_of(function: Any) -> _Act:
    schema = function._schema
    name = schema.name.split("::")[-1]
    aliases = [(place, one) for place, one in enumerate(schema.arguments) if one.alias_info is not None]
    written = tuple((place, one.name) for place, one in aliases if one.alias_info.is_write)
    by_element = torch.Tag.pointwise in function.tags or name == "copy_"
    keeps_rows = by_element or name in ("alias", "detach", "_to_copy") or name.endswith("_like")
    return _Act(name, written, by_element, keeps_rows, any(one.alias_info is not None for one in schema.returns))


def _rows_of(
    act: _Act, gradients: Sequence[TableGradient]
) -> tuple[tuple[GradientRows, ...], dict[GradientRows, Places]]:
    """Return the rows of the result; and where the gradients have each row, if they have different ones."""
    if all(one.rows is gradients[0].rows for one in gradients):
        return gradients[0].rows, {}
    of_tables: dict[int, list[GradientRows]] = {}
    for rows in dict.fromkeys(rows for one in gradients for rows in one.rows):
        of_tables.setdefault(id(rows.table), []).append(rows)
    tables = [{id(rows.table) for rows in one.rows} for one in gradients]
    if act.by_element and any(tables[0].isdisjoint(others) for others in tables):
        _refuse(act.name, [one.rows[0] for one in gradients], "they have different rows")
    unions = [_union(act.name, parts) if len(parts) > 1 else (parts[0], {}) for parts in of_tables.values()]
    places = {part: one for _, of_table in unions for part, one in of_table.items()}
    if places and not (act.by_element and all(one.is_by_row for one in gradients)):
        expected = "expected whole gradients and an operation by element, such as +"
        _refuse(act.name, list(places), f"they have different rows; {expected}")
    return tuple(union for union, _ in unions), places


def _union(name: str, parts: Sequence[GradientRows]) -> tuple[GradientRows, dict[GradientRows, Places]]:
    """Return the rows of all parts, and the place in each part, or -1 where it has none. {}: no part differs."""
    lookups = [part.lookup for part in parts if part.lookup is not None]
    if len(lookups) < len(parts):
        _refuse(name, parts, "they have different rows, which only all processes together could align")
    if (most := max(part.count for part in parts)) >= _MOST_PLACES:
        _refuse(name, parts, f"they have different rows; expected fewer than {_MOST_PLACES:,} to align, got {most:,}")
    places: dict[GradientRows, Places] = {}
    for part in parts:
        numbers = [np.zeros((one.count, part.table.dim), np.float32) for one in parts]
        numbers[parts.index(part)] += np.arange(1, part.count + 1)[:, None]
        lookup, sums = merge_gradients(lookups, numbers)
        places[part] = sums[:, 0].astype(np.int64) - 1
    if all(np.array_equal(one, np.arange(part.count)) for part, one in places.items()):
        return parts[0], {}
    return GradientRows(parts[0].table, len(sums), lookup, parts[0].is_shard), places


def _at(elements: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the elements at places of the first dimension, zeros at -1."""
    padded = torch.cat([elements, elements.new_zeros(1, *elements.shape[1:])])
    return padded[torch.from_numpy(places).to(elements.device)]


def _refuse_shards(name: str, is_collective: bool = False, is_number: bool = False) -> None:
    if is_collective:
        raise TypeError(
            f"{name!r} of a gradient whose rows are spread over processes mixes the rows of other keys; "
            "the step of training.optimizers adds up the gradients of all processes"
        )
    if is_number or "norm" in name or name in ("sum", "mean"):
        raise TypeError(
            f"{name!r} of a gradient whose rows are spread over processes differs between them: "
            "use training.clip_grad_norm_, which adds up the norms of all"
        )


def _refuse_lost_rows(name: str, target: Any, values: Sequence[Any], gradients: Sequence[TableGradient]) -> None:
    """Refuse to write a whole gradient into a tensor that does not know its rows."""
    pairs = [(target, one) for one in gradients]
    if isinstance(target, list | tuple):  # of an operation on each element of the lists
        lists = [one for one in values if isinstance(one, list | tuple) and one is not target]
        pairs = [pair for others in lists for pair in zip(target, others, strict=False)]
    for to, one in pairs:
        if isinstance(to, TableGradient) or to is None or to.numel() < 2 or not isinstance(one, TableGradient):
            continue
        if not one.is_joined and len(one.rows) == 1 and one.numel() == one.rows[0].count * one.rows[0].table.dim:
            expected = "expected a copy of a gradient, such as grad.clone() or torch.zeros_like(grad)"
            _refuse(name, one.rows, f"the tensor that it writes does not know the rows; {expected}")


def _refuse(name: str, rows: Sequence[GradientRows], reason: str) -> NoReturn:
    tables = " and ".join(dict.fromkeys(repr(one.table.name) for one in rows))
    # no TypeError, which + would take for "ask the other operand"
    raise ValueError(f"table {tables}: PyTorch's {name!r} of gradients: {reason}")
