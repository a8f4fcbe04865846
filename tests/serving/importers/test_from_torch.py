"""`from_torch`: what the served version answers, next to the module itself."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import ConfigError, MissingExtraError, RequestError
from serving.importers import from_torch
from serving.model.manifest import read_manifest
from serving.opening import load_model
from tests.serving.importers.torch_modules import Head, draw_bags, request, with_offsets
from training import EmbeddingBagCollection, EmbeddingBagConfig
from training.embedding import Normal
from training.publishing import Publisher

B = 50
pytestmark = pytest.mark.usefixtures("exporter")


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def answer(path, dense, keys, row_ptrs):
    with load_model(path) as session:
        return session.predict(dense, keys, row_ptrs)


def expected(module, *arguments):
    with torch.no_grad():
        answer = module.eval()(*arguments).numpy()
    assert np.ptp(answer) > 0.01  # equal answers for all samples would prove nothing
    return answer


class Bags(nn.Module):
    """A table that two features share, a mean with padding, and three inputs of dense features."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                "ads": nn.EmbeddingBag(40, 4, mode="sum"),
                "user id": nn.EmbeddingBag(30, 3, mode="mean", include_last_offset=True, padding_idx=0),
            }
        )
        nn.init.normal_(self.tables["user id"].weight)  # the row of the padding too
        self.head = Head(4 + 3 + 4 + 2 + 1 + 6, labels=2)

    def forward(self, prices, batch, *, age, history=None):
        shown, clicked = (self.tables["ads"](*batch[name]) for name in ("shown", "clicked"))
        users = self.tables["user id"](*batch["users"])
        return torch.sigmoid(self.head(shown, users, clicked, prices, age[:, None], history))


class ListOfBags(nn.Module):
    """Has its keys in one list, and their offsets in another."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10, 2) for _ in range(2))

    def forward(self, offsets, keys):
        vectors = [table(*pair) for table, *pair in zip(self.tables, keys, offsets, strict=True)]
        return torch.sigmoid(torch.cat(vectors, 1).sum(1))


def test_each_input_of_a_list_keeps_its_place_in_its_name(tmp_path):
    keys, offsets = ([torch.tensor(values) for _ in range(2)] for values in ([1, 2, 3], [0, 1]))

    assert from_torch(ListOfBags(), (offsets, keys), tmp_path, "ctr").names == ("keys[0]", "keys[1]")


def test_bags_with_several_dense_inputs_are_served(tmp_path, rng):
    one = (torch.tensor([1, 2, 3]), torch.tensor([0, 1]))  # two inputs of the example may be one tensor
    batch = {"shown": one, "clicked": one, "users": (torch.tensor([1, 2]), torch.tensor([0, 1, 2]))}
    example = {"prices": torch.zeros(2, 2), "batch": batch, "age": torch.zeros(2), "history": torch.zeros(2, 2, 3)}
    module = Bags()

    imported = from_torch(module, example, tmp_path / "models", "ctr", max_batchsize=77)

    assert imported.path == tmp_path / "models" / "ctr" / "1"
    assert imported.dense == ("prices", "age", "history")
    assert imported.slots == (
        ("tables.ads", "batch['shown'][0]"),
        ("tables.ads", "batch['clicked'][0]"),
        ("tables.user_id", "batch['users'][0]"),
    )
    assert imported.names == (
        *("prices[0]", "prices[1]", "age", *(f"history[{place}]" for place in range(6))),
        *("shown", "clicked", "users"),
    )
    assert imported.comparison.samples == 64
    assert imported.comparison.difference < 1e-6
    assert imported.comparison.defaulted_keys == 0
    shown, clicked, users = draw_bags(rng, 40, B), draw_bags(rng, 40, B), [[0, 7, 0], *draw_bags(rng, 30, B - 1)]
    dense = torch.from_numpy(rng.normal(size=(B, 9)).astype(np.float32))
    batch = {"shown": with_offsets(shown), "clicked": with_offsets(clicked), "users": with_offsets(users, True)}
    with torch.no_grad():
        answers = module.eval()(dense[:, :2], batch, age=dense[:, 2], history=dense[:, 3:].reshape(B, 2, 3))
    without_padding = [[key for key in bag if key] for bag in users]
    served = answer(imported.path, dense.numpy(), *request(shown, clicked, without_padding))
    np.testing.assert_allclose(served, answers.numpy(), atol=1e-6)
    by_name = {name: dense[:, place].tolist() for place, name in enumerate(imported.names[:9])}
    with load_model(imported.path) as session:
        assert session.config.max_batchsize == 77
        for bags in (without_padding, users):
            again = session.predict({**by_name, "shown": shown, "clicked": clicked, "users": bags})
            assert again.tobytes() == np.asarray(served, np.float32).tobytes()


class Columns(nn.Module):
    """Single keys in columns, a bag of a fixed number of keys, names that ONNX uses too, and logits."""

    def __init__(self):
        super().__init__()
        self.sigmoid = nn.Embedding(20, 4)
        self.dense = nn.Embedding(10, 2, padding_idx=0)
        self.mul = nn.EmbeddingBag(30, 3)
        self.position = nn.Parameter(torch.randn(3, 4))
        self.head = nn.Sequential(Head(3 * 4 + 2 + 3 + 1))

    def forward(self, ids, day, numbers):
        vectors = self.sigmoid(ids[:, [3, 0, 1]]) * torch.sigmoid(self.position)
        parts = torch.cat([vectors.view(ids.shape[0], -1), self.dense(day), self.mul(ids[:, 2:])], dim=1)
        return self.head[0](parts, numbers).squeeze(1)


def test_single_keys_are_served_and_logits_become_probabilities(tmp_path, rng):
    module = Columns().train()
    module.sigmoid.eval()
    example = (torch.zeros(1, 5, dtype=torch.int32), torch.tensor([3]), torch.zeros(1, 1))

    imported = from_torch(module, example, tmp_path, "ctr", logits=True)

    in_training = [name for name, part in module.named_modules() if not part.training]
    assert in_training == ["sigmoid"]
    assert all("forward" not in vars(part) for part in module.modules())
    assert imported.names == ("numbers", "ids[3]", "ids[0]", "ids[1]", "day", "ids[2] ids[3] ids[4]")
    assert imported.slots == (
        *(("sigmoid", f"ids[:, {column}]") for column in (3, 0, 1)),
        ("dense", "day"),
        ("mul", "ids[:, 2] ids[:, 3] ids[:, 4]"),
    )
    ids, day = rng.integers(0, 20, (B, 5)), rng.integers(0, 10, B)
    numbers = rng.normal(size=(B, 1)).astype(np.float32)
    logits = expected(module, torch.from_numpy(ids).int(), torch.from_numpy(day), torch.from_numpy(numbers))
    slots = [ids[:, [column]].tolist() for column in (3, 0, 1)]
    served = answer(imported.path, numbers, *request(*slots, day[:, None].tolist(), ids[:, 2:].tolist()))
    np.testing.assert_allclose(served[:, 0], 1 / (1 + np.exp(-logits)), atol=1e-6)


class TwoTables(nn.Module):
    """Two tables for the same keys, as factorization machines have them."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = (nn.Embedding(8, dim) for dim in (1, 4))

    def forward(self, price, user, item):
        wide = self.wide(user) + self.wide(item)
        return price + wide[:, 0] + (self.deep(user) * self.deep(item)).sum(1)


