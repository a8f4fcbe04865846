"""The gradient of a table as a tensor that knows its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Self

import torch
from numpy.typing import NDArray

from kernels.host import TrainingTable
from training.embedding.eager import eager
from training.embedding.gradient_rows import GradientRows, Piece, Pieces, Places, cut, joined, piece_of, refuse, union

# Operations by element that PyTorch does not tag as such: each element of the result is in the place of the elements
# that it depends on.
_BY_ELEMENT = {
    *("_amp_foreach_non_finite_check_and_unscale_", "_to_copy", "alias", "bernoulli_", "clone", "copy_", "detach"),
    *("exponential_", "fill_", "masked_fill", "masked_fill_", "normal_", "random_", "uniform_", "zero_"),
}
# They combine the elements along some dimensions.
_STATISTICS = {
    *("all", "amax", "amin", "any", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "norm", "prod", "std"),
    *("sum", "var"),
}
# The other operations that treat each index of the other dimensions alike.
_ALONG_DIMENSIONS = {"cat", "expand", "flip", "roll", "select", "slice", "squeeze", "stack", "unsqueeze"}
# They write only where a mask or indices say.
_BY_INDEX = {"_index_put_impl_", "index_fill_", "index_put_"}
_NOTHING = (Piece(None, 0, 0, 0),)  # the pieces of what is no gradient


class TableGradient(torch.Tensor):  # type: ignore[misc]
    """The gradient float32[U, D] of the rows of a table, or what was computed from such gradients.

    It knows the row of each element through operations by element, views, joined and split vectors, and statistics of
    each row. An operation by element aligns gradients of different rows: rows without a gradient have zeros, as in the
    gradient of a parameter. After any other operation, such as ``flip(0)``, the rows are unknown. Such elements can be
    read, but they cannot become a gradient, and no tensor takes them.

    If processes share the rows, norms are refused: each process would see another norm, and clipping would make the
    other parameters differ. Collectives are refused, because they would mix the rows of different keys.

    Attributes:
        rows: that the elements were computed from, one ``GradientRows`` per table.
        pieces: the elements.
        is_alias: another tensor has the same elements.
    """

    rows: tuple[GradientRows, ...]
    pieces: Pieces
    is_alias: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # __torch_dispatch__ sees every operation

    @classmethod
    def of(cls, elements: torch.Tensor, rows: GradientRows, is_alias: bool = False) -> Self:
        """Return the elements [U, ...] of rows."""
        return cls._of(elements, (rows,), (piece_of(rows, elements.shape),), is_alias)

    @classmethod
    def _of(cls, elements: torch.Tensor, rows: tuple[GradientRows, ...], pieces: Pieces, is_alias: bool) -> Self:
        gradient: Self = torch.Tensor._make_subclass(cls, elements)  # no view, so detach_() works
        gradient.rows, gradient.pieces, gradient.is_alias = rows, pieces, is_alias
        return gradient

    def rows_in_order(self, table: TrainingTable | None = None) -> GradientRows | None:
        """Return the rows of the first dimension, if it has all rows of a table in their order. None: any table."""
        for rows, width, start, stop in self.pieces or ():
            if rows is None or not self.dim() or len(self) != rows.count or table not in (None, rows.table):
                continue
            if start == 0 and stop == self.numel() == rows.count * width:
                return rows
        return None

    def plain(self) -> torch.Tensor:
        """Return the elements as a tensor that does not know its rows."""
        with torch._C._DisableTorchDispatch():
            elements: torch.Tensor = self.as_subclass(torch.Tensor)
        return elements

    @property
    def data(self) -> Self:
        """See ``torch.Tensor.data``."""
        return self.detach()  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.become("data", gradient_of(value, self.rows[0].table))

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
        if not all(issubclass(type_, cls) for type_ in types):
            return NotImplemented  # tensors of other kinds may have no elements, such as a DTensor
        named, act = kwargs or {}, _act_of(function)
        values = [*args, *named.values()]
        gradients = [one for one in (tensors_in(values) if act.has_lists else values) if isinstance(one, cls)]
        if act.is_collective:
            _refuse_collective(act.name)
        rows, places = _shared_rows(act, gradients)
        if rows is not None:
            aligned = {id(other): cls.of(_at(other.plain(), places[other.rows[0]]), rows) for other in gradients}
            return _aligned(function, args, named, aligned)
        slots, parts = [values], [gradients]
        if act.is_of_lists:
            slots = [list(slot) for slot in zip(*(value for value in values if isinstance(value, list)), strict=False)]
            parts = [[tensor for tensor in slot if isinstance(tensor, cls)] for slot in slots]
        if act.written:
            _check_writes(act, _written(act, args, named), slots, parts)
        with torch._C._DisableTorchDispatch():
            result = function(*args, **named)
        if not isinstance(result, list | tuple):
            return cls._from(result, act, args, named, parts[0])
        of_results = parts if act.is_of_lists else parts * len(result)
        return type(result)(
            cls._from(one, act, args, named, part) for one, part in zip(result, of_results, strict=True)
        )

    @classmethod
    def _from(cls, result: Any, act: "_Act", args: Sequence[Any], named: dict[str, Any], part: Sequence[Self]) -> Any:
        """Return what was computed from some gradients as a gradient. A number or a new tensor is none."""
        if type(result) is not torch.Tensor or not part or act.name.startswith("new_"):
            return result
        if result.layout is not torch.strided:
            _refuse(act.name, part, f"expected a dense result, got {result.layout}")
        rows = part[0].rows
        if any(gradient.rows is not rows for gradient in part):
            rows = tuple(dict.fromkeys(of for gradient in part for of in gradient.rows))
        pieces = _pieces_of(act, args, named, part, result) if result.dim() else ()
        if pieces is not None:
            own = tuple(dict.fromkeys(piece.rows for piece in pieces if piece.rows is not None))
            if not own:
                is_number = (act.is_statistic or not result.dim()) and result.is_floating_point()
                if is_number and any(row.is_shard for row in rows):
                    _refuse_norm(act.name)
                return result
            rows = rows if own == rows else own
        return cls._of(result, rows, pieces, act.is_alias)

    def become(self, name: str, other: "TableGradient") -> None:
        """Take the elements of another gradient, which may have more rows."""
        with torch._C._DisableTorchDispatch():
            if other.shape == self.shape:
                self.copy_(other)
            elif self.is_alias:
                refuse(name, other.rows, "the result has more rows, and another tensor shares its memory; use +")
            else:
                self.set_(other)
        self.rows, self.pieces = other.rows, other.pieces


def gradient_of(value: torch.Tensor, table: TrainingTable, like: TableGradient | None = None) -> TableGradient:
    """Return a value as the gradient of a table.

    Args:
        value: was computed from gradients of the table.
        table: has the rows.
        like: a value that was not computed from gradients has the rows of this one; None: such a value is refused.

    Raises:
        TypeError: the rows of the value are unknown, or those of other tables.
        ValueError: it has another shape or dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"table {table.name!r}: grad: expected a tensor, got {type(value).__name__}")
    came = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    expected = "what was computed from grad of this table"
    if isinstance(value, TableGradient):
        rows = value.rows_in_order(table)
        if rows is None:
            how = (
                "elementwise, so that its rows are known" if value.pieces is None else "of all its rows in their order"
            )
            raise TypeError(f"table {table.name!r}: grad: expected {expected} {how}, got {came}")
    elif like is None:
        raise TypeError(f"table {table.name!r}: grad: expected {expected}, got {type(value).__name__} {came}")
    else:
        rows = like.rows[0]
    if value.dtype != torch.float32 or value.shape != (rows.count, table.dim):
        raise ValueError(f"table {table.name!r}: grad: expected float32[{rows.count}, {table.dim}], got {came}")
    return value if isinstance(value, TableGradient) else TableGradient.of(value, rows, is_alias=True)


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
        has_lists: some arguments are lists of tensors.
        is_collective: it exchanges elements with other processes.
        by_element: an element of the result depends on elements in its place.
        is_of_lists: it does the same with each element of its lists.
        is_copy: it copies elements from one tensor to another.
        is_statistic: it combines elements.
        is_alias: the result has the elements of an argument.
        dims: the place, name and default of the argument with the dimensions along which it works; None: it has none.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    has_lists: bool
    is_collective: bool
    by_element: bool
    is_of_lists: bool
    is_copy: bool
    is_statistic: bool
    is_alias: bool
    dims: tuple[int, str, Any] | None


