"""Versions of a model: which are served, and how they change while requests are answered."""

import asyncio
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from kernels.errors import HotrowError
from serving.cli.main import main
from serving.config import VersionPolicy, policy_from, read_model_directory
from serving.errors import (
    ConfigError,
    LoadEndedError,
    ModelFileError,
    RequestError,
    StoreFullError,
    UnknownModelError,
    VersionConflictError,
    WorkerError,
)
from serving.frontend.front_end import FrontEnd
from serving.model.records import Output
from serving.model.sparse_model import SparseModel
from serving.model.triton_config import TritonTensors, triton_config
from serving.opening import Runtime
from serving.parameter_server import ParameterServer
from serving.parameter_server.health import Readiness
from serving.repository import ModelRepository
from serving.repository.served_model import DRAIN_TIMEOUT_S
from serving.storage import RocksDbStore
from tests.serving.ordinary_rights import ordinary_rights
from tests.serving.ps_files import listed, write_ps
from tests.tools.tiny_model import TinyModel, flatten

DEADLINE_S = 60
FIRST, SECOND = TinyModel(seed=1), TinyModel(seed=2)
ROCKSDB = {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1}}


@pytest.fixture
def folder(tmp_path):
    """A repository with version 1 of a model."""
    FIRST.write(tmp_path / "models", "tiny", 1)
    return tmp_path / "models"


@pytest.fixture
def opened():
    """Load repositories in the mode ``explicit``; all are closed when the test ends."""
    repositories = []

    def load(path, control="explicit", startup=("*",), progress=None, **options):
        repositories.append(ModelRepository(path, Runtime("numpy"), control=control, startup=startup, **options))
        repositories[-1].load(progress)
        return repositories[-1]

    yield load
    for repository in repositories:
        repository.close()


@pytest.fixture
def held_loads(monkeypatch):
    """Loads of rows set the first event, and wait for the second."""
    is_loading, may_go_on = threading.Event(), threading.Event()
    batches = SparseModel.batches

    def held(self, *arguments):
        is_loading.set()
        may_go_on.wait(DEADLINE_S)
        return batches(self, *arguments)

    monkeypatch.setattr(SparseModel, "batches", held)
    return is_loading, may_go_on


def add_endless_file(version):
    """Add a file to a version that takes minutes to hash, and takes no space on the disk."""
    size_bytes = 64 << 30
    (version / "endless").touch()
    os.truncate(version / "endless", size_bytes)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["files"]["endless"] = {"size_bytes": size_bytes, "sha256": "0" * 64}
    (version / "manifest.json").write_text(json.dumps(manifest))


def add_endless_rows(version):
    """The same for a version without a manifest, whose largest files are those of its tables."""
    (version / "manifest.json").unlink()
    for column, row_bytes in (("key", 8), ("emb_vector", 4 * FIRST.dim)):
        os.truncate(version / "item" / column, row_bytes << 32)


def load_and_end(repository, end):
    """Load a model whose files take long to hash, and end the load meanwhile; raise the load's error."""
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(repository.load_model, "tiny")
        deadline_s = time.monotonic() + DEADLINE_S
        while not load.done() and time.monotonic() < deadline_s:
            if ("tiny", "1", "LOADING") in states(repository):
                end(repository)
            time.sleep(0.01)
        load.result(0)


def wait_until_stopped(thread):
    """Wait until a thread waits for a lock: two looks find it at the same place."""
    places = [None]
    while len(places) < 3 or places[-1] != places[-2]:
        time.sleep(0.1)
        frame = sys._current_frames()[thread.ident]
        places.append((frame.f_code, frame.f_lasti))


def raise_full(_):
    raise StoreFullError("memory", "", "no room")


def write_policy(folder, policy, name="tiny"):
    (folder / name / "config.pbtxt").write_text(f'backend: "python"\nversion_policy: {policy}\n')


def versions_that_answer(repository, name="tiny"):
    """The versions that are served, each checked by what it answers."""
    models = {1: FIRST, 2: SECOND, 3: TinyModel(seed=3)}
    versions = repository.versions(name)
    for version in versions:
        assert_answers(repository.session(name, str(version)), models[version])
    assert repository.session(name).config.version == versions[0]
    return versions


def assert_answers(session, model):
    dense, bags = model.sample_requests(5, seed=0)
    np.testing.assert_allclose(session.predict(dense, *flatten(bags)), model.probabilities(dense, bags), atol=2e-6)


def tables_of(folder, version, name="tiny"):
    """The names of a version's tables in the tiers."""
    digest = hashlib.sha256((folder / name / str(version) / "manifest.json").read_bytes()).hexdigest()
    return [f"{name}@{version}-{digest[:8]}.{table}" for table in ("item", "user")]


def states(repository):
    return [(one.name, one.version, one.state) for one in repository.index()]