class WithDiscount(TwoTables):
    """Two dense inputs, which a definition may have in another order."""

    def forward(self, price, discount, user, item):
        return super().forward(price - 2 * discount, user, item)


FINGERPRINTS = {"a": 12917804110809363939, "日本": 5676833963740711883}  # of TensorFlow
DEFINITION = [
    {"name": "person", "slot": "user", "kind": "vocabulary", "values": ["a", "b"], "unknown_buckets": 1},
    {"name": "item", "kind": "hash", "buckets": 5, "offset": 3},
    {"name": "cost", "kind": "dense", "log1p": True},
]


def write_definition(path, features):
    path.write_text(json.dumps({"format": 1, "features": features}))
    return path


def test_features_of_a_module_are_transformed_and_feed_every_table_of_a_key(tmp_path):
    module = WithDiscount()
    example = (torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    numbers = [{"name": "discount", "kind": "dense"}, {"name": "price", "kind": "dense", "log1p": True}]
    definition = write_definition(tmp_path / "features.json", [*DEFINITION[:2], *numbers])

    imported = from_torch(module, example, tmp_path / "models", "ctr", logits=True, features=definition)

    assert imported.names == ("price", "discount", "user", "item")
    keys = torch.tensor([2, 0]), torch.tensor([3 + fingerprint % 5 for fingerprint in FINGERPRINTS.values()])
    prices = torch.tensor(np.log1p([4.0, 0.5]), dtype=torch.float32)
    logits = expected(module, prices, torch.tensor([1.5, -0.5]), *keys)
    with load_model(imported.path) as session:
        raw = {"person": ["b", "zz"], "item": list(FINGERPRINTS), "price": [4, 0.5], "discount": [1.5, -0.5]}
        np.testing.assert_allclose(session.predict(raw)[:, 0], 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_dense_features_of_which_only_some_have_the_modules_names_are_refused(tmp_path):
    example = (torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    numbers = [{"name": "discount", "kind": "dense"}, {"name": "prise", "kind": "dense"}]
    definition = write_definition(tmp_path / "features.json", [*DEFINITION[:2], *numbers])

    with pytest.raises(ConfigError, match="dense numbers price, discount, but no 'prise'; did you mean 'price'"):
        from_torch(WithDiscount(), example, tmp_path / "models", "ctr", logits=True, features=definition)


def test_features_with_more_keys_than_a_table_has_rows_are_refused(tmp_path):
    example = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    features = [DEFINITION[0], {**DEFINITION[1], "buckets": 500}, DEFINITION[2]]
    definition = write_definition(tmp_path / "features.json", features)

    with pytest.raises(
        ConfigError, match=r"features\[1\]: the keys of 'item' are 3 to 502, but the table '.*' has only"
    ):
        from_torch(TwoTables(), example, tmp_path / "models", "ctr", logits=True, features=definition)

    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{**DEFINITION[0], "slot": "usr"}, *DEFINITION[1:]], "features[0].slot: the model has no slot 'usr'; did you"),
        (DEFINITION[1:], "features: no feature gives the keys of the slot 'user'"),
        (DEFINITION[:2], "features: 0 dense features, but the model has 1 dense numbers"),
        ([DEFINITION[0], {**DEFINITION[1], "offset": 2}, DEFINITION[2]], "features[1]: the keys of 'item' are 2 to 6"),
        ([{**DEFINITION[0], "kid": 1}], "features[0].kid: unknown key; did you mean 'kind'?"),
    ],
)
def test_features_that_do_not_fit_a_module_are_refused_before_it_is_exported(tmp_path, monkeypatch, features, message):
    monkeypatch.setattr("serving.importers.pytorch.conversion.export_dense", None)
    example = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    definition = write_definition(tmp_path / "features.json", features)

    with pytest.raises(ConfigError) as caught:
        from_torch(TwoTables(), example, tmp_path / "models", "ctr", logits=True, features=definition)

    assert message in str(caught.value)
    assert not (tmp_path / "models").exists()


