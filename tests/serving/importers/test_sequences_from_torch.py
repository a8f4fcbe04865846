"""`from_torch` of modules that read sequences row by row: the served version answers as the module in float64."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import ConfigError, RequestError
from serving.importers import from_torch
from serving.opening import load_model
from tests.serving.importers import torchrec_stand_in as torchrec
from tests.serving.importers.torch_modules import Head

L, ITEMS, CATEGORIES, B = 4, 30, 9, 24
pytestmark = pytest.mark.usefixtures("exporter")


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


def histories(rng, rows, samples=B, most=L):
    """Draw a list of keys for each sample, never the padding 0; the first is full, and the second empty."""
    lengths = [most, 0, *rng.integers(0, most + 1, samples - 2)]
    return [rng.integers(1, rows, count).tolist() for count in lengths]


def with_holes(bags, rng):
    """Put the padding 0 in the place of some keys."""
    return [[key * int(rng.integers(0, 3) > 0) for key in bag] for bag in bags]


def padded(bags, most=L, at_start=False):
    rows = [[0] * (most - len(bag)) + bag if at_start else bag + [0] * (most - len(bag)) for bag in bags]
    return torch.tensor(rows)


def in_float64(module, *arguments):
    module = copy.deepcopy(module).double().eval()
    arguments = [argument.double() if argument.is_floating_point() else argument for argument in arguments]
    torch.backends.mha.set_fastpath_enabled(False)  # it warns of nested tensors
    with torch.no_grad():
        answer = module(*arguments).numpy()
    torch.backends.mha.set_fastpath_enabled(True)
    assert np.ptp(answer) > 0.01
    return answer


def served(path, request):
    with load_model(path) as session:
        return session.predict(request)


class Din(nn.Module):
    """Deep Interest Network: the rows of a history, weighted by what the target makes of each."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, 6, padding_idx=0)
        self.categories = nn.Embedding(CATEGORIES, 2)
        nn.init.normal_(self.items.weight)  # the row of the padding too
        self.attention = nn.Sequential(nn.Linear(4 * 8, 8), nn.Sigmoid(), nn.Linear(8, 1))
        self.head = Head(2 * 8 + 1)

    def forward(self, price, item, category, seen_items, seen_categories):
        target = torch.cat([self.items(item), self.categories(category)], -1)[:, None].expand(-1, L, -1)
        rows = torch.cat([self.items(seen_items), self.categories(seen_categories)], -1)
        weights = self.attention(torch.cat([target, rows, target - rows, target * rows], -1))[..., 0]
        weights = weights.masked_fill(seen_items == 0, 0.0)
        interest = (weights[:, None] @ rows)[:, 0]
        return torch.sigmoid(self.head(price, target[:, 0], interest)[:, 0])


def test_a_mask_of_padded_keys_is_made_from_the_number_of_keys(tmp_path):
    rng, module = np.random.default_rng(0), Din()
    example = (
        torch.zeros(2, 1),
        torch.tensor([1, 2]),
        torch.tensor([1, 2]),
        *[torch.tensor([[1, 2, 3, 0], [1, 0, 0, 0]])] * 2,
    )

    imported = from_torch(module, example, tmp_path, "din", sequences={"seen_items": 0, "seen_categories": 0})

    assert imported.slots == (
        *(("items", "item"), ("items", "seen_items")),
        *(("categories", "category"), ("categories", "seen_categories")),
    )
    assert imported.comparison.difference < 1e-6
    items, categories = histories(rng, ITEMS), histories(np.random.default_rng(0), CATEGORIES)
    items, categories = with_holes(items, np.random.default_rng(1)), with_holes(categories, np.random.default_rng(1))
    price = rng.normal(size=(B, 1)).astype(np.float32)
    item, category = rng.integers(0, ITEMS, B), rng.integers(0, CATEGORIES, B)
    expected = in_float64(
        module, torch.from_numpy(price), torch.tensor(item), torch.tensor(category), padded(items), padded(categories)
    )
    request = {
        "price": price[:, 0],
        "item": item,
        "category": category,
        "seen_items": items,
        "seen_categories": categories,
    }
    np.testing.assert_allclose(served(imported.path, request)[:, 0], expected, atol=1e-6)
    with load_model(imported.path) as session:
        one_user = {**request, "seen_items": [items[0]], "seen_categories": [categories[0]]}
        repeated = {**request, "seen_items": [items[0]] * B, "seen_categories": [categories[0]] * B}
        assert session.predict(one_user).tobytes() == session.predict(repeated).tobytes()
        with pytest.raises(RequestError, match="seen_items of sample 1: has 5 values, but at most 4 are allowed"):
            session.predict({**request, "seen_items": [[], [1] * (L + 1), *items[2:]]})


