"""``ps.json`` files and their entries of models."""

import json

import numpy as np

from serving.model.sparse_file import write_sparse_directory


def listed(config_file, name="dcn", **said):
    """Return the entry of a model that has a v3.0 inference JSON, with the keys ``said`` and absolute paths."""
    inference = json.loads(config_file.read_text())["inference"]
    tables = inference["sparse_model_file"]
    return {
        "model": name,
        "sparse_files": [str(config_file.parent / file) for file in ([tables] if isinstance(tables, str) else tables)],
        "dense_file": str(config_file.parent / inference["dense_model_file"]),
        "network_file": str(config_file),
        **said,
    }


def write_ps(folder, models=(), name="ps.json", **tiers):
    """Write a ps.json of these entries and tiers, and return the file."""
    file = folder / name
    file.write_text(json.dumps({"supportlonglong": True, "models": list(models), **tiers}))
    return file


# The rows of the two tables of ``write_lookup_model``, which have the same keys.
KEYS = np.array([3, 7, 2**40], dtype=np.int64)
WIDE = np.arange(6, dtype=np.float32).reshape(3, 2)
DEEP = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


def write_lookup_model(folder, change=None, **tiers):
    """Write the ps.json of HPS's documentation with small tables, and return the file.

    Args:
        folder: where to.
        change: keys of the model's entry; None removes a key.
        tiers: clauses of the ps.json.
    """
    for name, rows in (("wdl0_sparse_2000.model", WIDE), ("wdl1_sparse_2000.model", DEEP)):
        table = folder / "hps_wdl" / "1" / name
        table.parent.mkdir(parents=True, exist_ok=True)
        if not table.exists():
            write_sparse_directory(table, KEYS, rows)
    model = {
        "model": "hps_wdl",
        "sparse_files": ["hps_wdl/1/wdl0_sparse_2000.model", "hps_wdl/1/wdl1_sparse_2000.model"],
        "num_of_worker_buffer_in_pool": 3,
        "num_of_refresher_buffer_in_pool": 1,
        "embedding_table_names": ["embedding_table1", "embedding_table2"],
        "deployed_device_list": [0],
        "max_batch_size": 1024,
        "default_value_for_each_table": [0.0, 0.5],
        "maxnum_des_feature_per_sample": 13,
        "maxnum_catfeature_query_per_table_per_sample": [2, 26],
        "cache_refresh_percentage_per_iteration": 0.2,
        "embedding_vecsize_per_table": [2, 4],
        "slot_num": 28,
        "hit_rate_threshold": 0.9,
        "gpucacheper": 0.5,
        "gpucache": True,
        **(change or {}),
    }
    document = {
        "supportlonglong": True,
        "fuse_embedding_table": False,
        "volatile_db": {"type": "parallel_hash_map", "initial_cache_rate": 1.0, "overflow_margin": 10000000},
        "persistent_db": {"type": "disabled"},
        "models": [{key: value for key, value in model.items() if value is not None}],
        **tiers,
    }
    (folder / "hps.json").write_text(json.dumps(document))
    return folder / "hps.json"
