"""``sok.lookup_sparse``: look up several variables in one native pass, and pass back their gradients in another."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, get_args

import numpy as np
import torch

from training.arguments import one_of
from training.calls.sok import listed, require_hotness
from training.embedding.eager import eager
from training.embedding.exchange import KeyGradients, OwnedTable, SharedLookups, to_owners
from training.embedding.gradients import PooledBags, Receiver, sparse_gradient, sparse_gradients
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import LocalLookups, LookedUpRows, Lookups
from training.embedding.parameter import sinks_of, which_make_rows
from training.sok.dynamic_variable import DynamicVariable
from training.sok.embedding_variable import EmbeddingVariable
from training.sok.variable import Variable
from training.sparse_tensor import read_ids
from training.tables.config import Combiner, EmbeddingBagConfig

AnyVariable: TypeAlias = Variable | DynamicVariable


def lookup_sparse(params: Any, sp_ids: Any, sp_weights: Any = None, hotness: Any = None, combiners: Any = None) -> Any:
    """Look up rows of ids in several variables, and combine the vectors of each row into one vector.

    With several processes, every process calls it with the same variables, and the optimizer's ``step``, in the same
    order. Ids and the number of rows may differ. Every process also calls ``backward`` for its answer, unless the
    variables are ``DynamicVariable``.

    With gradients enabled, a trainable ``DynamicVariable`` makes rows for new ids. Otherwise their vector is zero.

    Args:
        params: a list of variables of one kind: distributed ones, localized ones or ``DynamicVariable``. Or one
            variable; then every argument is one item instead of a list.
        sp_ids: for each variable, rows of ids: a sparse COO tensor or a nested tensor of PyTorch, a ``SparseTensor``,
            or ``(indices, values, dense_shape)``.
        sp_weights: for each variable, the weights of the ids: a sparse tensor with their indices, or float[N]. None:
            there are none.
        hotness: for each variable, the most ids of a row. More are an error. None: any number.
        combiners: for each variable, "sum", "mean" or "sqrtn". With weights the sum is weighted. "mean" then divides by
            the sum of the weights, and "sqrtn" by the root of the sum of their squares. None: "mean".

    Returns:
        for each variable float32[R, D], on the device of its ids. A row without ids is zero.

    Raises:
        TypeError: an argument is of another type.
        ValueError: lists have different lengths, variables are of several kinds, an argument is out of range or of
            another shape, or a row has too many ids.
        IndexError: an id is beyond a ``Variable``.
        ReservedKeyError: an id is one of the two largest or the two smallest int64.
    """
    is_list = isinstance(params, list | tuple)
    variables: list[AnyVariable] = list(params) if is_list else [params]
    _require_one_kind(variables)
    count = len(variables)
    ids, weights = listed("sp_ids", sp_ids, count, is_list), listed("sp_weights", sp_weights, count, is_list)
    most, how = listed("hotness", hotness, count, is_list), listed("combiners", combiners, count, is_list)
    bags = []
    for number, variable in enumerate(variables):
        place = f"lookup_sparse: sp_ids[{number}]" if is_list else "lookup_sparse: sp_ids"
        of_variable = read_ids(place, ids[number], weights[number]).bags(default_id=None)
        assert of_variable.row_ptrs is not None
        require_hotness(place, of_variable.row_ptrs, "hotness", most[number])
        variable.check(place, of_variable)
        bags.append(of_variable)
    for combiner in how:
        one_of("lookup_sparse", "combiner", combiner, (None, *get_args(Combiner)))
    how = [combiner or "mean" for combiner in how]
    vectors = look_up(variables, bags, how, torch.is_grad_enabled())
    return vectors if is_list else vectors[0]


@eager
def look_up(
    variables: Sequence[AnyVariable], bags: Sequence[FeatureBags], combiners: Sequence[Combiner], trains: bool
) -> list[torch.Tensor]:
    """Return the combined vectors float32[R, D] of each variable's bags. With ``trains``, new keys get rows."""
    dynamic = [variable for variable in variables if isinstance(variable, DynamicVariable)]
    does_train = [trains and variable.requires_grad for variable in variables]
    if dynamic:
        does_train = which_make_rows(dynamic, bags, trains)
    processes = variables[0].placement.processes
    tables = [_owned(*one) for one in zip(variables, combiners, does_train, strict=True)]
    lookups: Lookups
    receiver: Receiver = partial(sparse_gradients, variables)
    if processes.size == 1 and all(of.row_of is None for of in tables):
        lookups = LocalLookups([of.table for of in tables], bags, does_train)
    else:
        lookups = SharedLookups(processes, tables, bags, does_train, divisor=1)
        receiver = partial(_to_owners, lookups, variables, tables)
    if dynamic:
        receiver = sinks_of(dynamic, lookups)
    devices, weights = [bag.device for bag in bags], [bag.weights for bag in bags]
    return list(PooledBags.apply(lookups, receiver, devices, *variables, *weights))


def _to_owners(
    lookups: SharedLookups,
    variables: Sequence[Variable],
    tables: Sequence[OwnedTable],
    gradients: Sequence[KeyGradients | None],
) -> list[torch.Tensor | None]:
    """Return the gradients of variables, from all processes. A process without rows of a variable has none."""
    processes, title = variables[0].placement.processes, f"backward pass of {lookups.title}"
    of_rows, is_finite = to_owners(processes, title, tables, lookups.owned, gradients)
    here = [one if len(variable) else None for variable, one in zip(variables, of_rows, strict=True)]
    sparse = sparse_gradients(variables, here)
    for number, (variable, one) in enumerate(zip(variables, sparse, strict=True)):
        if one is not None and not is_finite and not one._nnz():  # so that this process's GradScaler skips the step too
            not_finite = np.full((1, variable.dimension), np.nan, np.float32)
            sparse[number] = sparse_gradient(np.zeros(1, np.int64), not_finite, variable)
    return sparse


def _owned(variable: AnyVariable, combiner: Combiner, trains: bool) -> OwnedTable:
    rows = LookedUpRows(variable.name or "variable", EmbeddingBagConfig(variable.dimension, combiner), variable.native)
    return OwnedTable(rows, variable.placement.owner, variable.row_of(trains))


def _require_one_kind(variables: Sequence[AnyVariable]) -> None:
    if not variables:
        raise ValueError("lookup_sparse: expected at least one variable, got none")
    kinds = [_kind(variable) for variable in variables]
    if len(set(kinds)) > 1:
        raise ValueError(f"lookup_sparse: expected variables of one kind, got {', '.join(kinds)}")
    groups = [variable.placement.processes.group for variable in variables]
    if any(group is not groups[0] for group in groups):
        raise ValueError("lookup_sparse: expected variables of the same processes, got those of several calls of init")


def _kind(variable: Any) -> str:
    if isinstance(variable, DynamicVariable):
        return "dynamic"
    if not isinstance(variable, Variable) or isinstance(variable, EmbeddingVariable):
        expected = "sok.Variable or sok.DynamicVariable"
        raise TypeError(f"lookup_sparse: expected {expected}, got {type(variable).__name__}")
    return "distributed" if variable.placement.owner is None else "localized"