class SasRec(nn.Module):
    """Self-attentive sequential recommendation: padding first, positions, and a causal mask."""

    def __init__(self):
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, 8, padding_idx=0)
        self.pos_emb = nn.Embedding(L, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.forward_layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, log_seqs, item):
        rows = self.item_emb(log_seqs) * 8**0.5 + self.pos_emb.weight[:L]
        is_padding = log_seqs == 0
        rows = rows * ~is_padding.unsqueeze(-1)
        causal = ~torch.tril(torch.ones((L, L), dtype=torch.bool))
        rows = rows + self.attention(self.norms[0](rows), rows, rows, attn_mask=causal, need_weights=False)[0]
        rows = self.norms[1](rows)
        rows = (rows + self.forward_layer(rows)) * ~is_padding.unsqueeze(-1)
        return torch.sigmoid((self.norms[2](rows)[:, -1] * self.item_emb(item)).sum(-1))


def test_padding_may_come_first(tmp_path):
    rng, module = np.random.default_rng(1), SasRec()
    example = (torch.tensor([[0, 0, 1, 2], [0, 0, 0, 3]]), torch.tensor([1, 2]))

    imported = from_torch(module, example, tmp_path, "sasrec", sequences={"log_seqs": 0})

    item = rng.integers(1, ITEMS, B)
    for bags in (histories(rng, ITEMS), with_holes(histories(rng, ITEMS), rng), [[0, 0, 3, 0]] * (B - 1) + [[1]]):
        expected = in_float64(module, padded(bags, at_start=True), torch.tensor(item))
        np.testing.assert_allclose(served(imported.path, {"log_seqs": bags, "item": item})[:, 0], expected, atol=1e-6)


class Transformer(nn.Module):
    """PyTorch's encoder with a padding mask and lengths that are inputs of their own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = Head(8)

    def forward(self, ids, is_padding, length):
        is_padding = torch.cat([torch.zeros_like(is_padding[:, :1]), is_padding[:, 1:]], 1)  # none is all padding
        rows = self.encoder(self.table(ids), src_key_padding_mask=is_padding)
        mean = (rows * ~is_padding[..., None]).sum(1) / length.clamp(min=1)
        return torch.sigmoid(self.head(mean)[:, 0])


def test_masks_and_lengths_may_be_inputs(tmp_path):
    rng, module = np.random.default_rng(2), Transformer()
    ids = torch.tensor([[1, 2, 3, 0], [1, 0, 0, 0]])
    example = (ids, ids == 0, torch.tensor([[3], [1]]))
    was_fast = torch.backends.mha.get_fastpath_enabled()

    imported = from_torch(module, example, tmp_path, "encoder", sequences={"ids": 0})

    assert torch.backends.mha.get_fastpath_enabled() == was_fast
    assert imported.slots == (("table", "ids"),)
    bags = histories(rng, ITEMS)
    lengths = torch.tensor([[len(bag)] for bag in bags])
    expected = in_float64(module, padded(bags), padded(bags) == 0, lengths)
    np.testing.assert_allclose(served(imported.path, {"ids": bags})[:, 0], expected, atol=2e-6)


class Jagged(nn.Module):
    """TorchRec's collection without pooling, next to one that pools."""

    def __init__(self, pad=lambda rows: rows.to_padded_dense(L)):
        super().__init__()
        one = torchrec.EmbeddingConfig(ITEMS, 6, "t_items", ["item", "seen"])
        self.rows = torchrec.EmbeddingCollection([one])
        self.pooled = torchrec.EmbeddingBagCollection(
            [torchrec.EmbeddingBagConfig(ITEMS, 6, "t_tags", ["tags", "seen"])]
        )
        self.pad = pad

    def forward(self, features):
        rows = self.rows(features)
        item, seen = rows["item"].to_padded_dense(1)[:, 0], self.pad(rows["seen"])
        is_key = torch.arange(L) < rows["seen"].lengths()[:, None]
        scores = (seen @ item[..., None])[..., 0].masked_fill(~is_key, -1e9)
        interest = (scores.softmax(-1)[..., None] * seen).sum(1)
        count = is_key.sum(1, dtype=seen.dtype)
        return torch.sigmoid((item * interest).sum(1) + self.pooled(features).values().sum(1) - count)


