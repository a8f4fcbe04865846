"""What `from_torch` refuses. Messages name the table or the input, nothing is written, and the module is as before."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from serving.errors import ConfigError, ModelFileError, OutputError
from serving.importers import from_torch
from serving.opening import load_model
from training import EmbeddingBagCollection, EmbeddingBagConfig

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
ONE = torch.ones(2, 1)


class Model(nn.Module):
    """Looks up three keys per sample in one table. Each test changes one part."""

    def __init__(self, table=None, look_up=None, answer=None):
        super().__init__()
        self.user = table or nn.Embedding(20, 4)
        self.other = nn.Embedding(20, 4)
        self.look_up = look_up or (lambda table, ids: table(ids).mean(1))
        self.answer = answer or torch.sigmoid

    def forward(self, ids, dense=0.0, ignored=None):
        return self.answer(self.look_up(self.user, ids).sum(1, keepdim=True) + dense)


class Bags(nn.Module):
    """Looks up one bag per sample."""

    def __init__(self, offsets_of=lambda offsets: offsets, keys_of=lambda ids: ids, **more):
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.EmbeddingBag(20, 1, **more)})
        self.offsets_of, self.keys_of = offsets_of, keys_of

    def forward(self, ids, offsets=None, weights=None):
        return torch.sigmoid(self.tables["user"](self.keys_of(ids), self.offsets_of(offsets), weights))


class Collection(nn.Module):
    """Looks up one bag per sample in a table of an ``EmbeddingBagCollection``."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(1)})

    def forward(self, ids, offsets=None, weights=None):
        bags = ids if offsets is None else (ids, offsets) if weights is None else (ids, offsets, weights)
        return torch.sigmoid(self.tables({"user": bags})["user"])


class Hashing(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids % 20)


class Choosing(Model):
    """Calls another table if there are many samples."""

    def forward(self, ids):
        return torch.sigmoid((self.user if len(ids) == 2 else self.other)(ids).sum((1, 2)))


class Ignoring(Model):
    """Does not use what it looks up in a table."""

    def forward(self, ids):
        self.other(ids)
        return super().forward(ids)


