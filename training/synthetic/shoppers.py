"""Generate samples with several inputs, behavior sequences and several labels, from a known truth.

All samples come from one small shop. Goods belong to categories. A shopper has two favorite categories and a history of
up to ten goods, mostly from these categories, newest first. A visit shows a shopper one good, the target. The chance
that the shopper wants it depends on the good (a planted weight, a hash of its key), on the shopper, and on how the
target fits the shopper's past. Each form tests one kind of fit:

- ``ncf``: the target is of a favorite category, which only other visits of the shopper reveal;
- ``din``: how many goods of the history are of the target's category;
- ``bst``: the same, but recent goods count more;
- ``mmoe``: as ``din`` for the first label, a click; the second label, a purchase, needs a click and a low price.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.model.graph import Graph
from training.samples import Bags, Samples
from training.synthetic.criteo_like import SyntheticSamples, planted_weights, power_law_keys, true_uniform

HISTORY = 10  # the most goods
_SHOPPERS, _CATEGORIES, _GOODS_OF_A_CATEGORY = 300, 20, 20
_ALPHA = 1.1
_FAVOURITE_RATIO = 0.7  # of a history; other goods are of any category
_SHOWN_FAVOURITE_RATIO = 0.4  # of the targets
_OLDEST = 9  # the last age class
_PROFILE_SHIFT = 40  # a profile's slots share a table, so their keys must differ

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Visits:
    """B visits.

    Attributes:
        shopper: int64[B].
        favourites: int64[B, 2], categories.
        target: int64[B], the good shown.
        history: int64[B, HISTORY], goods, newest first.
        is_past: bool[B, HISTORY], which entries of the history exist. They come first.
        age: int64[B, HISTORY], the age class of each entry, 1 to 9, rising.
        price: float64[B], the logarithm of the target's price, around 0.
    """

    shopper: Ints
    favourites: Ints
    target: Ints
    history: Ints
    is_past: NDArray[np.bool_]
    age: Ints
    price: Floats

    @property
    def matches(self) -> NDArray[np.bool_]:
        """bool[B, HISTORY], which existing entries of the history are of the target's category."""
        return np.asarray(self.is_past & (_category(self.history) == _category(self.target)[:, None]))


@dataclass(frozen=True, slots=True)
class _Form:
    """The inputs of a family, and the truth of its labels.

    Attributes:
        inputs: each sparse input's name and slots.
        labels: L.
        dense: F.
        view: returns the bags of each input and the dense features [B, F] of some visits.
        chances: returns float64[B, L], the chance of each label being 1, for some visits and a seed.
    """

    inputs: tuple[tuple[str, int], ...]
    labels: int
    dense: int
    view: Callable[[_Visits], tuple[Sequence[Bags], Floats]]
    chances: Callable[[_Visits, int], Floats]


def generate_visits(graph: Graph, rows: int, seed: int) -> SyntheticSamples | None:
    """Draw ``rows`` samples if the graph's inputs are those of a form, else return None."""
    asked = (tuple((entry.top, entry.slots) for entry in graph.sparse), graph.label_dim, graph.dense_dim)
    for form in FORMS.values():
        if (form.inputs, form.labels, form.dense) == asked:
            return _generate(form, rows, seed)
    return None


def _generate(form: _Form, rows: int, seed: int) -> SyntheticSamples:
    rng = np.random.default_rng(seed)
    visits = _draw(rng, rows, seed)
    parts, dense = form.view(visits)
    chances = form.chances(visits, seed)
    labels = (rng.random(rows)[:, None] < chances).astype(np.float32)
    return SyntheticSamples(Samples(labels, dense.astype(np.float32), Bags.side_by_side(parts)), chances)


def _draw(rng: np.random.Generator, rows: int, seed: int) -> _Visits:
    shopper = power_law_keys(rng.random(rows), _ALPHA, 0, _SHOPPERS - 1)
    favourites = (true_uniform(shopper, 2, seed) * _CATEGORIES).astype(np.int64)
    past = _goods(rng, favourites, (rows, HISTORY), _FAVOURITE_RATIO)
    return _Visits(
        shopper=shopper,
        favourites=favourites,
        target=_goods(rng, favourites, (rows, 1), _SHOWN_FAVOURITE_RATIO)[:, 0],
        history=past,
        is_past=np.arange(HISTORY) < rng.integers(0, HISTORY + 1, (rows, 1)),
        age=1 + np.minimum(np.cumsum(rng.random((rows, HISTORY)) < 0.6, axis=1), _OLDEST - 1),
        price=rng.normal(0, 1, rows),
    )