def test_a_table_without_a_network_is_served_and_imports_are_repeatable(tmp_path, rng):
    module = nn.EmbeddingBag(20, 1, mode="sum")
    example = (torch.zeros(2, 3, dtype=torch.int64),)
    state = torch.random.get_rng_state()

    imported = from_torch(module, example, tmp_path, "ctr", logits=True)
    again = from_torch(torch.compile(module, backend="eager"), example, tmp_path, "ctr", logits=True)

    assert again.path == tmp_path / "ctr" / "2"
    assert again.comparison == imported.comparison
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (imported.dense, imported.slots) == (again.dense, again.slots) == ((), (("EmbeddingBag", "input"),))
    ids = rng.integers(0, 20, (B, 3))
    logits = expected(module, torch.from_numpy(ids))
    served = answer(imported.path, None, *request(ids.tolist()))
    np.testing.assert_allclose(served, 1 / (1 + np.exp(-logits)), atol=1e-6)


class Trained(nn.Module):
    """Tables of Hotrow that got their rows in training: a table of two features, a mean, and a plain table."""

    def __init__(self):
        super().__init__()
        shared = EmbeddingBagConfig(4, features=("shown", "clicked"), max_norm=1.0, initializer=Normal(0, 1))
        self.tables = EmbeddingBagCollection({"ads": shared, "user": EmbeddingBagConfig(3, "mean")}, seed=1)
        self.plain = nn.EmbeddingBag(9, 2, mode="sum")
        self.head = Head(4 + 4 + 3 + 2 + 1)

    def forward(self, age, shown, clicked, offsets, user, others):
        vectors = self.tables({"shown": shown, "clicked": (clicked, offsets), "user": user})
        return torch.sigmoid(self.head(*vectors.values(), self.plain(others), age))