class TestPolicy:
    @pytest.fixture(autouse=True)
    def _three_versions(self, folder):
        SECOND.write(folder, "tiny", 2)
        TinyModel(seed=3).write(folder, "tiny", 3)

    @pytest.mark.parametrize(
        ("policy", "versions"),
        [
            ("{ latest { num_versions: 1 } }", (3,)),
            ("{ latest { num_versions: 2 } }", (3, 2)),
            ("{ all { } }", (3, 2, 1)),
            ("{ specific { versions: [1, 3] } }", (3, 1)),
            ("{ specific { versions: 2 } }", (2,)),
        ],
    )
    def test_the_versions_of_config_pbtxt_are_served(self, folder, opened, policy, versions):
        write_policy(folder, policy)

        assert versions_that_answer(opened(folder, control="none")) == versions

    def test_the_policy_of_a_load_replaces_the_policy_of_config_pbtxt(self, folder, opened):
        repository = opened(folder)
        assert versions_that_answer(repository) == (3,)

        repository.load_model("tiny", VersionPolicy.model_validate({"specific": {"versions": [2, 1]}}))
        assert versions_that_answer(repository) == (2, 1)

        repository.load_model("tiny")
        assert versions_that_answer(repository) == (3,)

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [
            (
                "{ specific { versions: 7 } }",
                "version_policy.specific: version 7 is not there; the versions are 3, 2, 1",
            ),
            ("{ specific { } }", "version_policy.specific.versions: Field required"),
            ("{ newest { } }", 'line 2: .*has no field named "newest"'),
            ("{ }", "version_policy: expected one of latest, all and specific"),
            ("{ latest { num_versions: 0 } }", "version_policy.latest.num_versions: .*greater than or equal to 1"),
            ("{ latest { } }", "version_policy.latest.num_versions: .*greater than or equal to 1"),
            ("{ latest { num_versions: 1 num_versions: 2 } }", 'line 2: .*should not have multiple "num_versions"'),
            ("{ all { } } version_policy { all { } }", 'line 2: .*should not have multiple "version_policy"'),
            ("{ all { } latest { } }", 'line 2: .*"latest" is specified along with field "all"'),
            ("all", 'line 2: .*Expected "{"'),
            ("{ all: 1 }", 'line 2: .*Expected "{"'),
            ('{ latest { num_versions: "2" } }', "line 2: .*"),
            ("{ all { }", 'line 2: Expected "}"'),
            ("{ all { } } max_batchsize: 4", 'line 2: .*has no field named "max_batchsize"'),
            ('{ all { } } name: "tinny"', "name: expected 'tiny', the folder's name, got 'tinny'"),
        ],
    )
    def test_a_policy_that_cannot_be_followed_is_refused_with_its_place(self, folder, opened, policy, reason):
        write_policy(folder, policy)

        with pytest.raises(ConfigError, match=f"config.pbtxt: {reason}"):
            opened(folder, control="none")

    def test_a_misspelt_policy_is_refused(self, folder, opened):
        (folder / "tiny" / "config.pbtxt").write_text('backend: "python"\nversion_polcy: { all { } }\n')

        with pytest.raises(ConfigError, match=r'line 2: .*has no field named "version_polcy"'):
            opened(folder, control="none")

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [
            ({"latest": {}, "all": {}}, "version_policy: expected one of latest, all and specific"),
            ({"latest": {"num_versions": 0}}, "version_policy.latest.num_versions: .*greater than or equal to 1"),
            ({"specific": {"versions": []}}, "version_policy.specific.versions: .*at least 1 item"),
            ("latest", "version_policy: .*valid dictionary"),
            ({"latst": {}}, r"version_policy.latst: unknown key; did you mean 'latest'\?"),
            ({"latest": {"num_version": 1}}, r"version_policy.latest.num_version: unknown key; did you mean 'num_vers"),
        ],
    )
    def test_a_policy_in_json_is_checked_too(self, policy, reason):
        with pytest.raises(ConfigError, match=f"load: {reason}"):
            policy_from({"version_policy": policy}, "load")


class TestKeysThatOnlyTritonReads:
    def test_they_are_logged_once(self, folder, opened, caplog):
        write_policy(folder, '{ all { } } parameters { key: "engine" value: { string_value: "onnx" } }')
        repository = opened(folder)
        repository.load_model("tiny")
        lines = "model tiny: config.pbtxt: only Triton reads parameters"
        assert caplog.messages == [lines]

        write_policy(folder, "{ all { } } optimization { } dynamic_batching { preferred_batch_size: 4 }")
        repository.load_model("tiny")

        assert caplog.messages == [lines, "model tiny: config.pbtxt: only Triton reads dynamic_batching"]

    def test_an_exported_configuration_has_none(self, folder, opened, caplog):
        tensors = TritonTensors(3, (Output("OUTPUT0"),))
        (folder / "tiny" / "config.pbtxt").write_text(triton_config("tiny", tensors, "GPU"))

        opened(folder)

        assert not caplog.messages

    def test_the_policy_of_one_models_folder_is_one(self, folder, opened, caplog):
        SECOND.write(folder, "tiny", 2)
        write_policy(folder, "{ specific { versions: 1 } }")

        assert versions_that_answer(opened(folder / "tiny", control="none")) == (2,)

        expected = f"{folder / 'tiny'}: its version_policy has no effect: serve its repository instead"
        assert caplog.messages == [expected]


