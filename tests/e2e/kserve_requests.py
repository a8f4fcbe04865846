"""Requests of KServe v2 for the tiny model, for clients of any protocol."""

import numpy as np

DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL", "object": "BYTES"}


def request_of(model, samples, seed=3):
    """The arrays of a request by tensor name, and the expected answer."""
    dense, bags = model.sample_requests(samples, seed=seed)
    slots = [bag for sample in bags for bag in sample]
    row_ptrs = np.concatenate(([0], np.cumsum([len(bag) for bag in slots])))
    keys = np.array([key for bag in slots for key in bag], dtype=np.int64)
    arrays = {"DES": dense.astype(np.float32), "CATCOLUMN": keys[None], "ROWINDEX": row_ptrs[None].astype(np.int32)}
    return arrays, model.probabilities(dense, bags)


def inputs_of(arrays, client):
    """Tensors of ``tritonclient.http`` or ``tritonclient.grpc``."""
    tensors = []
    for name, array in arrays.items():
        tensors.append(client.InferInput(name, array.shape, DATATYPES[array.dtype.name]))
        tensors[-1].set_data_from_numpy(array)
    return tensors
