"""Architectures of public model zoos, written small from their papers: FIELDS keys, two numbers and maybe a history."""

from itertools import combinations, pairwise

import torch
from torch import nn
from torch.nn import functional

FIELDS, ROWS, DIM, NUMBERS, LENGTH = 3, 11, 4, 2, 5
PAIRS = list(combinations(range(FIELDS), 2))
LEFT, RIGHT = ([pair[side] for pair in PAIRS] for side in (0, 1))


def mlp(*widths, last=None):
    """Linear layers with ReLU between them; ``last`` columns follow without ReLU."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, *([] if last is None else [nn.Linear(widths[-1], last)]))


def second_order(rows):
    """The factorization machine's sum of products of pairs, [B, D]."""
    return (rows.sum(1).square() - rows.square().sum(1)) / 2


class Ctr(nn.Module):
    """A row of each field, and a first-order weight of each key and number."""

    width = FIELDS * DIM + NUMBERS

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, self.row_width) for _ in range(FIELDS))
        self.weights = nn.ModuleList(nn.Embedding(ROWS, 1) for _ in range(FIELDS))
        self.linear = nn.Linear(NUMBERS, 1)
        self.build()

    row_width = DIM

    def rows(self, ids):
        return torch.stack([table(ids[:, field]) for field, table in enumerate(self.tables)], 1)

    def first_order(self, ids, numbers):
        return sum(table(ids[:, field]) for field, table in enumerate(self.weights)) + self.linear(numbers)

    def forward(self, ids, numbers):
        rows = self.rows(ids)
        flat = torch.cat([rows.flatten(1), numbers], 1)
        return torch.sigmoid(self.first_order(ids, numbers) + self.logits(rows, flat, numbers))[:, 0]


class FM(Ctr):
    def build(self): ...

    def logits(self, rows, flat, numbers):
        return second_order(rows).sum(1, keepdim=True)


class WDL(Ctr):
    def build(self):
        self.deep = mlp(self.width, 8, last=1)

    def logits(self, rows, flat, numbers):
        return self.deep(flat)


class DeepFM(WDL):
    def logits(self, rows, flat, numbers):
        return self.deep(flat) + second_order(rows).sum(1, keepdim=True)


class NFM(Ctr):
    def build(self):
        self.deep = mlp(DIM + NUMBERS, 8, last=1)

    def logits(self, rows, flat, numbers):
        return self.deep(torch.cat([second_order(rows), numbers], 1))


class AFM(Ctr):
    def build(self):
        self.attention, self.out = mlp(DIM, 6, last=1), nn.Linear(DIM, 1, bias=False)

    def logits(self, rows, flat, numbers):
        products = rows[:, LEFT] * rows[:, RIGHT]
        return self.out((self.attention(products).softmax(1) * products).sum(1))


class FwFM(Ctr):
    def build(self):
        self.strength = nn.Parameter(torch.randn(len(PAIRS)))

    def logits(self, rows, flat, numbers):
        return ((rows[:, LEFT] * rows[:, RIGHT]).sum(2) * self.strength).sum(1, keepdim=True)


class PNN(Ctr):
    def build(self):
        self.deep = mlp(self.width + len(PAIRS) + DIM * DIM, 8, last=1)

    def logits(self, rows, flat, numbers):
        inner = (rows[:, LEFT] * rows[:, RIGHT]).sum(2)
        total = rows.sum(1)
        return self.deep(torch.cat([flat, inner, (total[:, :, None] * total[:, None]).flatten(1)], 1))


class DCN(Ctr):
    def build(self):
        self.cross = nn.ModuleList(nn.Linear(self.width, 1) for _ in range(2))
        self.deep, self.out = mlp(self.width, 8), nn.Linear(self.width + 8, 1)

    def logits(self, rows, flat, numbers):
        x = flat
        for layer in self.cross:
            x = flat * layer(x) + x
        return self.out(torch.cat([x, self.deep(flat)], 1))