COMPUTED = "Model: user: forward computes keys of this table, but a request's keys go directly to the table"
OTHER_ANSWER = "Model: with other keys and the same rows, forward gives another answer; expected keys to matter"
FORMS = "float32 [B, ...] for dense features, int64 or int32 [B, ...] for keys, or a KeyedJaggedTensor"
ANSWERS = "Model: expected forward to return one tensor, float32 [B] or [B, L] with B = 11"
NO_CALL = "expected forward to call an nn.EmbeddingBag, an nn.Embedding or an EmbeddingBagCollection, it calls none"
TABLES = {
    "max_norm": (Model(nn.Embedding(20, 4, max_norm=0.1)), (IDS,), "Model: user: has max_norm=0.1, which changes rows"),
    "a subclass": (Model(Hashing(20, 4)), (IDS,), "Model: user: Hashing has its own forward; expected nn.EmbeddingBag"),
    "a collection without rows": (Collection(), {"ids": IDS}, "Collection: user: expected a table with rows, got one"),
    "no table": (nn.Linear(1, 1), (ONE,), f"Linear: {NO_CALL}"),
    "a function": (
        Model(look_up=lambda table, ids: functional.embedding(ids, table.weight).sum(1)),
        (IDS,),
        f"Model: {NO_CALL}",
    ),
    "another table": (Choosing(), (IDS,), "Choosing: other: is called, but was not called with the example"),
    "more calls": (
        Model(look_up=lambda table, ids: sum(table(ids).mean(1) for _ in range(len(ids) - 1))),
        (IDS,),
        "Model: user: looks up more slots than the 3 of the example",
    ),
    "fewer calls": (
        Model(look_up=lambda table, ids: sum(table(ids).mean(1) for _ in range(2 if len(ids) == 2 else 1))),
        (IDS,),
        "look up as many slots as with the example, {'user': 6}, got {'user': 3} with B = 11",
    ),
}
KEYS = {
    "a hash": (Model(look_up=lambda table, ids: table(ids % 20).mean(1)), (IDS,), COMPUTED),
    "a limit": (Model(look_up=lambda table, ids: table(ids.clamp(max=19)).mean(1)), (IDS,), COMPUTED),
    "an order": (Model(look_up=lambda table, ids: table(ids.sort(1).values).mean(1)), (IDS,), COMPUTED),
    "the other order": (Model(look_up=lambda table, ids: table(-(-ids).sort(1).values).mean(1)), (IDS,), COMPUTED),
    "another key for one": (Model(look_up=lambda table, ids: table(ids.where(ids != 3, 0)).mean(1)), (IDS,), COMPUTED),
    "no key as another": (Model(look_up=lambda table, ids: table(ids.clamp(min=0)).mean(1)), (IDS,), COMPUTED),
    "a constant as another": (
        Model(look_up=lambda table, ids: table(ids.masked_fill(ids == 13, 5)).mean(1)),
        (IDS,),
        COMPUTED,
    ),
    "an effect of a constant": (
        Model(look_up=lambda table, ids: table(ids).mean(1) + (ids == 13).any(1, keepdim=True)),
        (IDS,),
        "Model: with keys such as 13 and the same rows, forward gives another answer; expected keys to matter only",
    ),
    "an effect of a pair": (
        Model(look_up=lambda table, ids: table(ids).mean(1) + (ids[:, :1] == ids[:, 1:2])),
        (IDS,),
        OTHER_ANSWER,
    ),
    "a smallest key": (Model(look_up=lambda table, ids: table(ids.clamp(min=1)).mean(1)), (IDS,), COMPUTED),
    "a hash of lists": (
        Bags(keys_of=lambda ids: ids % 20),
        {"ids": torch.arange(3), "offsets": torch.tensor([0, 1])},
        "Bags: tables.user: forward computes keys of this table",
    ),
    "other samples": (Model(look_up=lambda table, ids: table(ids.flip(0)).mean(1)), (IDS,), COMPUTED),
    "keys twice in a bag": (
        Model(nn.EmbeddingBag(20, 4), lambda table, ids: table(torch.cat([ids, ids], dim=1))),
        (IDS,),
        COMPUTED,
    ),
    "a mapping": (
        Model(look_up=lambda table, ids: table(torch.arange(20)[ids]).mean(1)),
        (IDS,),
        "Model: forward fails on inputs of the example's form with B = 11: index",
    ),
    "constant keys": (
        Model(look_up=lambda table, ids: table(ids).mean(1) + table(torch.arange(3)).mean(0)),
        (IDS,),
        "user: expected keys [B] or [B, n] with B = 2, got [3]; for a list of keys per sample, pad it and use",
    ),
    "[n, B]": (Model(look_up=lambda table, ids: table(ids.T).mean(0)), (IDS,), "with B = 2, got [3, 2]; for constant"),
    "[B, B]": (
        Model(look_up=lambda table, ids: table(ids.T).mean(0)),
        (IDS[:, :2],),
        "Model: user: looks up more slots than the 2 of the example",
    ),
    "more bags": (
        Model(
            nn.EmbeddingBag(20, 4),
            lambda table, ids: table(ids.flatten(), torch.arange(ids.numel())).view(-1, 3, 4).mean(1),
        ),
        (IDS,),
        "Model: user: expected a bag for each sample with B = 2, got 6 bags",
    ),
    "a mask": (
        Model(look_up=lambda table, ids: (table(ids) * (ids != 0)[..., None]).sum(1)),
        (IDS,),
        OTHER_ANSWER,
    ),
    "random numbers": (Model(answer=torch.rand_like), (IDS,), OTHER_ANSWER),
}
INPUTS = {
    "B": (
        Model(),
        (IDS, torch.ones(3, 1)[:2].T),
        "example: expected the same B in all inputs, got 2 in 'ids', 1 in 'd",
    ),
    "lengths": (
        Bags(lambda lengths: lengths.cumsum(0) - lengths),
        (IDS[0], torch.tensor([1, 2])),
        "got 3 in 'ids', 2 in 'offsets'; keys [N] need their offsets as another input",
    ),
    "float64": (Model(), (IDS, 0, ONE.double()), f"Model: ignored: expected {FORMS}, got float64 [2, 1]"),
    "one number": (Model(), (IDS, torch.tensor(1.0)), f"Model: dense: expected {FORMS}, got float32 []"),
    "no number": (Model(), (IDS, 0, torch.ones(2, 0)), f"Model: ignored: expected {FORMS}, got float32 [2, 0]"),
    "an object": (Model(), (IDS, 0, [object()]), f"Model: ignored[0]: expected {FORMS}, got object"),
    "integers": (
        Model(),
        (IDS, ONE.long()),
        "dense: its keys reach no table; if it is a dense feature, pass it as flo",
    ),
    "a tensor": (
        Model(),
        IDS,
        "example: expected a tuple of positional arguments or a dictionary of keyword arguments",
    ),
    "too many": (
        Model(),
        (IDS, 0, 0, 0),
        "Model: example: does not fit forward(ids, dense=0.0, ignored=None): too many",
    ),
    "a wrong name": (Model(), {"id": IDS}, "does not fit forward(ids, dense=0.0, ignored=None): missing a required"),
}
ANSWERS_AND_MODULES = {
    "logits": (Model(answer=lambda one: one - 9), (IDS,), "are not probabilities; if they are logits, use logits=True"),
    "nan": (Model(answer=lambda one: one * torch.nan), (IDS,), "answers such as [nan, nan, nan] are not probabilities"),
    "two answers": (
        Model(answer=lambda one: (one, one)),
        (IDS,),
        "Model: returns 2 values without names; name them in order: outputs={'name1': 'probability', 'name2': 'prob",
    ),
    "no tensor": (Model(answer=lambda one: None), (IDS,), f"{ANSWERS}, got NoneType"),
    "no tensor by a name": (
        Model(answer=lambda one: {"click": torch.sigmoid(one), "loss": None}),
        (IDS,),
        "Model: expected forward to return 'loss', float32 [B] or [B, L] with B = 11, got NoneType",
    ),
    "a head of logits": (
        Model(answer=lambda one: {"click": torch.sigmoid(one), "rating": one + 9}),
        (IDS,),
        "Model: 'rating': answers such as [",
    ),
    "a reserved name": (
        Model(answer=lambda one: {"TOP_INDEX": torch.sigmoid(one)}),
        (IDS,),
        "Model: outputs: the name 'TOP_INDEX' is reserved in answers",
    ),
    "[B, 1, 1]": (Model(answer=lambda one: one[:, None]), (IDS,), f"{ANSWERS}, got float32 [11, 1, 1]"),
    "an integer": (Model(answer=lambda one: one.long()), (IDS,), f"{ANSWERS}, got int64 [11, 1]"),
    "a branch": (
        Model(answer=lambda one: torch.sigmoid(one if one.sum() > 0 else one + 1)),
        (IDS,),
        "Model: PyTorch cannot export the dense network to ONNX: ",
    ),
    "an operator that ONNX has not": (
        Model(answer=lambda one: torch.sigmoid(torch.lgamma(one))),
        (IDS,),
        "ONNX has no operator for prims.lgamma; compute it before the module, or with other operators; in test_from_to",
    ),
    "squeeze": (
        Model(answer=lambda one: {"click": torch.sigmoid(one).squeeze()}),
        (IDS,),
        "'click', float32 [B] or [B, L] with B = 1, got float32 []; squeeze() removes B if it is 1: use squeeze(1)",
    ),
    "a logarithm of a negative number": (
        Model(answer=lambda one: torch.sigmoid(one.log())),
        (IDS, -ONE),
        "dense features are tried with random normal numbers; if dense cannot be negative, as for a logarithm, give an",
    ),
    "an ignored input": (Model(), (IDS, 0, ONE), "Model: ignored: has no effect on the answer; remove it from forward"),
    "an ignored table": (Ignoring(), (IDS,), "Ignoring: other: has no effect on the answer; remove it from forward"),
    "float16": (
        Model().half(),
        (IDS,),
        "user.weight: expected float32 on the CPU, got float16 on cpu; call module.floa",
    ),
    "meta": (
        Model().to("meta"),
        (IDS,),
        "user.weight: expected float32 on the CPU, got float32 on meta; call module.fl",
    ),
    "no module": (torch.sigmoid, (IDS,), "from_torch: module: expected a torch.nn.Module, got builtin_function_or_met"),
}
REFUSED = {**TABLES, **KEYS, **INPUTS, **ANSWERS_AND_MODULES}