class TestExplicitMode:
    def test_only_the_named_models_are_loaded_at_the_start(self, folder, opened):
        SECOND.write(folder, "other")
        SECOND.write(folder, "broken")
        (folder / "broken" / "1" / "graph.json").write_text("{")

        repository = opened(folder, startup=["other"])

        assert list(repository.models()) == ["other"]
        assert states(repository) == [("broken", "", ""), ("other", "1", "READY"), ("tiny", "", "")]
        repository.load_model("tiny")
        assert versions_that_answer(repository) == (1,)

    @pytest.mark.parametrize(
        ("startup", "error", "reason"),
        [
            (["tinny"], ConfigError, "no model 'tinny' to load; did you mean 'tiny'"),
            (["broken"], ConfigError, "graph.json"),
            (["*"], ConfigError, "graph.json"),
        ],
    )
    def test_a_model_that_cannot_be_loaded_fails_the_start_if_it_is_named(self, folder, opened, startup, error, reason):
        SECOND.write(folder, "broken")
        (folder / "broken" / "1" / "graph.json").write_text("{")
        (folder / "broken" / "1" / "manifest.json").unlink()

        with pytest.raises(error, match=reason):
            opened(folder, startup=startup)

    def test_an_unloaded_model_is_gone_until_it_is_loaded_again(self, folder, opened):
        repository = opened(folder)

        repository.unload_model("tiny")

        assert states(repository) == [("tiny", "1", "UNAVAILABLE")]
        assert repository.index()[0].reason == "unloaded"
        with pytest.raises(UnknownModelError, match="no model 'tiny' is served; there is none"):
            repository.session("tiny")
        with pytest.raises(UnknownModelError, match="no model 'tiny' is served"):
            repository.unload_model("tiny")
        repository.load_model("tiny")
        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [("tiny", "1", "READY")]

    def test_a_model_that_is_not_in_the_repository_is_refused(self, folder, opened):
        with pytest.raises(UnknownModelError, match="no model 'tinny' is in the repository; did you mean 'tiny'"):
            opened(folder).load_model("tinny")

    def test_an_unload_succeeds_although_another_load_was_ended_after_the_load_that_it_ended(self, folder, opened):
        repository = opened(folder, startup=())
        SECOND.write(folder, "other")
        for name in ("tiny", "other"):
            add_endless_file(folder / name / "1")

        async def load_and_unload(control):
            load = asyncio.ensure_future(control.load("tiny", {}))
            while ("tiny", "1", "LOADING") not in states(repository):
                await asyncio.sleep(0.01)
            others = [asyncio.ensure_future(control.load("other", {})) for _ in range(10)]
            await asyncio.sleep(0)
            unload = asyncio.ensure_future(control.unload("tiny", {}))  # the other loads have all other threads
            with pytest.raises(LoadEndedError):
                await load
            ends = []
            while not all(one.done() for one in [unload, *others]):
                ends.append(asyncio.ensure_future(control.unload("other", {})))
                await asyncio.sleep(0.05)
            await unload
            await asyncio.gather(*ends, return_exceptions=True)  # some come after the last load
            return [type(other.exception()) for other in others]

        with closing(FrontEnd(repository)) as front:
            errors = asyncio.run(asyncio.wait_for(load_and_unload(front.control), DEADLINE_S))

        assert errors == [LoadEndedError] * 10

    def test_an_unload_through_another_worker_does_not_wait_for_the_loads_that_it_ends(self, folder, opened):
        is_ended = threading.Event()

        class Leader:
            leads, number = False, 1

            def lead(self, act, _model, _parameters):
                if act == "unload":
                    is_ended.set()
                elif not is_ended.wait(DEADLINE_S):
                    raise WorkerError(0, "the load was not ended")

        async def load_and_unload(control):
            loads = [asyncio.ensure_future(control.load("tiny", {})) for _ in range(10)]
            await asyncio.sleep(0)
            await control.unload("tiny", {})
            await asyncio.gather(*loads)

        with closing(FrontEnd(opened(folder), siblings=Leader())) as front:
            asyncio.run(load_and_unload(front.control))

    def test_only_loads_after_the_start_give_way_to_requests(self, folder, opened, monkeypatch):
        lowered = []
        monkeypatch.setattr(os, "setpriority", lambda *_: lowered.append(threading.current_thread()))
        repository = opened(folder, startup=["*"])
        assert not lowered

        SECOND.write(folder, "tiny", 2)
        repository.load_model("tiny")

        assert lowered
        assert threading.current_thread() not in lowered

    @pytest.mark.parametrize("make_endless", [add_endless_file, add_endless_rows])
    @pytest.mark.parametrize(
        ("end", "reason"),
        [
            (lambda repository: repository.unload_model("tiny"), "ended by an unload"),
            (ModelRepository.close, "the server is stopping"),
        ],
        ids=["by an unload", "by a stop"],
    )
    def test_a_load_can_be_ended_while_large_files_are_hashed(self, folder, opened, make_endless, end, reason):
        repository = opened(folder, startup=())
        make_endless(folder / "tiny" / "1")

        with pytest.raises(LoadEndedError, match=reason):
            load_and_end(repository, end)

    def test_a_load_that_was_ended_may_be_repeated(self, folder, opened):
        repository = opened(folder, startup=())
        add_endless_file(folder / "tiny" / "1")
        with pytest.raises(LoadEndedError):
            load_and_end(repository, lambda repository: repository.unload_model("tiny"))

        (folder / "tiny" / "1" / "endless").unlink()
        replace(folder, FIRST)
        repository.load_model("tiny")

        assert versions_that_answer(repository) == (1,)

    def test_an_unload_ends_a_load_that_waits_for_another_load(self, folder, opened, held_loads):
        repository = opened(folder, startup=())
        is_loading, may_go_on = held_loads
        errors = []

        def load():
            with pytest.raises(LoadEndedError, match="the load was ended by an unload") as caught:
                repository.load_model("tiny")
            errors.append(caught.type)

        first, second, unload = (
            threading.Thread(target=work) for work in (load, load, lambda: repository.unload_model("tiny"))
        )
        first.start()
        try:
            assert is_loading.wait(DEADLINE_S)
            for thread in (second, unload):
                thread.start()
                wait_until_stopped(thread)
        finally:
            may_go_on.set()
        for thread in (first, second, unload):
            thread.join(DEADLINE_S)

        assert errors == [LoadEndedError] * 2
        assert not repository.models()
        repository.load_model("tiny")
        assert versions_that_answer(repository) == (1,)

    def test_a_model_whose_folder_is_removed_leaves_the_index_at_the_next_load(self, folder, opened):
        SECOND.write(folder, "other")
        repository = opened(folder)
        repository.unload_model("other")
        shutil.rmtree(folder / "other")

        repository.load_model("tiny")

        assert states(repository) == [("tiny", "1", "READY")]

    def test_a_faulty_request_to_unload_does_not_end_a_load(self, folder, opened, held_loads):
        repository = opened(folder, startup=())
        is_loading, may_go_on = held_loads
        with closing(FrontEnd(repository)) as front, ThreadPoolExecutor(1) as pool:
            load = pool.submit(repository.load_model, "tiny")
            assert is_loading.wait(DEADLINE_S)
            try:
                with pytest.raises(RequestError, match="unknown"):
                    asyncio.run(front.control.unload("tiny", {"unknown": True}))
            finally:
                may_go_on.set()
            load.result(DEADLINE_S)

        assert versions_that_answer(repository) == (1,)

    @pytest.mark.parametrize("control", ["none", "poll"])
    def test_other_modes_refuse_to_load_and_unload(self, folder, opened, control):
        repository = opened(folder, control=control)

        for act in (repository.load_model, repository.unload_model):
            with pytest.raises(RequestError, match=f"--model-control-mode {control}, not explicit"):
                act("tiny")

    @pytest.mark.parametrize("control", ["explicit", "poll"])
    def test_a_path_that_is_no_folder_of_models_is_refused(self, folder, opened, control):
        with pytest.raises(ConfigError, match=f"control mode '{control}' needs a folder of models"):
            opened(folder / "tiny", control=control)


