"""The names of the tables of a repository's versions."""

import hashlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory


def with_digests(text, repository):
    """Complete the names of tables in a text: ``tiny@1.user`` gets the digest of version 1 of the model."""

    def completed(found):
        manifest = Path(repository, found[1], found[2], "manifest.json").read_bytes()
        return f"{found[0]}-{hashlib.sha256(manifest).hexdigest()[:8]}"

    return re.sub(r"(\w+)@(\d+)(?=\\?\.)", completed, text)


def full_name(model, table, name="tiny", version=1):
    """The name of a table of a ``TinyModel``, whose files are always the same."""
    with TemporaryDirectory() as folder:
        model.write(folder, name, version)
        return with_digests(f"{name}@{version}.{table}", folder)
