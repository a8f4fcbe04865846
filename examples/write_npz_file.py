"""Write generated samples as the arrays that a model reads, for ``hotrow train --data FILE``.

Run: python examples/write_npz_file.py MODEL FILE ROWS [SEED]
"""

import sys

import numpy as np

from training.model.document import open_document
from training.synthetic.generator import generate_for

model, path, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
seed = int(sys.argv[4]) if len(sys.argv) > 4 else 0

document = open_document(model)
graph = document.graph
samples = generate_for(graph, rows, seed).samples
arrays = {name: samples.labels[:, column] for column, name in enumerate(document.label_columns)}
if graph.dense_dim:
    arrays[graph.dense_top] = samples.dense
for entry, bags in zip(graph.sparse, samples.bags.split([entry.slots for entry in graph.sparse]), strict=True):
    if bags.sizes.max() > 1:  # any number of keys per slot
        arrays[f"{entry.top}.keys"], arrays[f"{entry.top}.row_ptrs"] = bags.keys, bags.row_ptrs
    else:  # one per slot, -1 where a slot is empty
        arrays[entry.top] = np.full(bags.sizes.shape, -1, np.int64)
        arrays[entry.top][bags.sizes == 1] = bags.keys
np.savez(path, **arrays)

for name, array in arrays.items():
    print(f"{name}: {array.dtype} {list(array.shape)}")
print(f"{rows:,} samples written to {path}: hotrow train --model {model} --data {path} --output models")