def keyed_jagged(**bags):
    flat = [bag for of_feature in bags.values() for bag in of_feature]
    values = torch.tensor([key for bag in flat for key in bag], dtype=torch.int64)
    return torchrec.KeyedJaggedTensor(keys=list(bags), values=values, lengths=torch.tensor([len(bag) for bag in flat]))


def test_a_collection_without_pooling_is_served(tmp_path):
    rng, module = np.random.default_rng(3), Jagged()
    example = (keyed_jagged(item=[[1], [2]], seen=[[1, 2], []], tags=[[1], []]),)

    imported = from_torch(module, example, tmp_path, "jagged")

    assert imported.slots == (
        *(("t_items", "features['item']"), ("t_items", "features['seen']")),
        *(("t_tags", "features['tags']"), ("t_tags", "features['seen']")),
    )
    item, seen, tags = [[int(key)] for key in rng.integers(0, ITEMS, B)], histories(rng, ITEMS), histories(rng, ITEMS)
    module64 = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        expected = module64(keyed_jagged(item=item, seen=seen, tags=tags)).numpy()
    answers = served(imported.path, {"item": item, "seen": seen, "tags": tags})
    np.testing.assert_allclose(answers[:, 0], expected, atol=1e-6)


IDS = torch.tensor([[1, 2, 3, 0], [1, 0, 0, 0]])


class Attention(nn.Module):
    """Each test of a refusal changes one part."""

    def __init__(self, look_up=lambda table, ids: table(ids), table=None):
        super().__init__()
        self.table = table or nn.Embedding(ITEMS, 4)
        self.look_up = look_up

    def forward(self, ids, mask=None):
        rows = self.look_up(self.table, ids)
        return torch.sigmoid((rows * (ids != 0)[:, : rows.shape[1], None]).sum((1, 2)))


class Bag(nn.Module):
    """Pools the rows."""

    def __init__(self, **more):
        super().__init__()
        self.table = nn.EmbeddingBag(ITEMS, 4, mode="sum", **more)

    def forward(self, ids):
        return torch.sigmoid(self.table(ids).sum(1))


class MaskedBag(Bag):
    def forward(self, ids):
        return super().forward(ids) * (ids != 0).any(1)


class WithTarget(Attention):
    """Its mask leaves the target out, too, if it is the key 0."""

    def forward(self, ids, item):
        ids = torch.cat([ids, item[:, None]], 1)
        return torch.sigmoid((self.table(ids).sum(2) * (ids != 0)).sum(1))


class ButTarget(Attention):
    """Its mask leaves the target out wherever it is."""

    def forward(self, ids, item):
        is_other = (ids != 0) & (ids != item[:, None])
        return torch.sigmoid((self.table(ids).sum(2) * is_other).sum(1) + self.table(item).sum(1))


