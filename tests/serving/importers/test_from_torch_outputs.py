"""`from_torch` with several outputs: what the served version answers, next to the module in float64."""

import copy
import re
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import ConfigError
from serving.importers import from_torch
from serving.opening import load_model
from tests.serving.importers.torch_modules import Head

B, ROWS, DIM = 40, 30, 6
pytestmark = pytest.mark.usefixtures("exporter")
KEYS = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}
EXAMPLE = KEYS | {"age": torch.zeros(2), "price": torch.zeros(2)}


@dataclass
class Fields:
    """The answer of a module as a dataclass."""

    click: torch.Tensor
    rating: torch.Tensor


Pair = namedtuple("Pair", ["click", "rating"])


class Towers(nn.Module):
    """A click, a rating, the cosine and the vectors of a user and an item; ``form`` makes what forward returns."""

    def __init__(self, form=dict):
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.of_user, self.of_item = nn.Linear(DIM + 1, 5), Head(DIM + 1, labels=5)
        self.logits = nn.Linear(10, 3)
        self.form = form

    def forward(self, user, item, age, price):
        of_user = torch.tanh(self.of_user(torch.cat([self.users(user), age[:, None]], dim=1)))
        of_item = self.of_item(self.items(item), price[:, None])
        logits = self.logits(torch.cat([of_user, of_item], dim=1))
        return self.form(
            click=torch.sigmoid(logits[:, 0]),
            rating=100 * logits[:, 1:2],
            cosine=torch.cosine_similarity(of_user, of_item),
            user_vector=nn.functional.normalize(of_user),
            item_vector=of_item,
        )


class Tasks(nn.Module):
    """A click, a rating and a distance of the rows of a user and an item: little to export."""

    def __init__(self, form=dict):
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.form = form

    def forward(self, user, item):
        difference = self.users(user) - self.items(item)
        return self.form(
            click=torch.sigmoid(difference[:, 0]), rating=100 * difference[:, 1:2], distance=difference.sum(1)
        )


KINDS = {
    "click": "probability",
    "rating": "score",
    "cosine": "score",
    "user_vector": "vector",
    "item_vector": "vector",
}


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


def keys():
    """Random keys of a user and an item, by name."""
    rng = np.random.default_rng(4)
    return {name: torch.from_numpy(rng.integers(0, ROWS, B)) for name in ("user", "item")}


def requests():
    """Random arguments of ``Towers``, by name."""
    rng = np.random.default_rng(5)
    return keys() | {name: torch.from_numpy(rng.normal(size=B).astype(np.float32)) for name in ("age", "price")}


def in_float64(module, arguments):
    """The oracle: the answers of the module in float64."""
    exact = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        return exact(**{name: one.double() if one.is_floating_point() else one for name, one in arguments.items()})


def served(path, arguments, outputs=None):
    with load_model(path) as session:
        return session.predict({name: value.tolist() for name, value in arguments.items()}, outputs=outputs)


def test_a_dictionary_of_tasks_scores_and_vectors_is_served_by_its_names(tmp_path):
    module = Towers()

    imported = from_torch(module, EXAMPLE, tmp_path, "towers", outputs=KINDS)

    arguments = requests()
    right, answers = in_float64(module, arguments), served(imported.path, arguments)
    assert list(answers) == list(KINDS)
    for name, answer in answers.items():
        expected = right[name].reshape(B, -1).numpy()
        assert np.ptp(expected) > 0.01
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=2e-6)
    of_items = served(imported.path, {name: arguments[name] for name in ("item", "price")}, ["item_vector"])
    assert of_items["item_vector"].tobytes() == answers["item_vector"].tobytes()
    some = served(imported.path, arguments, ["cosine"])
    assert some["cosine"].tobytes() == answers["cosine"].tobytes()


def test_an_output_without_a_kind_is_a_probability_unless_it_is_omitted(tmp_path):
    module = Tasks(lambda **answers: answers | {"loss": None, "hidden": answers["rating"][None]})
    kinds = {"distance": "score", "rating": "omit", "loss": "omit"}
    with pytest.raises(ConfigError, match=r"return 'hidden', float32 \[B\].* to leave it out, use outputs=.*'omit'"):
        from_torch(module, KEYS, tmp_path, "tasks", outputs=kinds)

    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs=kinds | {"hidden": "omit"})

    arguments = keys()
    right, answers = in_float64(module, arguments), served(imported.path, arguments)
    assert list(answers) == ["distance", "click"]
    for name, answer in answers.items():
        np.testing.assert_allclose(answer[:, 0], right[name].numpy(), rtol=1e-5, atol=2e-6)