class TestSwap:
    def test_the_new_version_answers_and_the_old_version_leaves_every_tier(self, folder, opened, tmp_path):
        write_ps(folder, **ROCKSDB)
        repository = opened(folder)
        old = repository.session("tiny")
        SECOND.write(folder, "tiny", 2)

        repository.load_model("tiny")

        assert versions_that_answer(repository) == (2,)
        with pytest.raises(UnknownModelError):
            old.predict([0.0] * 3, [], [0] * 4)
        repository.close()
        database = RocksDbStore(folder / "rows", num_threads=1)
        assert sorted(database.kept_tables()) == tables_of(folder, 2)
        database.close()

    def test_rows_that_were_written_into_a_version_stay_with_it(self, folder, opened):
        write_ps(folder, **ROCKSDB)
        write_policy(folder, "{ all { } }")
        repository = opened(folder)
        server = repository.session("tiny").embedding_cache.server
        server.insert("tiny@1.user", np.array([1]), np.full((1, 4), 7, np.float32))
        SECOND.write(folder, "tiny", 2)

        repository.load_model("tiny")

        assert (server.lookup("tiny@1.user", np.array([1]))[0] == 7).all()
        assert_answers(repository.session("tiny"), SECOND)
        repository.unload_model("tiny")
        repository.load_model("tiny")
        server = repository.session("tiny").embedding_cache.server
        assert (server.lookup("tiny@1.user", np.array([1]))[0] == 7).all()

    @pytest.mark.parametrize("damage", ["graph", "weights", "rows"])
    def test_a_broken_version_leaves_the_old_version_serving(self, folder, opened, damage):
        write_ps(folder, **ROCKSDB)
        repository = opened(folder)
        broken = SECOND.write(folder, "tiny", 2)
        (broken / "manifest.json").unlink()
        if damage == "graph":
            (broken / "graph.json").write_text("{}")
        elif damage == "weights":
            (broken / "dense.model").write_bytes(b"1234")
        else:
            (broken / "item" / "emb_vector").write_bytes(b"1234")

        with pytest.raises((ConfigError, ModelFileError)):
            repository.load_model("tiny")

        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [("tiny", "1", "READY"), ("tiny", "2", "UNAVAILABLE")]
        assert repository.index()[1].reason
        shutil.rmtree(broken)
        SECOND.write(folder, "tiny", 2)
        repository.load_model("tiny")
        assert versions_that_answer(repository) == (2,)
        assert states(repository) == [("tiny", "2", "READY")]

    def test_a_version_for_which_there_is_no_room_leaves_the_old_version_serving(self, folder, opened):
        write_ps(folder, volatile_db={"type": "hash_map", "capacity_rows": 2 * FIRST.rows})
        repository = opened(folder)
        TinyModel(seed=2, rows=FIRST.rows + 1).write(folder, "tiny", 2)

        with pytest.raises(StoreFullError, match="there is room for"):
            repository.load_model("tiny")

        assert versions_that_answer(repository) == (1,)

    def test_the_new_version_gets_the_room_of_the_old_version_in_ram(self, folder, opened):
        write_ps(folder, **{**ROCKSDB, "volatile_db": {"type": "hash_map", "capacity_rows": 2 * FIRST.rows}})
        repository = opened(folder)
        SECOND.write(folder, "tiny", 2)

        repository.load_model("tiny")

        memory = repository.session("tiny").embedding_cache.server.stores[0]
        assert [memory.tables[table].count() for table in tables_of(folder, 2)] == [FIRST.rows] * 2

    def test_a_request_in_flight_is_answered_by_the_version_that_began_it(self, folder, opened):
        repository = opened(folder)
        SECOND.write(folder, "tiny", 2)
        with ThreadPoolExecutor(1) as pool:
            with repository.use("tiny") as model:
                swap = pool.submit(repository.load_model, "tiny")
                deadline = time.monotonic() + DEADLINE_S
                while repository.versions("tiny") != (2,) and time.monotonic() < deadline:
                    pass
                assert_answers(model.session, FIRST)
                assert not swap.done()
            swap.result(DRAIN_TIMEOUT_S)
        assert versions_that_answer(repository) == (2,)

    def test_no_request_fails_or_mixes_versions_while_versions_come_and_go(self, folder, opened):
        write_ps(folder, **ROCKSDB)
        repository = opened(folder)
        models = {1: FIRST, 2: SECOND}
        SECOND.write(folder, "tiny", 2)
        dense, bags = FIRST.sample_requests(5, seed=0)
        expected = {version: model.probabilities(dense, bags) for version, model in models.items()}
        stop, answered = threading.Event(), set()

        def ask():
            while not stop.is_set():
                with repository.use("tiny") as model:
                    version = model.config.version
                    found = model.session.predict(dense, *flatten(bags))
                np.testing.assert_allclose(found, expected[version], atol=2e-6)
                answered.add(version)

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            for number in range(4):
                policy = {"specific": {"versions": [1 + number % 2]}}
                repository.load_model("tiny", VersionPolicy.model_validate(policy))
            stop.set()
            for one in asking:
                one.result()
        assert answered == {1, 2}


def replace(folder, model, name="tiny", version=1):
    """Write another model over the files of a version, file by file, as ``cp -r`` does."""
    made = model.write(folder.parent / "made" / uuid.uuid4().hex, name, version)
    shutil.copytree(made, folder / name / str(version), dirs_exist_ok=True)


def digest_of(folder, version=1, name="tiny"):
    return hashlib.sha256((folder / name / str(version) / "manifest.json").read_bytes()).hexdigest()


