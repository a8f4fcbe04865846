"""A small model with raw features of every type, for tests."""

import json

from serving.model.manifest import write_manifest
from tests.tools.tiny_model import TinyModel

FEATURES = {
    "format": 1,
    "features": [
        {"name": "user", "kind": "hash", "buckets": 900},
        {"name": "country", "kind": "vocabulary", "values": ["de", "fr", "日本"]},
        {"name": "tags", "kind": "hash", "buckets": 900, "list": {"most": 3, "keep": "first"}},
        {"name": "seen", "kind": "identity", "size": 900, "list": {}},
        {"name": "member", "kind": "hash", "type": "boolean", "buckets": 900},
        {"name": "both", "kind": "cross", "of": ["user", "country"], "buckets": 900},
        {"name": "price", "kind": "dense", "missing": 0, "log1p": True},
    ],
}
#: Values of each feature in three samples.
VALUES = {
    "user": ["u1", "", 17],
    "country": ["de", None, "xx"],
    "tags": [["a", "日本"], [], ["a", None]],
    "seen": [[1, 2], [3], []],
    "member": [True, None, False],
    "price": [0.1, None, 1e10],
}
#: The same as a log has them: null is a missing value, and numbers of strings are their text.
LOGGED = VALUES | {"user": ["u1", "", "17"], "price": [0.10000000149011612, None, 1e10]}


def write_raw_model(repository, name="raw", version=1, features=FEATURES, **options):
    """Write a version with raw features, and return its folder."""
    slots = [feature["name"] for feature in features["features"] if feature["kind"] != "dense"]
    dense = len(features["features"]) - len(slots)
    folder = TinyModel(tables=dict.fromkeys(slots, 1), dense_dim=dense, **options).write(repository, name, version)
    (folder / "features.json").write_text(json.dumps(features), encoding="utf-8")
    (folder / "manifest.json").unlink()
    write_manifest(folder, name, version)
    return folder
