"""Rows of tables, for tests."""

from training.embedding.inputs import read_feature
from training.embedding.lookups import LocalLookups


def make_rows(table, bags):
    """Give every key of ``Bags`` a row, as a training step does."""
    LocalLookups([table], [read_feature("keys", bags)], trains=[True])