class TestReplacedFiles:
    @pytest.mark.parametrize("tiers", [{}, ROCKSDB], ids=["RAM", "RocksDB"])
    def test_new_files_of_a_version_are_served_after_a_load(self, folder, opened, tiers):
        write_ps(folder, **tiers)
        repository = opened(folder)
        before = digest_of(folder)
        assert repository.index()[0].digest == before

        replace(folder, SECOND)
        repository.load_model("tiny")

        assert_answers(repository.session("tiny"), SECOND)
        assert repository.index()[0].digest == digest_of(folder) != before
        repository.load_model("tiny")
        assert_answers(repository.session("tiny"), SECOND)
        repository.close()
        assert_answers(opened(folder).session("tiny"), SECOND)

    def test_nothing_of_a_dropped_version_waits_for_the_garbage_collector(self, folder, opened):
        repository = opened(folder)
        old = weakref.ref(repository.loaded("tiny")), weakref.ref(repository.session("tiny"))
        replace(folder, SECOND)

        gc.disable()
        try:
            with closing(FrontEnd(repository)) as front:
                front.endpoint.find("tiny")
                repository.load_model("tiny")
                assert [one() for one in old] == [None, None]
        finally:
            gc.enable()

    def test_the_metrics_show_the_digest_and_each_table_once(self, folder, opened):
        repository = opened(folder)
        replace(folder, SECOND)
        repository.load_model("tiny")

        samples = [(reading.name, reading.labels) for reading in repository.readings()]

        labels = (("model", "tiny"), ("version", "1"), ("digest", digest_of(folder)[:8]))
        assert samples.count(("hotrow_model_info", labels)) == 1
        assert len(samples) == len(set(samples))

    def test_the_content_of_its_files_identifies_a_version_without_a_manifest(self, folder, opened):
        (folder / "tiny" / "1" / "manifest.json").unlink()
        repository = opened(folder)
        before = repository.loaded("tiny")
        (folder / "tiny" / "1" / "graph.json").touch()
        repository.load_model("tiny")
        assert repository.loaded("tiny") is before

        replace(folder, SECOND)
        (folder / "tiny" / "1" / "manifest.json").unlink()
        repository.load_model("tiny")

        assert_answers(repository.session("tiny"), SECOND)

    def test_files_of_two_versions_are_never_served_together(self, folder, opened):
        repository = opened(folder)
        made = SECOND.write(folder.parent / "made", "tiny", 1)
        old = folder / "tiny" / "1"
        files = [path.relative_to(made) for path in made.rglob("*") if path.is_file()]
        files = [file for file in files if (made / file).read_bytes() != (old / file).read_bytes()]
        for file in files[:-1]:
            shutil.copyfile(made / file, folder / "tiny" / "1" / file)
            with pytest.raises(ModelFileError):
                repository.load_model("tiny")
            assert_answers(repository.session("tiny"), FIRST)
            assert [(one.state, bool(one.reason)) for one in repository.index()] == [("READY", True)]

        shutil.copyfile(made / files[-1], folder / "tiny" / "1" / files[-1])
        repository.load_model("tiny")

        assert_answers(repository.session("tiny"), SECOND)
        assert repository.index()[0].reason == ""

    def test_files_that_change_during_the_load_are_refused(self, folder, opened, monkeypatch):
        repository = opened(folder)
        version = SECOND.write(folder, "tiny", 2)
        monkeypatch.setattr(
            "serving.repository.served_model.ServedNetwork.warm_up",
            lambda _: (version / "dense.model").write_bytes(b"1234"),
        )

        with pytest.raises(ModelFileError, match="2: a file was changed while the version was loaded"):
            repository.load_model("tiny")

        assert versions_that_answer(repository) == (1,)

    def test_a_model_that_ps_json_lists_is_not_swapped(self, folder, opened):
        write_ps(folder, [listed(folder / "tiny" / "1" / "graph.json", "tiny", max_batch_size=64)])
        repository = opened(folder)
        before = digest_of(folder)
        replace(folder, SECOND)

        with pytest.raises(VersionConflictError, match=f"{before}, but its folder has {digest_of(folder)}"):
            repository.load_model("tiny")

        assert_answers(repository.session("tiny"), FIRST)
        repository.unload_model("tiny")
        repository.load_model("tiny")
        assert_answers(repository.session("tiny"), SECOND)

    @pytest.mark.parametrize("has_other_files", [False, True])
    def test_tables_that_an_earlier_release_named_by_the_version_alone(self, folder, opened, has_other_files):
        write_ps(folder, **ROCKSDB)
        config = read_model_directory(folder / "tiny" / "1").model_copy(update={"table_tag": "1"})
        with ParameterServer([RocksDbStore(folder / "rows", num_threads=1)]) as server:
            server.load_model(config)
            server.insert("tiny@1.user", np.array([1]), np.full((1, 4), 7, np.float32))
        if has_other_files:
            replace(folder, SECOND)

        repository = opened(folder)

        server = repository.session("tiny").embedding_cache.server
        row = server.lookup("tiny@1.user", np.array([1]))[0]
        if has_other_files:
            assert_answers(repository.session("tiny"), SECOND)
            assert sorted(server.stores[-1].kept_tables()) == tables_of(folder, 1)
        else:
            assert (row == 7).all()
            assert sorted(server.stores[-1].kept_tables()) == ["tiny@1.item", "tiny@1.user"]
            replace(folder, SECOND)
            repository.load_model("tiny")
            assert_answers(repository.session("tiny"), SECOND)
            assert sorted(server.stores[-1].kept_tables()) == tables_of(folder, 1)


def make_unreadable_entries(folder):
    """What folders of models have besides models, and entries that are no versions."""
    (folder / "lost+found").mkdir(0)
    (folder / "notes").write_text("")
    (folder / "secret").mkdir(0)
    (folder / "moved").symlink_to(folder / "releases")
    (folder / "tiny" / "3").write_text("")
    (folder / "tiny" / "5").mkdir()


def in_place_of_the_graph(make, manifest=True):
    """Return a damage: ``make`` is called with the path of the graph, which is gone."""

    def damage(version):
        (version / "graph.json").unlink()
        make(version / "graph.json")
        if not manifest:
            (version / "manifest.json").unlink()

    return damage


def move_away(version):
    shutil.rmtree(version)
    version.symlink_to("releases")


NEWEST = [
    pytest.param(in_place_of_the_graph(lambda _: None), "2/graph.json: named by the manifest, but missing", id="gone"),
    pytest.param(in_place_of_the_graph(lambda _: None, manifest=False), "2/graph.json.*no such file", id="no manifest"),
    pytest.param(in_place_of_the_graph(os.mkfifo), "2/graph.json: not a regular file", id="pipe"),
    pytest.param(in_place_of_the_graph(os.mkdir), "2/graph.json: named by the manifest, but a folder", id="folder"),
    pytest.param(move_away, "tiny/2: is a link to a folder that does not exist", id="dead link"),
    pytest.param(lambda version: version.chmod(0), "tiny/2: cannot be read: Permission denied", id="no rights"),
]