@pytest.mark.parametrize(("module", "example", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("exporter")
def test_it_is_refused(tmp_path, module, example, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_torch(module, example, tmp_path, "ctr")

    assert list(tmp_path.iterdir()) == []
    parts = module.modules() if isinstance(module, nn.Module) else ()
    assert all(part.training and "forward" not in vars(part) for part in parts)


def test_nested_keys_are_refused(tmp_path):
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3]))  # imports for a second
    message = "Model: example: expected keys [N] and their offsets as two inputs, or TorchRec's KeyedJaggedTensor, got"

    with pytest.raises(ConfigError, match=re.escape(message)):
        from_torch(Model(nn.EmbeddingBag(20, 4)), (nested,), tmp_path, "ctr")


@pytest.mark.parametrize("tolerance", [-0.1, 1.5, float("nan")])
def test_a_tolerance_that_compares_nothing_is_refused(tmp_path, tolerance):
    with pytest.raises(ConfigError, match=f"from_torch: tolerance: expected 0 to 1, got {tolerance}"):
        from_torch(Model(), (IDS,), tmp_path, "ctr", tolerance=tolerance)


def test_a_replaced_forward_is_refused_and_kept(tmp_path):
    module = Model()
    module.other.forward = replaced = lambda ids: ids

    with pytest.raises(ConfigError, match="Model: other: its forward was replaced; expected PyTorch's own"):
        from_torch(module, (IDS,), tmp_path, "ctr")

    assert module.other.forward is replaced
    assert "forward" not in vars(module.user)


