"""Join the states that several processes have saved, so that any number of processes can load them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SHARD = "shard"


def join_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one process that has all rows. Any number of processes can load it.

    Args:
        states: what ``state_dict()`` of the same module returned in each process, in any order. The module is an
            ``EmbeddingBagCollection`` or contains some. Everything else is taken from the first state.

    Raises:
        ValueError: a process's state is missing, or the states have different keys or optimizers.
    """
    if not states:
        raise ValueError("join_state_dicts: expected the state of each process, got none")
    for state in states:
        if state.keys() != states[0].keys():
            names = sorted(state.keys() ^ states[0].keys())
            raise ValueError(f"join_state_dicts: expected {names[0]!r} in every state, got a state without it")
    joined = dict(states[0])
    for name, value in joined.items():
        if is_of_collection(value):
            joined[name] = join_shares(name, [share for state in states for share in shares_of(state[name])])
    return joined


def shares_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each process in the state of a collection.

    ``torch.distributed.checkpoint`` keeps one value of each name. So several processes have several names in it.
    """
    return [dict(state)] if _SHARD in state else list(state.values())


def is_of_collection(value: Any) -> bool:
    """Whether a value of a ``state_dict`` is the state of a collection."""
    if not isinstance(value, Mapping):
        return False
    shares = shares_of(value)
    return bool(shares) and all(isinstance(share, dict) and _SHARD in share for share in shares)


def join_shares(name: str, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a collection from those of all processes; ``name`` is for errors."""
    shards = [tuple(state[_SHARD]) for state in states]
    _, size, sharding = shards[0]
    if sorted(shards) != [(rank, size, sharding) for rank in range(size)]:
        came = ", ".join(f"{rank} of {of}, by {how}" for rank, of, how in shards)
        raise ValueError(f"join_state_dicts: {name}: expected the states of processes 0 to {size - 1}, got {came}")
    in_order = [state["tables"] for _, state in sorted(zip(shards, states, strict=True), key=lambda one: one[0])]
    tables = {table: _join_table(table, [shard[table] for shard in in_order]) for table in in_order[0]}
    return {_SHARD: [0, 1, sharding], "tables": tables}


def _join_table(table: str, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a table."""
    rules = [(state["rule"], state["initial_states"]) for state in states]
    if any(rule != rules[0] for rule in rules):
        other = next(rule for rule in rules if rule != rules[0])
        expected = "the same optimizer in all processes"
        raise ValueError(f"join_state_dicts: table {table!r}: expected {expected}, got {rules[0]} and {other}")
    return {
        name: torch.cat([state[name] for state in states]) if isinstance(value, torch.Tensor) else value
        for name, value in states[0].items()
    }