class DCNv2(Ctr):
    """With a mixture of experts of low rank."""

    def build(self):
        self.u, self.v = (nn.Parameter(torch.randn(2, self.width, 3) / 3) for _ in range(2))
        self.gate, self.out = nn.Linear(self.width, 2), nn.Linear(self.width, 1)

    def logits(self, rows, flat, numbers):
        x = flat
        for _ in range(2):
            experts = torch.einsum("bek,edk->bed", torch.einsum("bd,edk->bek", x, self.v).tanh(), self.u)
            x = (self.gate(x).softmax(1)[:, :, None] * experts * flat[:, None]).sum(1) + x
        return self.out(x)


class GDCN(Ctr):
    def build(self):
        self.cross, self.gates = (nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(2)) for _ in range(2))
        self.out = nn.Linear(self.width, 1)

    def logits(self, rows, flat, numbers):
        x = flat
        for cross, gate in zip(self.cross, self.gates, strict=True):
            x = flat * cross(x) * gate(x).sigmoid() + x
        return self.out(x)


class EDCN(Ctr):
    """A bridge joins cross and deep layers, and gates choose what each gets."""

    def build(self):
        self.cross, self.deep = (nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(2)) for _ in range(2))
        self.gates = nn.ParameterList(torch.randn(self.width) for _ in range(2))
        self.out = nn.Linear(3 * self.width, 1)

    def logits(self, rows, flat, numbers):
        x, y = (flat * gate.sigmoid() for gate in self.gates)
        for cross, deep in zip(self.cross, self.deep, strict=True):
            x, y = flat * cross(x) + x, deep(y).relu()
            bridge = x * y
            x, y = (bridge * gate.sigmoid() for gate in self.gates)
        return self.out(torch.cat([x, y, bridge], 1))


class XDeepFM(Ctr):
    def build(self):
        self.compressed = nn.ModuleList([nn.Conv1d(FIELDS * FIELDS, 4, 1), nn.Conv1d(4 * FIELDS, 4, 1)])
        self.out, self.deep = nn.Linear(8, 1), mlp(self.width, 8, last=1)

    def logits(self, rows, flat, numbers):
        x, found = rows, []
        for layer in self.compressed:
            x = layer((x[:, :, None] * rows[:, None]).flatten(1, 2)).relu()
            found.append(x.sum(2))
        return self.out(torch.cat(found, 1)) + self.deep(flat)


class AutoInt(Ctr):
    def build(self):
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.shortcut, self.out = nn.Linear(DIM, DIM), nn.Linear(FIELDS * DIM, 1)

    def logits(self, rows, flat, numbers):
        attended = self.attention(rows, rows, rows, need_weights=False)[0]
        return self.out((attended + self.shortcut(rows)).relu().flatten(1))


class FiBiNET(Ctr):
    def build(self):
        self.squeeze, self.bilinear = mlp(FIELDS, 2, FIELDS), nn.Linear(DIM, DIM, bias=False)
        self.deep = mlp(2 * len(PAIRS) * DIM + NUMBERS, 8, last=1)

    def logits(self, rows, flat, numbers):
        excited = rows * self.squeeze(rows.mean(2))[:, :, None]
        pairs = [self.bilinear(one[:, LEFT]) * one[:, RIGHT] for one in (rows, excited)]
        return self.deep(torch.cat([*(pair.flatten(1) for pair in pairs), numbers], 1))


class IFM(Ctr):
    """Weights of the fields that depend on the sample."""

    def build(self):
        self.factors = mlp(FIELDS * DIM, 8, last=FIELDS)

    def logits(self, rows, flat, numbers):
        factors = FIELDS * self.factors(rows.flatten(1)).softmax(1)
        return second_order(rows * factors[:, :, None]).sum(1, keepdim=True)


class DIFM(IFM):
    def build(self):
        super().build()
        self.attention, self.of_vectors = (
            nn.MultiheadAttention(DIM, 2, batch_first=True),
            nn.Linear(FIELDS * DIM, FIELDS),
        )

    def logits(self, rows, flat, numbers):
        attended = (self.attention(rows, rows, rows, need_weights=False)[0] + rows).relu()
        factors = self.factors(rows.flatten(1)) + self.of_vectors(attended.flatten(1))
        return second_order(rows * factors[:, :, None]).sum(1, keepdim=True)