def click_and_rating(kind):
    return lambda **answers: kind(answers["click"], answers["rating"])


def as_tuple(click, rating):
    return click, rating


@pytest.mark.parametrize("kind", [as_tuple, Pair, Fields])
def test_a_tuple_has_the_names_of_outputs_in_order_and_other_forms_have_their_own(tmp_path, kind):
    module = Tasks(click_and_rating(kind))

    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs={"click": "probability", "rating": "score"})

    arguments = keys()
    right, answers = in_float64(module, arguments), served(imported.path, arguments)
    click, rating = right if isinstance(right, tuple) else (right.click, right.rating)
    np.testing.assert_allclose(answers["click"][:, 0], click.numpy(), atol=2e-6)
    np.testing.assert_allclose(answers["rating"], rating.numpy(), rtol=1e-5, atol=2e-4)


def test_a_regression_is_one_array_and_keeps_the_name_that_it_gets(tmp_path):
    module = Tasks(lambda **answers: answers["rating"])

    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs={"rating": "score"})

    arguments = keys()
    right = in_float64(module, arguments).numpy()
    np.testing.assert_allclose(served(imported.path, arguments), right, rtol=1e-5, atol=2e-4)
    assert list(served(imported.path, arguments, ["rating"])) == ["rating"]


def test_output0_may_be_a_score(tmp_path):
    module = Tasks(lambda **answers: answers["distance"])

    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs={"OUTPUT0": "score"})

    with load_model(imported.path) as session:
        assert [(output.name, output.kind, output.width) for output in session.outputs] == [("OUTPUT0", "score", 1)]


def test_logits_get_a_sigmoid_only_where_an_output_is_a_probability(tmp_path):
    module = Tasks(lambda **answers: {"click": answers["rating"] / 100, "distance": answers["distance"]})

    kinds = {"click": "probability", "distance": "score"}
    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs=kinds, logits=True)

    arguments = keys()
    right, answers = in_float64(module, arguments), served(imported.path, arguments)
    np.testing.assert_allclose(answers["click"], torch.sigmoid(right["click"]).numpy(), atol=2e-6)
    np.testing.assert_allclose(answers["distance"][:, 0], right["distance"].numpy(), atol=2e-6)


def test_the_same_tensor_may_have_two_names(tmp_path):
    module = Tasks(lambda **answers: {"a": answers["rating"], "b": answers["rating"]})

    imported = from_torch(module, KEYS, tmp_path, "tasks", outputs={"a": "score", "b": "score"})

    answers = served(imported.path, keys())
    assert answers["a"].tobytes() == answers["b"].tobytes()


REFUSED = {
    "an unknown name": (dict, {"clicks": "probability"}, "outputs: it has no output 'clicks'; did you mean 'click'?"),
    "an unknown kind": (
        dict,
        {"click": "logit"},
        "outputs: 'click': expected one of probability, score, vector, omit,",
    ),
    "nothing is left": (
        click_and_rating(Pair),
        {"click": "omit", "rating": "omit"},
        "outputs: expected an output that",
    ),
    "no names": (dict, {}, "outputs: expected a dictionary of names and kinds, got {}"),
    "a list": (dict, ["click"], "outputs: expected a dictionary of names and kinds, got ['click']"),
    "a name that is no text": (dict, {3: "score"}, "outputs: expected a name, got 3"),
    "two values for a name": (click_and_rating(as_tuple), {"click": "probability"}, "returns 2 values, expected one"),
    "a vector as probabilities": (
        dict,
        {"item_vector": "probability"},
        "'item_vector': answers such as [",
    ),
    "not finite": (lambda **answers: answers["cosine"] * torch.nan, {"cosine": "score"}, "are not finite"),
}


@pytest.mark.parametrize(("form", "kinds", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_outputs_are_refused(tmp_path, form, kinds, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_torch(Towers(form), EXAMPLE, tmp_path, "towers", outputs=kinds)

    assert list(tmp_path.iterdir()) == []
