"""Train a small DCN on generated samples, open it, and predict raw Criteo rows: the whole way on one page.

Run: python examples/train_and_predict.py [REPOSITORY]
"""

import argparse
from pathlib import Path

import numpy as np

import serving
from training.criteo import encode_rows
from training.ctr_model import CtrModel
from training.document import open_document
from training.export import export_model
from training.synthetic import generate
from training.trainer import train

parser = argparse.ArgumentParser(description="Train a small DCN, write it, open it, and predict.")
parser.add_argument("repository", type=Path, nargs="?", default="model_repository", help="default: %(default)s")
repository = parser.parse_args().repository

# Samples from a known truth: the best AUC that any model can reach is known.
rows, held_out = 20_000, 2_000
data = generate(rows, seed=0)
tail = slice(rows - held_out, None)
print(f"best known AUC {data.best_known_auc(tail):.4f}")

# The graph is HugeCTR's JSON, with its optimizer.
dcn = open_document("dcn")
model = CtrModel(dcn.graph, seed=0, adam=dcn.adam)
options = {"epochs": 1, "batch_size": 256, "schedule": dcn.schedule, "seed": 0}
for epoch in train(model, data.samples[: rows - held_out], data.samples[tail], **options):
    print(f"loss {epoch.loss:.4f}")
    print(f"AUC {epoch.auc[0]:.4f}")
version = export_model(model, dcn.document, repository, "dcn")
print(f"model written to {version}")

# A client holds raw rows: 13 counts and 26 categories, missing ones empty.
raw_rows = [
    ["1", "3", *[""] * 11, *[f"{category:08x}" for category in range(26)]],
    ["", "-1", *["20"] * 11, *[""] * 26],
]
dense, keys = encode_rows(raw_rows)
with serving.load_model(version) as session:
    row_ptrs = np.arange(keys.size + 1, dtype=np.int32)  # every bag holds one key
    for probability in session.predict(dense, keys.reshape(-1), row_ptrs)[:, 0]:
        print(f"click probability {probability:.4f}")