def test_unknown_keys_of_trained_tables_are_served_as_in_training(tmp_path):
    tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(3, "mean", default_value=0.5)}, seed=1)
    tables({"user": torch.arange(4)})

    class Users(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = tables

        def forward(self, user):
            return torch.sigmoid(self.tables({"user": user})["user"])

    module, users = Users(), torch.tensor([[1, 2], [3, 99], [-1, 99]])

    imported = from_torch(module, (users[:1],), tmp_path, "users")

    answers = answer(imported.path, np.empty((3, 0), np.float32), users.flatten().numpy(), [0, 2, 4, 6])
    np.testing.assert_allclose(answers, expected(module, users), atol=1e-6)


def test_a_version_says_the_run_and_the_position_of_its_updates(tmp_path):
    tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(3)}, seed=1)
    tables({"user": torch.arange(4)})

    class Users(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = tables

        def forward(self, user):
            return torch.sigmoid(self.tables({"user": user})["user"])

    with Publisher(str(tmp_path / "log"), "users", tables, tmp_path / "outbox") as publisher:
        publisher.publish()
        written = {"run": publisher.run, "positions": publisher.flush()}
        imported = from_torch(Users(), (torch.tensor([[1, 2]]),), tmp_path / "models", "users", **written)

    manifest = read_manifest(imported.path)
    assert (manifest.run, manifest.positions) == (written["run"], written["positions"])
    assert manifest.positions
    assert (imported.path / "user" / "key").exists()  # the table has the name that the messages have


def test_trained_tables_are_served_with_their_keys(tmp_path):
    module, keys = Trained(), 1 << 40
    shown, user, others = (
        torch.tensor([[keys, 6], [-9, 6]]),
        torch.tensor([7, keys + 1]),
        torch.tensor([[1, 2], [3, 4]]),
    )
    example = (torch.ones(2, 1), shown, torch.tensor([6, 9, 9]), torch.tensor([0, 3, 3]), user, others)
    module(*example)
    before = {name: parameter for name, parameter in module.named_parameters()}

    imported = from_torch(module, example, tmp_path, "trained")

    assert [table for table, _ in imported.slots] == ["ads", "ads", "user", "plain"]
    assert imported.comparison.defaulted_keys == 0
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    bags = [[keys, 6], [6, 9, 9], [7], [1, 2], [-9, 6], [], [keys + 1], [3, 4]]
    answers = answer(
        imported.path,
        np.ones((2, 1), np.float32),
        [key for bag in bags for key in bag],
        np.cumsum([0, *map(len, bags)]),
    )
    np.testing.assert_allclose(answers, expected(module, *example), atol=1e-6)


def test_importing_the_package_does_not_import_pytorch():
    code = "import sys, serving.importers; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}': pip install 'hotrow\[train\]'"):
        from_torch(nn.EmbeddingBag(20, 1), (torch.zeros(2, 3, dtype=torch.int64),), tmp_path, "ctr")


class Shared(nn.Module):
    """Fields that share one table, each after the rows of the fields before it, and a second table of weights."""

    def __init__(self, of_weights=(0, 5, 12)):
        super().__init__()
        self.table, self.weights = nn.Embedding(20, 4), nn.Embedding(20, 1)
        self.register_buffer("offsets", torch.tensor([0, 5, 12]))
        self.of_weights = of_weights

    def forward(self, ids, price):
        first = self.weights(ids + torch.tensor(self.of_weights)).sum(1)
        return torch.sigmoid(self.table(ids + self.offsets).prod(1).sum(1, keepdim=True) + first + price)


def test_constants_that_are_added_to_keys_are_added_to_those_of_requests_by_name(tmp_path, rng):
    module = Shared()

    imported = from_torch(module, (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 1)), tmp_path, "ctr")

    ids = np.stack([rng.integers(0, size, B) for size in (5, 7, 8)], axis=1)
    price = rng.normal(size=(B, 1)).astype(np.float32)
    answers = expected(module, torch.from_numpy(ids), torch.from_numpy(price))
    with load_model(imported.path) as session:
        request = {"price": price[:, 0]} | {f"ids[{field}]": ids[:, field] for field in range(3)}
        np.testing.assert_allclose(session.predict(request), answers, atol=1e-6)
        with pytest.raises(RequestError, match=r"ids\[1\] of sample 0: expected a key from 0 to \d+, got"):
            session.predict({**request, "ids[1]": [7] * B})
        shifted = np.tile(ids + module.offsets.numpy(), 2)
        np.testing.assert_allclose(session.predict(price, shifted), answers, atol=1e-6)


class SharedBags(nn.Module):
    """Two features of any number of keys, in one table one after the other."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, ids, ids_at, tags, tags_at):
        return torch.sigmoid((self.table(ids, ids_at) * self.table(tags + 12, tags_at)).sum(1))


def test_constants_are_added_to_lists_of_keys_too(tmp_path, rng):
    module = SharedBags()
    example = *with_offsets([[1, 2], [3]]), *with_offsets([[4, 5], [6, 7]])

    imported = from_torch(module, example, tmp_path, "ctr")

    ids, tags = draw_bags(rng, 12, B), draw_bags(rng, 8, B)
    with load_model(imported.path) as session:
        answers = session.predict({"ids": ids, "tags": tags})
    np.testing.assert_allclose(answers[:, 0], expected(module, *with_offsets(ids), *with_offsets(tags)), atol=1e-6)


def test_another_constant_for_another_table_is_refused(tmp_path):
    example = (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 1))
    reason = r"table: forward adds 4 to the keys of 'ids\[1\]' for one table, and 5 for 'table'"

    with pytest.raises(ConfigError, match=reason):
        from_torch(Shared((0, 4, 12)), example, tmp_path, "ctr")