class ONN(Ctr):
    """A vector of each key for each other field, as in FFM, and a deep network."""

    row_width = DIM * FIELDS

    def build(self):
        self.deep = mlp(len(PAIRS) * DIM + FIELDS * FIELDS * DIM, 8, last=1)

    def logits(self, rows, flat, numbers):
        of_fields = rows.unflatten(2, (FIELDS, DIM))
        products = [of_fields[:, i, j] * of_fields[:, j, i] for i, j in PAIRS]
        return self.deep(torch.cat([*products, rows.flatten(1)], 1))


class CCPM(Ctr):
    """Convolutions over the fields, and the largest values of each."""

    def build(self):
        self.convolution, self.out = nn.Conv2d(1, 2, (2, 1), padding=(1, 0)), nn.Linear(2 * 2 * DIM, 1)

    def logits(self, rows, flat, numbers):
        return self.out(self.convolution(rows[:, None]).topk(2, dim=2).values.tanh().flatten(1))


class FinalMLP(Ctr):
    """Two gated networks and a bilinear product of their heads."""

    def build(self):
        self.gates = nn.ModuleList(mlp(NUMBERS, 4, last=self.width) for _ in range(2))
        self.streams = nn.ModuleList(mlp(self.width, 6) for _ in range(2))
        self.linears, self.bilinear = nn.ModuleList(nn.Linear(6, 1) for _ in range(2)), nn.Bilinear(3, 3, 1)

    def logits(self, rows, flat, numbers):
        x, y = (one(flat * 2 * gate(numbers).sigmoid()) for one, gate in zip(self.streams, self.gates, strict=True))
        heads = sum(self.bilinear(x[:, 3 * at : 3 * at + 3], y[:, 3 * at : 3 * at + 3]) for at in range(2))
        return heads + self.linears[0](x) + self.linears[1](y)


class MaskNet(Ctr):
    def build(self):
        self.norm = nn.LayerNorm(DIM)
        self.masks = nn.ModuleList(mlp(FIELDS * DIM, 8, last=FIELDS * DIM) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FIELDS * DIM, 5), nn.LayerNorm(5), nn.ReLU()) for _ in range(2)
        )
        self.out = nn.Linear(10, 1)

    def logits(self, rows, flat, numbers):
        normed, plain = self.norm(rows).flatten(1), rows.flatten(1)
        pairs = zip(self.masks, self.blocks, strict=True)
        return self.out(torch.cat([block(mask(plain) * normed) for mask, block in pairs], 1))


