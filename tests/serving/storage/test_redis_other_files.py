"""A process goes by the files that its network belongs to; another one loads other files into the Redis they share."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import TableSpec
from serving.storage.store import replaced
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, loaded_store, open_store

OF_THE_SAME_FILES = pytest.mark.parametrize(
    "digest", ["digest", "digest+changed", replaced("digest")], ids=["loaded", "changed", "replaced"]
)
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


@OF_THE_SAME_FILES
def test_rows_that_changed_since_are_of_the_same_files(redis_server, options, digest):
    store, other = loaded_store(redis_server, **options), open_store(redis_server, **options)

    other.bulk_load(SPEC, iter([(KEYS, ROWS)]), digest)
    fetch(store)
    other.mark_changed(SPEC.name)

    fetch(store)
    assert not store.fetch(SPEC.name, np.array([10**6]), np.empty((1, 4), np.float32)).any()


def test_rows_of_another_form_are_of_another_load(redis_server):
    store = loaded_store(redis_server)
    spec = TableSpec(SPEC.name, 4, row_dtype="fp16")

    open_store(redis_server, row_dtype="fp16").bulk_load(spec, iter([(KEYS, ROWS)]), "digest")

    with pytest.raises(StoreError, match="from other files, digest:fp16; this one goes by digest"):
        fetch(store)


CHANGES = {
    "insert": lambda store: store.insert(SPEC.name, KEYS, ROWS + 1),
    "evict": lambda store: store.evict(SPEC.name, KEYS),
    "mark_changed": lambda store: store.mark_changed(SPEC.name),
}


@pytest.mark.parametrize("verb", CHANGES)
def test_who_goes_by_the_old_files_changes_no_rows_of_the_new(redis_server, options, verb):
    old, new = loaded_store(redis_server, **options), open_store(redis_server, **options)
    new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")

    with pytest.raises(StoreError, match=r"its rows come from retrained .*, those to be changed belong to digest"):
        CHANGES[verb](old)

    fetch(new)
    assert new.loaded_from(SPEC.name) == "retrained"


@pytest.mark.parametrize(("mine", "others"), [("fp16", "bf16"), ("fp32", "fp16"), ("fp16", "fp32"), ("int8", "uint8")])
@pytest.mark.parametrize("verb", CHANGES)
def test_who_keeps_rows_in_another_form_changes_none(redis_server, options, verb, mine, others):
    old, new = (open_store(redis_server, row_dtype=one, **options) for one in (mine, others))
    for store, row_dtype in ((old, mine), (new, others)):
        store.bulk_load(TableSpec(SPEC.name, 4, row_dtype=row_dtype), iter([(KEYS[:100], ROWS[:100])]), "digest")

    with pytest.raises(StoreError, match=r"its rows come from digest.*, those to be changed belong to digest"):
        CHANGES[verb](old)

    rows = np.empty((100, 4), dtype=np.float32)
    assert new.fetch(SPEC.name, KEYS[:100], rows).all()
    np.testing.assert_allclose(rows, ROWS[:100], atol=0.5)  # int8 and uint8 round by half a step at most
    assert new.loaded_from(SPEC.name) == "digest"


@pytest.mark.parametrize("verb", ["insert", "evict", "refill"])
def test_while_plain_strings_are_replaced_by_other_files_nobody_changes_them(redis_server, verb):
    old, new = loaded_store(redis_server, layout="strings"), open_store(redis_server, layout="strings")
    refill = {"refill": lambda store: store.refill(SPEC.name, iter([(KEYS, ROWS + 1)]), "digest")}

    def batches():
        yield KEYS, ROWS
        with pytest.raises(StoreError, match="retrained"):
            (CHANGES | refill)[verb](old)
        with pytest.raises(StoreError, match="being replaced"):
            fetch(old)

    new.bulk_load(SPEC, batches(), "retrained")

    fetch(new)
    assert new.count(SPEC.name) == KEYS.size
    assert new.loaded_from(SPEC.name) == "retrained"


def test_plain_strings_that_are_brought_back_do_not_replace_those_that_another_process_loads_meanwhile(
    redis_server, client
):
    old, new = loaded_store(redis_server, layout="strings"), open_store(redis_server, layout="strings")
    client.flushall()

    def batches():
        yield KEYS[:500], ROWS[:500] + 1
        new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")
        yield KEYS[500:], ROWS[500:] + 1

    with pytest.raises(StoreError, match=r"its rows come from retrained .* belong to digest"):
        old.refill(SPEC.name, batches(), "digest")

    fetch(new)
    assert new.loaded_from(SPEC.name) == "retrained"


def test_a_load_of_plain_strings_that_failed_has_no_record_and_is_made_up_for(redis_server):
    store, other = loaded_store(redis_server, layout="strings"), open_store(redis_server, layout="strings")

    def batches():
        yield KEYS[:500], ROWS[:500]
        raise StoreError("rocksdb", SPEC.name, "no answer")

    with pytest.raises(StoreError, match="no answer"):
        other.bulk_load(SPEC, batches(), "retrained")

    assert store.loaded_from(SPEC.name) is None
    store.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")
    fetch(store)
    CHANGES["insert"](store)


@pytest.mark.parametrize("verb", CHANGES)
def test_in_a_cluster_nobody_changes_rows_of_other_files_either(redis_cluster, options, verb):
    old, new = (loaded_store(redis_cluster.nodes[0], **options), open_store(redis_cluster.nodes[0], **options))
    CHANGES[verb](old)
    new.bulk_load(SPEC, iter([(KEYS, ROWS)]), "retrained")

    with pytest.raises(StoreError, match=r"its rows come from retrained .*, those to be changed belong to digest"):
        CHANGES[verb](old)

    fetch(new)
    assert new.count(SPEC.name) == KEYS.size


@OF_THE_SAME_FILES
@pytest.mark.parametrize("row_dtype", ["fp32", "fp16"])
def test_rows_of_the_same_files_are_changed_by_all(redis_server, options, row_dtype, digest):
    spec = TableSpec(SPEC.name, 4, row_dtype=row_dtype)
    store, other = (open_store(redis_server, row_dtype=row_dtype, **options) for _ in range(2))
    store.bulk_load(spec, iter([(KEYS, ROWS)]), "digest")
    other.bulk_load(spec, iter([(KEYS, ROWS)]), digest)

    for verb in ("mark_changed", "insert", "evict"):
        CHANGES[verb](store)

    assert store.count(SPEC.name) == 0


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