class Special(Attention):
    """Its mask leaves some keys out."""

    def __init__(self, is_special):
        super().__init__()
        self.is_special = is_special

    def forward(self, ids):
        is_left = (ids != 0) & ~self.is_special(ids)
        return torch.sigmoid((self.table(ids).sum(2) * is_left).sum(1))


class Largest(nn.Module):
    """The maximum of rows; the key 7 is padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(ITEMS, 4, mode="max", padding_idx=7)

    def forward(self, ids):
        return torch.sigmoid(self.table(ids).sum(1))


class Infinite(Attention):
    """Its mask leaves no score of an empty sequence."""

    def forward(self, ids):
        rows = self.table(ids)
        weights = rows.sum(2).masked_fill(ids == 0, -torch.inf).softmax(1)
        return torch.sigmoid((weights[..., None] * rows).sum((1, 2)))


class Both(Attention):
    """Reads two sequences of one table."""

    def forward(self, ids, others):
        return torch.sigmoid((self.table(ids).sum(2) * self.table(others).sum(2)).sum(1))


REFUSED = {
    "no number for an empty sequence": (
        (Infinite(), (IDS,), {"ids": 0}),
        "Infinite: the answer to an empty sequence is not a number; mask .* -inf, and divide by lengths of at least 1",
    ),
    "a pooled padding": (
        (Bag(), (IDS,), {"ids": 0}),
        r"table: the padding of 'ids' is pooled too; use padding_idx, .*line \d+: .*self.table\(ids\)",
    ),
    "a mask of a bag": (
        (MaskedBag(padding_idx=0), (IDS,), {"ids": 0}),
        r"with other keys and the same rows, .*; in .*line \d+: .*ids != 0",
    ),
    "a mask of a target": (
        (WithTarget(), (IDS, torch.tensor([1, 2])), {"ids": 0}),
        "an input that is not a sequence changes the answer if its key is a padding key; expected masks .*line",
    ),
    "a mask that compares inputs": (
        (ButTarget(), (IDS, torch.tensor([1, 2])), {"ids": 0}),
        r"if two inputs have the same key, forward gives another answer with the same rows; .*line \d+: is_other",
    ),
    "a mask of a constant": (
        (Special(lambda ids: ids == 13), (IDS,), {"ids": 0}),
        r"with keys such as 13 and the same rows, forward gives another answer; .* masks .*line \d+: is_left",
    ),
    "a mask of a range": (
        (Special(lambda ids: (ids > 12) & (ids < 14)), (IDS,), {"ids": 0}),
        "with keys such as 13 and the same rows",
    ),
    "a mask of constants": (
        (Special(lambda ids: torch.isin(ids, torch.tensor([13, 14]))), (IDS,), {"ids": 0}),
        "with keys such as 13, 14 and the same rows",
    ),
    "a mask of the last key": (
        (Special(lambda ids: ids == ITEMS - 1), (IDS,), {"ids": 0}),
        f"with keys such as {ITEMS - 1} and the same rows",
    ),
    "a maximum without sequences": (
        (Largest(), (IDS,), {}),
        r"table: the network pools, and a key may be padding_idx=7; use sequences={'ids': 7}; in .*, line \d+: return",
    ),
    "without sequences": (
        (Attention(), (IDS,), {}),
        r"if 'ids' is padded with 0, use sequences={'ids': 0}; in test_sequences_from_torch.py, line \d+: return",
    ),
    "another name": ((Attention(), (IDS,), {"id": 0}), "sequences: forward has no input 'id'; did you mean 'ids'?"),
    "names alone": ((Attention(), (IDS,), ["ids"]), r"sequences: expected {name: padding key}, got \['ids'\]"),
    "no key": ((Attention(), (IDS,), {"ids": None}), "sequences: expected the padding key of 'ids', got None"),
    "a vector": (
        (Attention(), (IDS[..., None],), {"ids": 0}),
        r"ids: expected a sequence, int64 or int32 \[B, L\], got \[2, 4, 1\]",
    ),
    "no short sample": (
        (Attention(), (torch.ones(2, 4, dtype=torch.int64),), {"ids": 0}),
        "ids: expected a sample with 1 to 3 keys in the example, which shows where the padding 0 is",
    ),
    "padding inside": (
        (Attention(), (torch.tensor([[1, 0, 2]]),), {"ids": 0}),
        "ids: expected the padding 0 at the end of each sample of the example, or at the start of each",
    ),
    "padding at both sides": (
        (Both(), (IDS, IDS.flip(1)), {"ids": 0, "others": 0}),
        "table: expected the padding of all sequences of one table at the end, or of all at the start",
    ),
    "a part": (
        (Attention(lambda table, ids: table(ids[:, :2])), (IDS,), {"ids": 0}),
        r"table: expected the rows of all 4 positions of 'ids', in order; .* in test_sequences_from_torch.py, line \d+",
    ),
    "a mask without a sequence": (
        (Attention(), (IDS, IDS == 0), {}),
        r"mask: expected .* got bool \[2, 4\]; for the mask of a sequence, name its input of padded keys, sequences={",
    ),
    "the mask of something else": (
        (Attention(), (IDS, IDS == 3), {"ids": 0}),
        r"mask: expected .* got bool \[2, 4\]",
    ),
    "computed keys": (
        (Attention(lambda table, ids: table(ids % 20)), (IDS,), {"ids": 0}),
        r"table: forward computes keys of this table, .* in test_sequences_from_torch.py, line \d+: .*ids % 20",
    ),
    "a batch's longest": (
        (Jagged(lambda rows: rows.to_padded_dense()), (keyed_jagged(item=[[1]], seen=[[1]], tags=[[1]]),), {}),
        r"t_items: is padded to the longest in a batch; expected to_padded_dense\(desired_length\).*line \d+: ",
    ),
    "values": (
        (Jagged(lambda rows: rows.values()), (keyed_jagged(item=[[1]], seen=[[1]], tags=[[1]]),), {}),
        r"t_items: forward reads .values of rows; expected to_padded_dense.* line \d+: .*rows.values\(\)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_line_and_the_way_round(tmp_path, arguments, message):
    module, example, sequences = arguments

    with pytest.raises(ConfigError) as refused:
        from_torch(module, example, tmp_path, "ctr", sequences=sequences)

    assert re.search(message, str(refused.value)), refused.value
    assert list(tmp_path.iterdir()) == []


def test_a_bag_leaves_the_padding_of_a_sequence_out(tmp_path):
    module = Bag(padding_idx=0)

    imported = from_torch(module, (IDS,), tmp_path, "ctr", sequences={"ids": 0})

    bags = [[1, 2, 3], [4], [0, 5, 0, 6]]
    np.testing.assert_allclose(served(imported.path, {"ids": bags})[:, 0], in_float64(module, padded(bags)), atol=1e-6)


class Pooled(nn.Module):
    """A maximum of rows, and sums with weights that come with the request and with learned weights."""

    def __init__(self):
        super().__init__()
        self.largest = nn.EmbeddingBag(ITEMS, 4, mode="max", padding_idx=0)
        self.weighted = nn.EmbeddingBag(ITEMS, 4, mode="sum", padding_idx=0)
        self.importance = nn.Embedding(ITEMS, 1)

    def forward(self, ids, pair, pair_weights):
        learned = self.weighted(ids, per_sample_weights=self.importance(ids)[..., 0])
        given = self.weighted(pair, per_sample_weights=pair_weights)
        return torch.sigmoid((self.largest(ids) + learned * given).sum(1))


def test_the_network_takes_maxima_and_sums_with_weights(tmp_path):
    rng, module = np.random.default_rng(4), Pooled()
    pairs = torch.tensor([[1, 2], [3, 0]])

    imported = from_torch(module, (IDS, pairs, torch.ones(2, 2)), tmp_path, "ctr", sequences={"ids": 0, "pair": 0})

    bags, pair = (with_holes(histories(rng, ITEMS, most=most), rng) for most in (L, 2))
    weights = rng.normal(size=(B, 2)).astype(np.float32)
    expected = in_float64(module, padded(bags), padded(pair, 2), torch.from_numpy(weights))
    request = {"ids": bags, "pair": pair, "pair_weights[0]": weights[:, 0], "pair_weights[1]": weights[:, 1]}
    np.testing.assert_allclose(served(imported.path, request)[:, 0], expected, atol=1e-6)


class SharedTowers(nn.Module):
    """A user with a history, and an item, which share a table; each item has three tags."""

    def __init__(self):
        super().__init__()
        self.items, self.users = nn.Embedding(ITEMS, 3, padding_idx=0), nn.Embedding(9, 3)
        self.tags, self.layer = nn.Embedding(CATEGORIES, 2), nn.Linear(9, 3)

    def forward(self, user, seen, item, tags):
        of_user = self.users(user) + self.items(seen).sum(1)
        of_item = self.layer(torch.cat([self.items(item), self.tags(tags).flatten(1)], dim=1))
        return {"score": (of_user * of_item).sum(1), "of_user": of_user, "of_item": of_item}


def test_a_slot_of_an_embedding_needs_a_key_if_an_output_reads_it(tmp_path):
    user, item = {"user": [3], "seen": [[4, 5]]}, {"item": [7], "tags[0]": [1], "tags[1]": [2], "tags[2]": [3]}
    module = SharedTowers()
    given = torch.tensor([3]), torch.tensor([[4, 5, 0]]), torch.tensor([7]), torch.tensor([[1, 2, 3]])
    kinds = {"score": "score", "of_user": "vector", "of_item": "vector"}

    version = from_torch(module, given, tmp_path, "towers", outputs=kinds, sequences={"seen": 0}).path

    expected = module(*given)
    with load_model(version) as session:
        for request, outputs in ((user, ["of_user"]), (item, ["of_item"]), ({**user, **item}, list(kinds))):
            for name, answer in session.predict(request, outputs=outputs).items():
                np.testing.assert_allclose(answer.reshape(-1), expected[name].detach().reshape(-1), atol=1e-6)
        short = {**item, "tags[2]": [None]}
        for request, outputs, name in (
            (user, None, "item"),
            ({"seen": [[4]]}, ["of_user"], "user"),
            (short, ["of_item"], "tags[2]"),
        ):
            message = f"sample 0 has no key in '{name}', but the network needs exactly one; a missing value has no key"
            with pytest.raises(RequestError, match=re.escape(message)):
                session.predict(request, outputs=outputs)


class Clamped(nn.Module):
    """The padding is -1, at which forward looks up the row 0."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, 4)

    def forward(self, user):
        ids, age = user["ids"], user["age"]
        return torch.sigmoid((self.table(ids.clamp(min=0)).sum(2) * ((ids >= 0) + 0.5)).sum(1) + age)


def test_the_padding_may_be_no_key_of_the_table(tmp_path):
    rng, module = np.random.default_rng(5), Clamped()
    example = {"ids": torch.tensor([[1, 2, -1, -1], [3, -1, -1, -1]]), "age": torch.zeros(2)}

    imported = from_torch(module, (example,), tmp_path, "clamped", sequences={"ids": -1})

    assert imported.names == ("age", "ids")
    bags, age = [[key - 1 for key in bag] for bag in with_holes(histories(rng, ITEMS), rng)], rng.normal(size=B)
    matrix = torch.tensor([bag + [-1] * (L - len(bag)) for bag in bags])
    with torch.no_grad():
        expected = copy.deepcopy(module).double()({"ids": matrix, "age": torch.from_numpy(age)}).numpy()
    np.testing.assert_allclose(served(imported.path, {"ids": bags, "age": age})[:, 0], expected, atol=1e-6)
