"""Train two towers, compute the vectors of all items with `hotrow predict`, and find a user's best items in an index.

Run: pip install 'hotrow[train,onnx]' usearch
     python examples/nearest_items.py [FOLDER]

The score of these towers is a dot product, in which lengths count. So an index for L2 distances or cosines finds other
items than the best, unless all item vectors have the same length. Normalise them in the model, or give each item vector
one more number that makes it as long as the longest, as this example does. An index for dot products (`metric="ip"`)
needs no such number. But a graph such as usearch's or HNSW finds few of the best items by dot products.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from usearch.index import Index

import hotrow

USERS, ITEMS, TASTES, DIM, SHOWN = 500, 2_000, 20, 16, 10


class Towers(nn.Module):
    """A vector of a user and one of an item. Their dot product says how well they fit."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.of_user, self.of_item = nn.Linear(DIM, DIM), nn.Linear(DIM + 1, DIM)

    def forward(self, user, item, price):
        """Answer for B pairs of a user and an item."""
        user_vector = self.of_user(self.users(user))
        item_vector = self.of_item(torch.cat([self.items(item), price[:, None]], dim=1))
        return {"score": (user_vector * item_vector).sum(dim=1), "user_vector": user_vector, "item_vector": item_vector}


parser = argparse.ArgumentParser(description="Train two towers, and find a user's best items in an index.")
parser.add_argument("folder", type=Path, nargs="?", default="nearest_items", help="default: %(default)s")
folder = parser.parse_args().folder
folder.mkdir(exist_ok=True)

# Users like items of their own taste, and cheap items.
rng, _ = np.random.default_rng(0), torch.manual_seed(0)
prices = rng.random(ITEMS).astype(np.float32)
module = Towers()
optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
for _ in range(300):
    user, item = rng.integers(0, USERS, 4096), rng.integers(0, ITEMS, 4096)
    item[::2] += user[::2] % TASTES - item[::2] % TASTES  # half of the samples are of the user's taste
    likes = rng.random(4096) < np.where(user % TASTES == item % TASTES, 0.9, 0.05) * (1.1 - prices[item])
    answers = module(torch.from_numpy(user), torch.from_numpy(item), torch.from_numpy(prices[item]))
    loss = nn.functional.binary_cross_entropy_with_logits(answers["score"], torch.from_numpy(likes).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# The model for the server, with the score and both vectors.
example = {"user": torch.tensor([1]), "item": torch.tensor([2]), "price": torch.tensor([0.5])}
kinds = {"score": "score", "user_vector": "vector", "item_vector": "vector"}
model = hotrow.from_torch(module.eval(), example, folder, "towers", outputs=kinds).path
print(f"model written to {model}")

# The vectors of all items. The items have no user.
pq.write_table(pa.table({"item": np.arange(ITEMS), "price": prices}), folder / "items.parquet")
options = ["--keep", "item", "--outputs", "item_vector", "--without", "user"]
files = ["--data", str(folder / "items.parquet"), "--output", str(folder / "vectors.parquet")]
subprocess.run([sys.executable, "-m", "hotrow", "predict", str(model), *files, *options], check=True)

# The index. Every vector gets the same length.
vectors = pq.read_table(folder / "vectors.parquet")
keys = vectors["item"].to_numpy()
items = vectors["item_vector"].combine_chunks().flatten().to_numpy().reshape(len(keys), -1)
squares = np.square(items).sum(axis=1)
index = Index(ndim=DIM + 1, metric="cos", dtype="f32")
index.add(keys, np.column_stack([items, np.sqrt(squares.max() - squares)]))
index.save(str(folder / "items.usearch"))

# The best items of a user, whose vector needs no item.
with hotrow.load_model(model) as session:
    request = {"user": [17], "item": [0], "price": [0.0]}
    user_vector = session.predict(request, outputs=["user_vector"])["user_vector"][0]
    found = index.search(np.append(user_vector, np.float32(0)), SHOWN).keys
    scores = session.predict({"user": [17], "item": found, "price": prices[found]}, outputs=["score"])["score"][:, 0]
for item, score in zip(found.tolist(), scores.tolist(), strict=True):
    print(f"item {item}: score {score:.3f}" + ", of the user's taste" * (item % TASTES == 17))

best = set(np.argsort(-items @ user_vector)[:SHOWN].tolist())
nearest = set(np.argsort(np.square(items - user_vector).sum(axis=1))[:SHOWN].tolist())
print(f"the index found {len(best & set(found.tolist()))} of the {SHOWN} best items")
print(f"{len(best & nearest)} of them are among the {SHOWN} nearest by L2 distance")