def _goods(rng: np.random.Generator, favourites: Ints, shape: tuple[int, int], favourite_ratio: float) -> Ints:
    """Draw goods of favorite and of any categories. A good's category is its key modulo the number of categories."""
    favourite = np.take_along_axis(favourites, rng.integers(0, 2, shape), axis=1)
    category = np.where(rng.random(shape) < favourite_ratio, favourite, rng.integers(0, _CATEGORIES, shape))
    rank = power_law_keys(rng.random(shape), _ALPHA, 0, _GOODS_OF_A_CATEGORY - 1)
    return rank * _CATEGORIES + category


def _category(goods: Ints) -> Ints:
    return goods % _CATEGORIES


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logits)))


def _appeal(visits: _Visits, seed: int) -> Floats:
    """Return the logits of the good and the shopper without the shopper's past."""
    return 0.5 * planted_weights(visits.target, seed + 1) + 0.5 * planted_weights(visits.shopper, seed + 2)


def _in_favourites(visits: _Visits, seed: int) -> Floats:
    is_favourite = (visits.favourites == _category(visits.target)[:, None]).any(axis=1)
    return _sigmoid(_appeal(visits, seed) + 3.0 * is_favourite - 2.0)[:, None]


def _by_history(visits: _Visits, seed: int) -> Floats:
    return _sigmoid(_appeal(visits, seed) + 1.2 * np.minimum(visits.matches.sum(axis=1), 3) - 1.5)[:, None]


def _by_recent_history(visits: _Visits, seed: int) -> Floats:
    recent = (visits.matches * 0.7**visits.age).sum(axis=1)
    return _sigmoid(_appeal(visits, seed) + 3.0 * np.minimum(recent, 1.2) - 1.5)[:, None]


def _click_and_purchase(visits: _Visits, seed: int) -> Floats:
    click = _by_history(visits, seed)
    purchase = _sigmoid(planted_weights(visits.target, seed + 3) - 1.5 * visits.price)
    return np.concatenate([click, click * purchase[:, None]], axis=1)


def _one_slot(keys: Ints) -> Bags:
    return Bags.one_key_each(keys[:, None])


def _no_dense(visits: _Visits) -> Floats:
    return np.empty((len(visits.shopper), 0))


def _shopper_and_item(visits: _Visits) -> tuple[Sequence[Bags], Floats]:
    return [_one_slot(visits.shopper), _one_slot(visits.target)], _no_dense(visits)


def _history_then_target(visits: _Visits) -> tuple[Sequence[Bags], Floats]:
    goods = np.concatenate([visits.history, visits.target[:, None]], axis=1)
    is_key = np.pad(visits.is_past, ((0, 0), (0, 1)), constant_values=True)
    parts = [_one_slot(visits.shopper), Bags.padded(goods, is_key), Bags.padded(_category(goods), is_key)]
    return parts, _no_dense(visits)


def _target_then_history(visits: _Visits) -> tuple[Sequence[Bags], Floats]:
    goods = np.concatenate([visits.target[:, None], visits.history], axis=1)
    age = np.pad(visits.age, ((0, 0), (1, 0)))  # the target has age 0
    is_key = np.pad(visits.is_past, ((0, 0), (1, 0)), constant_values=True)
    parts = [_one_slot(visits.shopper), *(Bags.padded(keys, is_key) for keys in (goods, _category(goods), age))]
    return parts, is_key.sum(axis=1, keepdims=True).astype(np.float64)


def _profile_and_bag(visits: _Visits) -> tuple[Sequence[Bags], Floats]:
    slots = np.stack([visits.shopper, visits.target, _category(visits.target)], axis=1)
    sizes = visits.is_past.sum(axis=1)
    bag = Bags(_category(visits.history)[visits.is_past], np.concatenate([[0], np.cumsum(sizes)]), 1)
    dense = np.stack([visits.price, sizes / HISTORY], axis=1)
    return [Bags.one_key_each(slots + (np.arange(3) << _PROFILE_SHIFT)), bag], dense


FORMS: Mapping[str, _Form] = {
    "bst": _Form(
        (("user", 1), ("goods", 11), ("categories", 11), ("ages", 11)), 1, 1, _target_then_history, _by_recent_history
    ),
    "din": _Form((("user", 1), ("goods", 11), ("categories", 11)), 1, 0, _history_then_target, _by_history),
    "mmoe": _Form((("profile", 3), ("history", 1)), 2, 2, _profile_and_bag, _click_and_purchase),
    "ncf": _Form((("user", 1), ("item", 1)), 1, 0, _shopper_and_item, _in_favourites),
}