class TestEntries:
    @pytest.mark.parametrize("control", ["none", "poll", "explicit"])
    def test_a_broken_entry_has_a_reason_and_does_not_affect_others(self, folder, opened, control, caplog):
        make_unreadable_entries(folder)

        with ordinary_rights():
            repository = opened(folder, control=control, poll_s=3600)

        assert versions_that_answer(repository) == (1,)
        found = [(one.name, one.version, one.state, one.reason) for one in repository.index()]
        assert found == [
            ("moved", "", "UNAVAILABLE", "is a link to a folder that does not exist"),
            ("secret", "", "UNAVAILABLE", "cannot be read: Permission denied"),
            ("tiny", "1", "READY", ""),
            ("tiny", "3", "UNAVAILABLE", "is not a folder"),
            ("tiny", "5", "UNAVAILABLE", "is an empty folder"),
        ]
        assert caplog.text.count("is an empty folder") == 1

    @pytest.mark.parametrize(("damage", "reason"), NEWEST)
    def test_a_newest_version_that_cannot_be_read_is_not_passed_over(self, folder, opened, damage, reason, capsys):
        repository, polling = opened(folder), opened(folder, control="poll", poll_s=3600)
        damage(SECOND.write(folder, "tiny", 2))

        with ordinary_rights():
            with pytest.raises(HotrowError, match=reason):
                repository.load_model("tiny")
            for _ in range(2):
                polling.poll()
            for control in ("none", "explicit"):
                with pytest.raises(HotrowError, match=reason):
                    opened(folder, control=control)
            assert main(["check", str(folder)]) == 1

        assert re.search(reason, capsys.readouterr().err)
        for one in (repository, polling):
            assert versions_that_answer(one) == (1,)
            assert states(one) == [("tiny", "1", "READY"), ("tiny", "2", "UNAVAILABLE")]

    @pytest.mark.parametrize("control", ["poll", "explicit"])
    def test_a_name_that_is_not_utf_8_is_shown_escaped(self, folder, opened, control, caplog):
        os.makedirs(os.fsencode(folder) + b"/\xff\n/1")

        repository = opened(folder, control=control, startup=("tiny",), poll_s=3600)

        assert [one.name for one in repository.index()] == ["\\udcff\\n", "tiny"]
        assert "model \\udcff\\n: version 1 is an empty folder" in caplog.text

    @pytest.mark.parametrize("control", ["none", "poll", "explicit"])
    def test_an_empty_repository_starts(self, tmp_path, opened, control):
        repository = opened(tmp_path, control=control, startup=(), poll_s=3600)

        assert list(repository.models()) == repository.index() == []

    def test_a_version_may_be_a_link_to_a_folder_of_any_name(self, folder, opened):
        SECOND.write(folder.parent / "elsewhere", "tiny", 2).rename(folder.parent / "release")
        (folder / "tiny" / "2").symlink_to(folder.parent / "release")

        assert versions_that_answer(opened(folder)) == (2,)

    def test_a_start_in_the_mode_poll_is_ready_once_a_model_serves(self, folder, opened):
        """Otherwise a rollout would replace servers that answer by servers that cannot."""
        broken = folder / "tiny" / "1" / "dense.model"
        content = broken.read_bytes()
        broken.write_bytes(b"1234")
        repository = opened(folder, control="poll", poll_s=3600)
        assert repository.readiness_of_all() == Readiness("not ready", "no model of the repository can be loaded")

        broken.write_bytes(content)
        repository.poll()
        assert repository.readiness_of_all() == Readiness()

    def test_a_start_in_the_mode_poll_serves_the_models_that_are_whole(self, folder, opened, caplog):
        broken = SECOND.write(folder, "other")
        (broken / "dense.model").write_bytes(b"1234")
        (SECOND.write(folder, "tiny", 2) / "item" / "key").unlink()

        repository = opened(folder, control="poll", poll_s=3600)

        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [
            ("other", "1", "UNAVAILABLE"),
            ("tiny", "1", "READY"),
            ("tiny", "2", "UNAVAILABLE"),
        ]
        assert caplog.text.count("dense.model") == caplog.text.count("item/key") == 1