@cache
def _act_of(function: Any) -> _Act:
    schema = function._schema
    name = schema.name.split("::")[-1]
    arguments = list(enumerate(schema.arguments))
    written = tuple((place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write)
    is_of_lists = "_foreach_" in name
    is_statistic = name.removeprefix("_foreach_") in _STATISTICS or name == "_foreach_powsum"
    by_element = torch.Tag.pointwise in function.tags or name in _BY_ELEMENT or name.endswith("_like")
    by_element |= is_of_lists and not is_statistic
    is_alias = any(returned.alias_info is not None for returned in schema.returns) or name == "_unsafe_view"
    dims = [(place, one.name, one.default_value) for place, one in arguments if one.name in ("dim", "dims")]
    has_lists = any("[" in str(one.type) for _, one in arguments)
    return _Act(
        name=name,
        written=written,
        has_lists=has_lists,
        is_collective="c10d" in function.namespace,
        by_element=by_element,
        is_of_lists=is_of_lists,
        is_copy=name in ("copy_", "_foreach_copy_"),
        is_statistic=is_statistic,
        is_alias=is_alias,
        dims=dims[0] if dims else None,
    )


def _shared_rows(
    act: _Act, gradients: Sequence[TableGradient]
) -> tuple[GradientRows | None, dict[GradientRows, Places]]:
    """Let gradients of equal rows have one ``GradientRows``. If rows differ, return all, and their places in each."""
    if all(other.rows is gradients[0].rows for other in gradients):
        return None, {}
    of_tables: dict[int, list[GradientRows]] = {}
    for rows in dict.fromkeys(rows for other in gradients for rows in other.rows):
        of_tables.setdefault(id(rows.table), []).append(rows)
    equal: dict[GradientRows | None, GradientRows] = {}
    for parts in of_tables.values():
        whole, places = union(act.name, parts) if len(parts) > 1 else (parts[0], {})
        if places:
            can_align = act.by_element and not act.is_of_lists and len(of_tables) == 1
            if can_align and all(other.rows_in_order() for other in gradients):
                return whole, places
            expected = "expected an elementwise operation on whole gradients, such as +"
            refuse(act.name, parts, f"they have different rows; {expected}")
        equal.update(dict.fromkeys(parts, whole))
    for one in gradients:
        one.rows = tuple(equal[rows] for rows in one.rows)
        if one.pieces is not None:
            one.pieces = tuple(piece._replace(rows=equal.get(piece.rows)) for piece in one.pieces)
    return None, {}


def _at(elements: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the elements at places of the first dimension, zeros at -1."""
    padded = torch.cat([elements, elements.new_zeros(1, *elements.shape[1:])])
    return padded[torch.from_numpy(places).to(elements.device)]


def _aligned(
    function: Any,
    args: Sequence[Any],
    named: dict[str, Any],
    aligned: dict[int, TableGradient],
) -> Any:
    """Compute by element with gradients that have been aligned, by the id of the argument."""
    in_order = [aligned.get(id(arg), arg) for arg in args]
    result = function(*in_order, **{name: aligned.get(id(one), one) for name, one in named.items()})
    act = _act_of(function)
    written = _written(act, args, named)
    for one in written:
        assert isinstance(one, TableGradient)  # otherwise it was refused
        one.become(act.name, result)
    return written[0] if written else result


def _written(act: _Act, args: Sequence[Any], named: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    return list(tensors_in(args[place] if place < len(args) else named.get(name) for place, name in act.written))


def _check_writes(
    act: _Act, written: Sequence[torch.Tensor], slots: Sequence[Sequence[Any]], parts: Sequence[Sequence[TableGradient]]
) -> None:
    """Refuse to write elements of some rows to the places of others, or to a tensor that does not know its rows."""
    numbers = {id(tensor) for tensor in written} if act.is_of_lists else set()
    for slot, part in zip(slots, parts, strict=True):
        for target in [tensor for tensor in slot if id(tensor) in numbers] if act.is_of_lists else written:
            if isinstance(target, TableGradient):
                others = [gradient for gradient in part if gradient is not target]
                if not _are_in_place(act, target, others) or (act.is_copy and _is_of_rows(target, slot)):
                    expected = "expected an elementwise operation on whole gradients"
                    _refuse(act.name, part, f"it writes elements to the places of other or unknown rows; {expected}")
            elif part:
                expected = "expected a copy of a gradient, such as grad.clone() or torch.zeros_like(grad)"
                _refuse(act.name, part, f"the tensor that it writes does not know the rows; {expected}")


def _is_of_rows(target: TableGradient, slot: Sequence[Any]) -> bool:
    """Whether a tensor that does not know the rows would be copied to several rows, each element to its own."""
    has_rows = any(rows is not None and stop - start > width for rows, width, start, stop in target.pieces or ())
    return has_rows and any(type(tensor) is torch.Tensor and tensor.shape == target.shape for tensor in slot)


def _are_in_place(act: _Act, target: TableGradient, others: Sequence[TableGradient]) -> bool:
    if act.name not in _BY_INDEX:
        known = target.pieces is not None and all(_spread(other, target.shape) == target.pieces for other in others)
        return act.by_element and (known or not others)
    rows = target.rows_in_order()
    of_rows = [rows is not None and other.rows_in_order() is rows for other in others]
    masks = zip(others, of_rows, strict=True)
    return all(one.dtype == torch.bool and (of or None is not one.pieces == target.pieces) for one, of in masks)


def _spread(one: TableGradient, shape: Sequence[int]) -> Pieces:
    """Return the places of the elements of a gradient that is broadcast to a shape."""
    rows = one.rows_in_order()
    if rows is not None and len(shape) == one.dim() and shape[0] == rows.count:
        return (piece_of(rows, shape),)
    return one.pieces if one.shape == shape else None


def _pieces_of(
    act: _Act, args: Sequence[Any], named: dict[str, Any], part: Sequence[TableGradient], result: torch.Tensor
) -> Pieces:
    """Return the elements of a result that was computed from gradients."""
    if act.by_element:
        places = {_spread(gradient, result.shape) for gradient in part}
        if len(places) > 1:
            what = "the rows of some elements are unknown" if None in places else "they have different rows"
            _refuse(act.name, part, f"{what}; expected elementwise operations on whole gradients")
        return places.pop()
    source = part[0]
    dims = _dims_of(act, args, named, source, result)
    if act.name in ("cat", "stack") and dims == {0}:
        of_all = [arg.pieces if isinstance(arg, TableGradient) else (piece_of(None, arg.shape),) for arg in args[0]]
        return None if None in of_all else joined(piece for pieces in of_all for piece in pieces or ())
    if act.is_alias and source.is_contiguous() and result.is_contiguous() and source.dtype == result.dtype:
        start = result.storage_offset() - source.storage_offset()
        return cut(source.pieces, start, start + result.numel())
    if act.is_statistic and len(dims) == source.dim():
        return _NOTHING
    rows = source.rows_in_order()
    if rows is None and act.is_statistic and dims == {0} and source.numel():
        size = source.numel() // len(source)
        parts = {cut(source.pieces, start, start + size) for start in range(0, source.numel(), size)}
        return parts.pop() if len(parts) == 1 else None
    if rows is None or any(gradient.rows_in_order() is not rows for gradient in part):
        return None
    if (act.is_statistic or act.name in _ALONG_DIMENSIONS) and 0 not in dims and len(result) == rows.count:
        return (piece_of(rows, result.shape),)
    return _NOTHING if act.is_statistic else None


def _dims_of(
    act: _Act, args: Sequence[Any], named: dict[str, Any], source: torch.Tensor, result: torch.Tensor
) -> set[int]:
    """Return the dimensions along which an operation works, {0} if its own rule is unknown."""
    count = max(source.dim(), result.dim())
    if act.name == "expand":
        return set(range(count - source.dim()))
    if act.dims is None:
        return set(range(count))
    place, name, default = act.dims
    given = args[place] if place < len(args) else named.get(name, default)
    dims = [given] if isinstance(given, int) else given
    return {dim % count for dim in dims or range(count)}


def _refuse_collective(name: str) -> NoReturn:
    raise TypeError(
        f"{name!r} of the gradient of a table mixes the rows of different keys; "
        "the step of training.optimizers adds up the gradients of all processes"
    )


def _refuse_norm(name: str) -> NoReturn:
    raise TypeError(
        f"{name!r} of a gradient whose rows are spread over processes differs between them: "
        "use training.clip_grad_norm_, which adds up the norms of all"
    )


def _refuse(name: str, gradients: Sequence[TableGradient], reason: str) -> NoReturn:
    refuse(name, [rows for other in gradients for rows in other.rows], reason)