def test_an_error_of_forward_on_the_example_is_not_changed(tmp_path):
    with pytest.raises(IndexError):
        from_torch(Model(), (IDS + 20,), tmp_path, "ctr")


@pytest.mark.usefixtures("exporter")
def test_other_answers_of_the_version_are_refused_and_no_version_is_left(tmp_path):
    module = Model(answer=lambda one: torch.sigmoid(one + 1 if torch.compiler.is_exporting() else one))

    with pytest.raises(ModelFileError, match=r"random requests to Model: sample \d+: expected .* more than 1e-05: 64"):
        from_torch(module, (IDS,), tmp_path, "ctr")

    assert list(tmp_path.iterdir()) == []
    assert from_torch(module, (IDS,), tmp_path, "ctr", tolerance=0.9).comparison.difference > 0.1


@pytest.mark.usefixtures("exporter")
def test_a_branch_for_one_sample_is_refused(tmp_path):
    module = Model(answer=lambda one: torch.sigmoid(one if one.shape[0] > 1 else one + 1))

    with pytest.raises(ModelFileError, match="one random sample to Model: sample 0: expected "):
        from_torch(module, (IDS,), tmp_path, "ctr")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("exporter")
def test_an_error_of_the_export_is_not_preceded_by_its_graph(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"cannot export .*; in test_from_torch_refusals.py, line \d+: "):
        from_torch(Model(answer=lambda one: torch.sigmoid(one if one.sum() > 0 else -one)), (IDS,), tmp_path, "ctr")

    assert "def forward" not in capsys.readouterr().err


@pytest.mark.usefixtures("exporter")
def test_dense_features_are_tried_without_negative_numbers_if_the_example_has_none(tmp_path):
    class Counts(Model):
        def forward(self, ids, dense):
            return torch.sigmoid(self.user(ids).sum((1, 2)) + dense[:, 0].log())

    module, counts = Counts(), torch.tensor([[1.0], [9.0]])

    with load_model(from_torch(module, (IDS, counts), tmp_path, "ctr").path) as session, torch.no_grad():
        answers = session.predict({"ids[0]": [1, 4], "ids[1]": [2, 5], "ids[2]": [3, 6], "dense[0]": [1.0, 9.0]})
        np.testing.assert_allclose(answers[:, 0], module(IDS, counts), atol=1e-6)


@pytest.mark.usefixtures("exporter")
def test_probabilities_are_refused_as_logits(tmp_path):
    with pytest.raises(
        ModelFileError, match=r"the dense network of Model: .* ends in a Sigmoid, so its answers are not"
    ):
        from_torch(Model(), (IDS,), tmp_path, "ctr", logits=True)


def test_a_name_that_cannot_be_used_is_refused_first(tmp_path):
    with pytest.raises(OutputError, match="model name 'a b'"):
        from_torch(nn.Linear(1, 1), (IDS,), tmp_path, "a b")