class TestPolling:
    @pytest.mark.parametrize("has_manifest", [True, False])
    def test_a_version_that_is_still_being_copied_is_served_once_it_is_whole(
        self, folder, opened, caplog, has_manifest
    ):
        repository = opened(folder, control="poll", poll_s=3600)
        made = SECOND.write(folder.parent / "made", "tiny", 2)
        if not has_manifest:
            (made / "manifest.json").unlink()
        new = folder / "tiny" / "2"
        shutil.copytree(made, new, ignore=lambda _, names: [name for name in names if name == "emb_vector"])
        for _ in range(3):
            repository.poll()
        assert versions_that_answer(repository) == (1,)
        assert states(repository)[1] == ("tiny", "2", "UNAVAILABLE")
        assert caplog.text.count("emb_vector") == 1

        for table in SECOND.tables:
            (new / table / "emb_vector").write_bytes((made / table / "emb_vector").read_bytes())
            repository.poll()
        repository.poll()

        assert versions_that_answer(repository) == (2,)

    def test_new_files_of_a_version_are_followed(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=3600)

        replace(folder, SECOND)
        repository.poll()

        assert_answers(repository.session("tiny"), SECOND)

    def test_a_broken_version_does_not_keep_a_newer_one_from_being_served(self, folder, opened):
        write_policy(folder, "{ all { } }")
        repository = opened(folder, control="poll", poll_s=3600)
        (SECOND.write(folder, "tiny", 2) / "dense.model").write_bytes(b"1234")
        TinyModel(seed=3).write(folder, "tiny", 3)

        repository.poll()

        assert versions_that_answer(repository) == (3, 1)

    def test_a_load_that_fails_for_another_reason_is_tried_again_even_if_no_file_changes(
        self, folder, opened, monkeypatch
    ):
        repository = opened(folder, control="poll", poll_s=3600)
        SECOND.write(folder, "tiny", 2)
        with monkeypatch.context() as broken:
            broken.setattr("serving.repository.served_model.ServedNetwork.warm_up", raise_full)
            repository.poll()
        assert versions_that_answer(repository) == (1,)

        for _ in range(3):
            repository.poll()

        assert versions_that_answer(repository) == (2,)

    def test_a_version_that_does_not_fit_into_memory_has_a_reason_and_does_not_affect_others(
        self, folder, opened, monkeypatch
    ):
        repository = opened(folder, control="poll", poll_s=3600)
        SECOND.write(folder, "tiny", 2)
        SECOND.write(folder, "z", 1)

        def warm_up(model):
            if model.name == "tiny":
                raise MemoryError

        with monkeypatch.context() as full:
            full.setattr("serving.repository.served_model.ServedNetwork.warm_up", warm_up)
            repository.poll()

        assert versions_that_answer(repository) == (1,)
        assert_answers(repository.session("z"), SECOND)
        (broken,) = (one for one in repository.index() if (one.name, one.version) == ("tiny", "2"))
        assert (broken.state, broken.reason) == ("UNAVAILABLE", "cpu: too little free memory to load version 2")

    def test_new_and_removed_versions_and_models_are_followed(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=3600)
        SECOND.write(folder, "tiny", 2)
        SECOND.write(folder, "other", 1)
        repository.poll()
        assert versions_that_answer(repository) == (2,)
        assert sorted(repository.models()) == ["other", "tiny"]

        shutil.rmtree(folder / "tiny" / "2")
        shutil.rmtree(folder / "other")
        repository.poll()
        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [("tiny", "1", "READY")]

    def test_the_models_keep_serving_while_the_folder_is_empty_as_without_its_file_system(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=3600)
        (folder / "tiny").rename(folder.parent / "tiny")

        with pytest.raises(ConfigError, match=r"models: no model is in it any more; the models go on serving"):
            repository.poll()
        assert versions_that_answer(repository) == (1,)

        (folder.parent / "tiny").rename(folder / "tiny")
        repository.poll()
        assert states(repository) == [("tiny", "1", "READY")]

    def test_a_version_keeps_serving_if_the_version_that_replaces_it_is_broken(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=3600)
        shutil.rmtree(folder / "tiny" / "1")
        (SECOND.write(folder, "tiny", 2) / "dense.model").write_bytes(b"1234")

        repository.poll()

        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [("tiny", "1", "READY"), ("tiny", "2", "UNAVAILABLE")]
        assert repository.readiness_of_all().is_ready

    def test_the_folder_is_looked_at_again_and_again(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=0.05)
        SECOND.write(folder, "tiny", 2)

        deadline = time.monotonic() + DEADLINE_S
        while repository.versions("tiny") != (2,):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert versions_that_answer(repository) == (2,)

    def test_a_broken_version_is_reported_once_and_tried_again_when_it_changes(self, folder, opened, caplog):
        repository = opened(folder, control="poll", poll_s=3600)
        broken = SECOND.write(folder, "tiny", 2)
        (broken / "dense.model").write_bytes(b"1234")
        for _ in range(2):
            repository.poll()
        assert caplog.text.count("dense.model") == 1
        assert versions_that_answer(repository) == (1,)

        shutil.rmtree(broken)
        SECOND.write(folder, "tiny", 2)
        repository.poll()

        assert versions_that_answer(repository) == (2,)

    def test_a_model_keeps_serving_while_its_folder_is_a_dead_link(self, folder, opened):
        (folder / "tiny").rename(folder.parent / "release")
        (folder / "tiny").symlink_to(folder.parent / "release")
        repository = opened(folder, control="poll", poll_s=3600)

        (folder.parent / "release").rename(folder.parent / "gone")
        repository.poll()

        assert versions_that_answer(repository) == (1,)
        assert states(repository) == [("tiny", "", "UNAVAILABLE"), ("tiny", "1", "READY")]

    def test_a_policy_that_is_a_dead_link_changes_nothing(self, folder, opened):
        SECOND.write(folder, "tiny", 2)
        write_policy(folder, "{ specific { versions: [1] } }")
        repository = opened(folder, control="poll", poll_s=3600)

        (folder / "tiny" / "config.pbtxt").unlink()
        (folder / "tiny" / "config.pbtxt").symlink_to("gone")
        repository.poll()

        assert versions_that_answer(repository) == (1,)
        fault = repository.index()[0]
        assert (fault.name, fault.version, fault.state) == ("tiny", "", "UNAVAILABLE")
        assert fault.reason.endswith("config.pbtxt: cannot be read: a link to a file that does not exist")

    def test_a_policy_that_changes_is_followed(self, folder, opened):
        repository = opened(folder, control="poll", poll_s=3600)
        SECOND.write(folder, "tiny", 2)
        write_policy(folder, "{ all { } }")
        repository.poll()
        assert versions_that_answer(repository) == (2, 1)


def test_rows_of_a_version_that_is_not_served_leave_the_database_at_the_start(folder, opened, caplog):
    caplog.set_level(logging.INFO)
    write_ps(folder, **ROCKSDB)
    opened(folder).close()
    old = tables_of(folder, 1)[1]
    SECOND.write(folder, "tiny", 2)

    repository = opened(folder)

    assert versions_that_answer(repository) == (2,)
    assert f"table {old!r}: rocksdb: dropped, because its version is not served" in caplog.text
    kept = repository.session("tiny").embedding_cache.server.stores[-1].kept_tables()
    assert sorted(kept) == tables_of(folder, 2)


class OtherWorkers:
    """Worker 1 of two, or worker 0 that starts again, next to a worker that serves ``versions``."""

    def __init__(self, leads, versions):
        self.leads = leads
        self.versions = lambda: versions

    def shared(self, ps):
        return ps

    def follow(self, versions):
        return ()


class SlowWorker(OtherWorkers):
    """Worker 1, as worker 0 sees it; it can fail to follow."""

    def __init__(self):
        super().__init__(True, None)
        self.fails = False
        self.served = {}

    def follow(self, versions):
        if self.fails:
            raise WorkerError(1, "no answer")
        self.served = versions
        return ()


