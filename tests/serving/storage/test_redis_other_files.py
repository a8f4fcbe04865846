"""A process goes by the files that its network belongs to; another one loads other files into the Redis they share."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage.store import replaced
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, loaded_store, open_store

OTHER = r"from other files, retrained; this one goes by digest: load the model again .* name of its own"


@pytest.fixture(params=["hash", "strings"])
def options(request):
    return {"layout": request.param} if request.param == "strings" else {}


def test_rows_of_other_files_are_an_outage_to_who_goes_by_the_old_ones(redis_server, options):
    old, opened, new = (loaded_store(redis_server, **options), *(open_store(redis_server, **options) for _ in range(2)))
    opened.open_table(SPEC, 0)

    new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")

    fetch(new)
    for store in (old, opened):
        for keys in (KEYS, KEYS[:1], np.array([10**6])):
            with pytest.raises(StoreError, match=OTHER):
                fetch(store, keys)
    opened.open_table(SPEC, 0)  # as a server does that loads its model again
    fetch(opened)


def test_after_the_way_back_the_old_files_are_served_again(redis_server, options):
    old, new = loaded_store(redis_server, **options), open_store(redis_server, **options)
    new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")

    open_store(redis_server, **options).bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")

    fetch(old)
    with pytest.raises(StoreError, match="from other files, digest; this one goes by retrained"):
        fetch(new)


@pytest.mark.parametrize("digest", ["digest", "digest+changed", replaced("digest")])
def test_rows_that_changed_since_are_of_the_same_files(redis_server, options, digest):
    store, other = loaded_store(redis_server, **options), open_store(redis_server, **options)

    other.bulk_load(SPEC, iter([(KEYS, ROWS)]), digest)
    fetch(store)
    other.mark_changed(SPEC.name)

    fetch(store)
    assert not store.fetch(SPEC.name, np.array([10**6]), np.empty((1, 4), np.float32)).any()


def test_rows_of_another_form_are_of_another_load(redis_server):
    store = loaded_store(redis_server)
    spec = type(SPEC)(SPEC.name, 4, row_dtype="fp16")

    open_store(redis_server, row_dtype="fp16").bulk_load(spec, iter([(KEYS, ROWS)]), "digest")

    with pytest.raises(StoreError, match="from other files, digest:fp16; this one goes by digest"):
        fetch(store)


def test_who_goes_by_the_old_files_inserts_no_rows_among_the_new(redis_server):
    old, new = loaded_store(redis_server), open_store(redis_server)
    new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")

    with pytest.raises(StoreError, match=r"its rows come from retrained .*, those to be inserted belong to digest"):
        old.insert(SPEC.name, KEYS, ROWS + 1)

    fetch(new)


def test_a_partition_is_an_outage_from_the_instant_in_which_it_changes(redis_server, client):
    store, other = loaded_store(redis_server), open_store(redis_server)

    def batches():
        yield KEYS, ROWS
        fetch(store)  # the old rows are there until the new ones are

    other.bulk_load(SPEC, batches(), "retrained")

    with pytest.raises(StoreError, match=OTHER):
        fetch(store)


def test_a_table_without_records_is_read_whoever_writes_it(redis_server):
    store, other = open_store(redis_server), open_store(redis_server)
    for one in (store, other):
        one.open_table(SPEC, 0)
    other.insert(SPEC.name, KEYS, ROWS)

    fetch(store)
