"""``ps.json`` files and their entries of models."""

import json


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