def test_a_load_or_an_unload_that_a_worker_did_not_follow_may_be_repeated(folder, opened):
    worker = SlowWorker()
    repository = opened(folder, peers=worker)
    SECOND.write(folder, "tiny", 2)
    for act, served in ((repository.load_model, ["tiny"]), (repository.unload_model, [])):
        worker.fails = True
        for _ in range(2):
            with pytest.raises(WorkerError, match="worker 1: no answer"):
                act("tiny")
        assert list(repository.models()) == served

        worker.fails = False
        act("tiny")

        assert worker.served == repository.served()
    with pytest.raises(UnknownModelError):
        repository.unload_model("tiny")


def test_a_poll_asks_a_worker_again_that_did_not_follow(folder, opened, caplog):
    worker = SlowWorker()
    worker.fails = True
    repository = opened(folder, control="poll", poll_s=3600, peers=worker)
    for change in (
        lambda: None,  # the start
        lambda: SECOND.write(folder, "other"),
        lambda: SECOND.write(folder, "tiny", 2),
        lambda: shutil.rmtree(folder / "other"),
    ):
        worker.fails = True
        change()
        for _ in range(2):
            repository.poll()
        assert worker.served != repository.served()

        worker.fails = False
        repository.poll()

        assert worker.served == repository.served()
    assert caplog.text.count("worker 1: no answer") == caplog.text.count("all workers follow again") == 4


def test_a_worker_that_follows_lists_only_what_it_serves(folder, opened):
    os.symlink("gone", folder / "moved")
    repository = opened(folder, peers=OtherWorkers(False, {"tiny": {"1": digest_of(folder)}}))
    SECOND.write(folder, "other")
    served = repository.served()

    with pytest.raises(HotrowError):
        repository.follow(served | {"other": {"1": "0" * 64}})
    assert states(repository) == [("other", "1", "UNAVAILABLE"), ("tiny", "1", "READY")]
    repository.follow(served | {"other": {"1": digest_of(folder, name="other")}})
    assert states(repository) == [("other", "1", "READY"), ("tiny", "1", "READY")]
    repository.follow(served)
    assert states(repository) == [("tiny", "1", "READY")]


def test_a_worker_that_cannot_follow_one_model_follows_the_others(folder, opened):
    for name in ("broken", "other"):
        FIRST.write(folder, name)
    leader, worker = opened(folder), opened(folder, peers=OtherWorkers(False, None))
    for name in ("broken", "other"):
        SECOND.write(folder, name, 2)
        leader.load_model(name)
    leader.unload_model("tiny")
    (folder / "broken" / "2" / "dense.model").write_bytes(b"1234")

    with pytest.raises(ModelFileError, match=r"dense\.model"):
        worker.follow(leader.served())

    assert {name: worker.versions(name) for name in worker.models()} == {"broken": (1,), "other": (2,)}


@pytest.mark.parametrize("is_early", [True, False], ids=["before tables are opened", "after the last is filled"])
def test_files_that_change_during_the_start_do_not_change_rows_that_other_processes_serve(
    folder, opened, caplog, is_early
):
    write_ps(folder, **ROCKSDB)
    opened(folder).close()
    peers = OtherWorkers(True, None)

    def shared(ps):
        if is_early:
            replace(folder, SECOND)
        return ps

    def progress(task, *_):
        if not is_early and ".item" in task:
            replace(folder, SECOND)

    peers.shared = shared
    with pytest.raises(ModelFileError, match="a file was changed while"):
        opened(folder, peers=peers, progress=progress)
    caplog.set_level(logging.INFO)
    replace(folder, FIRST)

    repository = opened(folder)

    assert versions_that_answer(repository) == (1,)
    assert "into rocksdb" not in caplog.text


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("control", ["none", "poll", "explicit"])
def test_a_worker_that_cannot_load_a_version_that_others_serve_does_not_start(folder, opened, control, leads):
    peers = OtherWorkers(leads, opened(folder).served())

    def shared(ps):
        replace(folder, SECOND)
        return ps

    peers.shared = shared
    with pytest.raises(ModelFileError, match="a file was changed while"):
        opened(folder, control=control, peers=peers)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("path", ["models/tiny", "models/tiny/1", "ps.json"])
def test_a_worker_whose_files_were_replaced_does_not_start_if_its_model_cannot_be_swapped(
    folder, tmp_path, opened, path, leads
):
    write_ps(tmp_path, [listed(folder / "tiny" / "1" / "graph.json", "tiny")])
    first = opened(tmp_path / path, control="none", peers=OtherWorkers(True, None)).served()
    shutil.rmtree(folder / "tiny")
    SECOND.write(folder, "tiny", 1)
    second = opened(tmp_path / path, control="none", peers=OtherWorkers(True, None)).served()

    with pytest.raises(VersionConflictError, match=f"digest {first['tiny']['1']}, but .* {second['tiny']['1']} now"):
        opened(tmp_path / path, control="none", peers=OtherWorkers(leads, first))
    assert opened(tmp_path / path, control="none", peers=OtherWorkers(leads, second)).served() == second


def test_a_worker_that_finds_a_new_version_of_a_model_that_cannot_be_swapped_does_not_start(folder, opened):
    first = opened(folder / "tiny", control="none", peers=OtherWorkers(True, None)).served()
    SECOND.write(folder, "tiny", 2)

    with pytest.raises(
        VersionConflictError, match=r"serve version 1 of 'tiny' .*, but the files are version 2 of 'tiny'"
    ):
        opened(folder / "tiny", control="none", peers=OtherWorkers(False, first))


@pytest.mark.parametrize("leads", [True, False])
def test_a_worker_whose_files_were_replaced_does_not_start_if_ps_json_lists_its_model(folder, opened, leads):
    write_ps(folder, [listed(folder / "tiny" / "1" / "graph.json", "tiny")])
    first = opened(folder, control="none").served()
    shutil.rmtree(folder / "tiny")
    SECOND.write(folder, "tiny", 1)
    second = opened(folder, control="none").served()

    with pytest.raises(VersionConflictError, match=f"digest {first['tiny']['1']}, but .* {second['tiny']['1']} now"):
        opened(folder, control="none", peers=OtherWorkers(leads, first))
    assert opened(folder, control="none", peers=OtherWorkers(leads, second)).served() == second
