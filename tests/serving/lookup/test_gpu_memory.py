"""What `hotrow plan` and `hotrow check` say of GPU caches is what these take, to the byte."""

import re
from contextlib import ExitStack

import numpy as np
import pytest

from serving.cli.main import main
from serving.config import read_model, read_ps_config
from serving.lookup import open_lookups
from serving.lookup.cache_plan import (
    ERASED_AT_ONCE,
    SINGLE_KEYS,
    buffers_memory,
    caches_memory,
    first_max_keys,
    plan_caches,
)
from serving.parameter_server import ParameterServer
from serving.parameter_server.table_files import open_table_file
from serving.planner import plan_tables, table_sizes
from serving.storage import MemoryStore
from tests.serving.lookup.test_gpu_serving import ps_json


def taken(lookup, what):
    """Bytes that the caches count, over all tables."""
    return sum(reading.value for reading in lookup.readings() if reading.name == f"hotrow_gpu_cache_{what}")


@pytest.mark.parametrize(
    ("said", "row_dtype"),
    [
        ({}, "fp32"),
        ({"embedding_cache_key_bits": 32}, "fp16"),
        ({"embedding_cache_line_keys": 7}, "uint8"),
        ({"embedding_cache_type": "uvm"}, "uint8"),
        ({"embedding_cache_type": "static"}, "fp32"),
        ({"embedding_cache_type": "static", "fp8_quant": True, "embedding_cache_key_bits": 32}, "fp16"),
    ],
    ids=str,
)
def test_plan_check_and_caches_agree_to_the_byte(device, write_model, tmp_path, said, row_dtype):
    model = write_model(write_model.table(slots=3, dim=4), write_model.table(slots=2, dim=30), key_type="I32")
    tiers = {"volatile_db": {"type": "map", "row_dtype": row_dtype}}
    file = ps_json(model, tmp_path, tiers, gpucacheper=1.0, **said)
    (config,) = read_ps_config(file).models

    checked = caches_memory(plan_caches(config))
    sizes = table_sizes([config])
    plans = list(plan_tables([config], {}))
    with ParameterServer.from_config(file) as server:
        (lookup,) = open_lookups(server, config, [device])
        device_bytes, host_bytes = taken(lookup, "bytes"), taken(lookup, "host_bytes")
        lookup.close()

    assert (checked.device_bytes, checked.host_bytes) == (device_bytes, host_bytes)
    assert sum(size.gpu_bytes for size in sizes) == device_bytes
    assert sum(plan.gpu_bytes(plan.rows) for plan in plans) == device_bytes


@pytest.mark.parametrize("most_keys", [None, 400], ids=["one key per slot", "lists of keys"])
def test_worker_buffers_take_what_check_says_and_requests_nothing_more(device, write_model, monkeypatch, most_keys):
    model = write_model(write_model.table(slots=3, dim=4), write_model.table(slots=2, dim=30))
    config = read_model(model.config_file)
    tables = [table.model_copy(update={"max_keys_per_sample": most_keys}) for table in config.tables]
    config = config.model_copy(
        update={"tables": tuple(tables), "gpu_cache": config.gpu_cache.model_copy(update={"kind": "static"})}
    )
    keys_of = [next(open_table_file(config, table).key_batches(10)) for table in tables]
    single_keys = [np.resize(keys, SINGLE_KEYS) for keys in keys_of]
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        (lookup,) = open_lookups(server, config, [device])
        taken = {"device": 0, "host": 0}

        def counting(name, kind):
            take = getattr(device, name)

            def take_and_count(shape, dtype):
                array = take(shape, dtype)
                taken[kind] += array.nbytes
                return array

            monkeypatch.setattr(device, name, take_and_count)

        for name, kind in (("empty", "device"), ("zeros", "device"), ("pinned", "host")):
            counting(name, kind)
        with ExitStack() as lent:
            works = [lent.enter_context(lookup._workspaces.lend(first_max_keys(config))) for _ in range(2)]
            assert len({id(work) for work in works}) == 2
        lookup.lookup(single_keys)
        lookup.lookup([single_keys[0][:0], single_keys[1]])
        lookup.close()

    erased_bytes = 8 * ERASED_AT_ONCE * len(tables)
    probabilities_bytes = 4 * config.max_batchsize * config.label_dim  # taken where the network runs on the device
    checked = buffers_memory(config)
    # One of the two was made when the kernels were compiled.
    assert 2 * taken["device"] == checked.device_bytes - erased_bytes
    assert 2 * (taken["host"] + probabilities_bytes) == checked.host_bytes - erased_bytes


def test_plan_and_check_print_the_same_amount(write_model, tmp_path, capsys):
    model = write_model(write_model.table(rows=40_000, dim=30))
    file = ps_json(model, tmp_path, gpucacheper=1.0)

    assert main(["check", str(file)]) == 0
    checked = re.search(r"caches, if GPUs are used +([\d.]+ MiB)", capsys.readouterr().out)[1]
    assert main(["plan", str(file)]) == 0
    (planned,) = re.findall(r"dcn\.table0 .* MiB +([\d.]+ MiB) .* MiB", capsys.readouterr().out)

    assert checked == planned
