"""The data loader of Persia's get-started document. docs/persia.md lists what was repaired."""

import numpy as np

from training.persia.ctx import init_backend
from training.persia.prelude import PyPersiaBatchData

source_data = "train.txt"
batch_size = 5
batch_data = []
backend = init_backend(init_output=True, wait_server_ready=True)

with open(source_data, encoding="utf-8") as file:
    for line in file:
        splitter = line.rstrip("\n").split("\t")
        target = np.int32(splitter[0])
        dense_sample = np.array([x or 0 for x in splitter[1:14]], dtype=np.float32)
        sparse_sample = np.array(list(map(lambda x: int(x or "0", 16), splitter[14:])), dtype=np.uint64)
        batch_data.append((dense_sample, sparse_sample, target))
        if len(batch_data) == batch_size:
            persia_batch_data = PyPersiaBatchData()
            batch_dense_data, batch_all_sparse_data, batch_target_data = zip(*batch_data, strict=True)

            batch_dense_data = np.stack(batch_dense_data)
            persia_batch_data.add_dense_f32(batch_dense_data)

            batch_sparse_category_data = []
            for idx, batch_sparse_data in enumerate(np.stack(batch_all_sparse_data, axis=1)):
                category_name = f"sparse_feature{idx}"
                sparse_array = []
                for i in range(batch_size):
                    sparse_array.append(batch_sparse_data[i : i + 1])
                batch_sparse_category_data.append((category_name, sparse_array))
            persia_batch_data.add_sparse(batch_sparse_category_data)

            batch_target_data = np.array(batch_target_data, dtype=np.float32)
            batch_target_data = np.stack([batch_target_data[i : i + 1] for i in range(batch_size)])
            persia_batch_data.add_target(batch_target_data)

            backend.send_data(persia_batch_data)
            batch_data = []
