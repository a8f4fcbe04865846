"""Train a small DCN on generated samples, open it, and predict from raw Criteo rows.

Run: python examples/train_and_predict.py [REPOSITORY]
"""

import argparse
from pathlib import Path

import numpy as np

import hotrow
from training.data.criteo import encode_rows
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_model
from training.model.trainer import train
from training.synthetic.criteo_like import generate

parser = argparse.ArgumentParser(description="Train a small DCN, write it, open it, and predict.")
parser.add_argument("repository", type=Path, nargs="?", default="model_repository", help="default: %(default)s")
repository = parser.parse_args().repository

# The best AUC that any model can reach on these samples is known.
rows, held_out = 20_000, 2_000
data = generate(rows, seed=0)
tail = slice(rows - held_out, None)
print(f"best known AUC {data.best_known_auc(tail):.4f}")

# The model's graph and optimizer are in HugeCTR's JSON.
dcn = open_document("dcn")
model = CtrModel(dcn.graph, seed=0, rule=dcn.rule, tables=dcn.tables)
options = {"epochs": 1, "batch_size": 256, "schedule": dcn.schedule, "seed": 0}
for epoch in train(model, data.samples[: rows - held_out], data.samples[tail], **options):
    print(f"loss {epoch.loss:.4f}")
    print(f"AUC {epoch.figures[0]['auc']:.4f}")
version = export_model(model, dcn.document, repository, "dcn")
print(f"model written to {version}")

# A client has raw rows of text: 13 counts and 26 categories. An empty string means missing.
# Every column of the generated samples has the categories 00000000 and 9e3779b1, so the model has rows for them.
raw_rows = [
    ["1", "3", *[""] * 11, *["00000000"] * 26],
    ["", "-1", *["20"] * 11, *["9e3779b1"] * 13, *[""] * 13],
]
dense, keys = encode_rows(raw_rows)
row_ptrs = np.arange(keys.size + 1, dtype=np.int32)  # every slot has one key
with hotrow.load_model(version) as session:
    answer = session.predict_batch(hotrow.read_batch(session.config, dense, keys.reshape(-1), row_ptrs))
for probability in answer.values[:, 0]:
    print(f"click probability {probability:.4f}")
# Keys that the model does not have are answered with default vectors. More than a few mean wrong keys.
print(f"defaulted_keys {answer.defaulted_keys} of {keys.size}")
