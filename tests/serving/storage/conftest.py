import pytest

from serving.storage import MemoryStore, RocksDbStore


@pytest.fixture(params=["memory", "rocksdb"])
def store(request, tmp_path):
    """Every kind of store, empty."""
    store = MemoryStore() if request.param == "memory" else RocksDbStore(tmp_path / "db", num_threads=1)
    yield store
    store.close()