class DLRM(Ctr):
    def build(self):
        self.bottom, self.top = mlp(NUMBERS, 8, DIM), mlp(DIM + (FIELDS + 1) * FIELDS // 2, 8, last=1)

    def logits(self, rows, flat, numbers):
        dense = self.bottom(numbers)
        vectors = torch.cat([dense[:, None], rows], 1)
        products = vectors @ vectors.mT
        below = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        return self.top(torch.cat([dense, products[:, below[0], below[1]]], 1))


class DSSM(Ctr):
    """Two towers: the last field is the item."""

    def build(self):
        self.user, self.item = mlp((FIELDS - 1) * DIM + NUMBERS, 8, last=4), mlp(DIM, 8, last=4)

    def logits(self, rows, flat, numbers):
        user = self.user(torch.cat([rows[:, :-1].flatten(1), numbers], 1))
        return 5 * functional.cosine_similarity(user, self.item(rows[:, -1]), dim=1)[:, None]


class Tasks(Ctr):
    """Two labels."""

    def forward(self, ids, numbers):
        flat = torch.cat([self.rows(ids).flatten(1), numbers], 1)
        return {name: one.sigmoid()[:, 0] for name, one in zip(("click", "buy"), self.tasks(flat), strict=True)}


class SharedBottom(Tasks):
    def build(self):
        self.bottom, self.towers = mlp(self.width, 8), nn.ModuleList(mlp(8, 4, last=1) for _ in range(2))

    def tasks(self, flat):
        return [tower(self.bottom(flat)) for tower in self.towers]


class ESMM(SharedBottom):
    def forward(self, ids, numbers):
        click, conversion = super().forward(ids, numbers).values()
        return {"click": click, "buy": click * conversion}


class MMoE(Tasks):
    def build(self):
        self.experts = nn.ModuleList(mlp(self.width, 6) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(self.width, 3) for _ in range(2))
        self.towers = nn.ModuleList(mlp(6, 4, last=1) for _ in range(2))

    def tasks(self, flat):
        experts = torch.stack([expert(flat) for expert in self.experts], 1)
        pairs = zip(self.gates, self.towers, strict=True)
        return [tower((gate(flat).softmax(1)[:, :, None] * experts).sum(1)) for gate, tower in pairs]


class PLE(Tasks):
    """Experts of each task next to shared experts."""

    def build(self):
        self.shared = mlp(self.width, 6)
        self.own, self.towers = (
            nn.ModuleList(mlp(width, 6, last=last) for _ in range(2)) for width, last in ((self.width, 6), (6, 1))
        )
        self.gates = nn.ModuleList(nn.Linear(self.width, 2) for _ in range(2))

    def tasks(self, flat):
        shared, found = self.shared(flat), []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            experts = torch.stack([own(flat), shared], 1)
            found.append(tower((gate(flat).softmax(1)[:, :, None] * experts).sum(1)))
        return found


class History(nn.Module):
    """A target item and the items seen before; 0 is padding."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.build()

    def forward(self, item, seen):
        return torch.sigmoid(self.logits(self.items(item), self.items(seen), seen != 0))[:, 0]


class DIN(History):
    def build(self):
        self.attention, self.deep = mlp(4 * DIM, 8, last=1), mlp(2 * DIM, 8, last=1)

    def weights(self, target, rows):
        target = target[:, None].expand_as(rows)
        return self.attention(torch.cat([target, rows, target - rows, target * rows], 2))[..., 0]

    def logits(self, target, rows, is_key):
        interest = ((self.weights(target, rows) * is_key)[:, None] @ rows)[:, 0]
        return self.deep(torch.cat([target, interest], 1))


class DIEN(DIN):
    """Interests evolve in a GRU whose update gate has the attention of each step."""

    def build(self):
        super().build()
        self.extractor, self.gates = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(2 * DIM, 2 * DIM)
        self.candidate = nn.Linear(2 * DIM, DIM)

    def logits(self, target, rows, is_key):
        states = self.extractor(rows)[0]
        weights = self.weights(target, states).masked_fill(~is_key, -1e9).softmax(1) * is_key
        state = torch.zeros_like(target)
        for step in range(LENGTH):
            update, reset = self.gates(torch.cat([states[:, step], state], 1)).sigmoid().chunk(2, 1)
            new = self.candidate(torch.cat([states[:, step], reset * state], 1)).tanh()
            update = update * weights[:, step, None]
            state = torch.where(is_key[:, step, None], (1 - update) * state + update * new, state)
        return self.deep(torch.cat([target, state], 1))


class BST(History):
    def build(self):
        self.positions = nn.Parameter(torch.randn(LENGTH + 1, DIM))
        self.block = nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True)
        self.deep = mlp((LENGTH + 1) * DIM, 8, last=1)

    def logits(self, target, rows, is_key):
        is_key = torch.cat([is_key, torch.ones_like(is_key[:, :1])], 1)
        rows = self.block(torch.cat([rows, target[:, None]], 1) + self.positions, src_key_padding_mask=~is_key)
        return self.deep((rows * is_key[..., None]).flatten(1))


class SASRec(History):
    def build(self):
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM))
        self.block = nn.TransformerEncoderLayer(DIM, 1, 8, batch_first=True, norm_first=True)

    def logits(self, target, rows, is_key):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        rows = self.block((rows + self.positions) * is_key[..., None], src_mask=causal)
        return (rows[:, -1] * target).sum(1, keepdim=True)


ZOO = {
    one.__name__: one
    for one in (
        *(
            DeepFM,
            MMoE,
            DIN,
            DLRM,
            FM,
            WDL,
            NFM,
            AFM,
            FwFM,
            PNN,
            DCN,
            DCNv2,
            GDCN,
            EDCN,
            XDeepFM,
            AutoInt,
            FiBiNET,
            IFM,
        ),
        *(DIFM, ONN, CCPM, FinalMLP, MaskNet, DSSM, SharedBottom, ESMM, PLE, DIEN, BST, SASRec),
    )
}
