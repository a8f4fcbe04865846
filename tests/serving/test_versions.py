"""Versions of a model: which are served, and how they change while requests are answered."""

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.tiny_model import TinyModel, flatten
from serving.config import VersionPolicy, policy_from
from serving.errors import ConfigError, ModelFileError, RequestError, StoreFullError, UnknownModelError
from serving.repository import ModelRepository
from serving.repository.loaded_model import DRAIN_TIMEOUT_S
from serving.storage import RocksDbStore
from tests.serving.ps_files import write_ps

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

    def load(path, control="explicit", startup=("*",), **options):
        repositories.append(ModelRepository(path, control=control, startup=startup, engine="numpy", **options))
        repositories[-1].load()
        return repositories[-1]

    yield load
    for repository in repositories:
        repository.close()


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
            ("{ latest { } }", (3,)),
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
            ("{ newest { } }", 'has no field named "newest"'),
            ("{ }", "expected one of latest, all and specific"),
        ],
    )
    def test_a_policy_that_cannot_be_followed_is_refused_with_its_place(self, folder, opened, policy, reason):
        write_policy(folder, policy)

        with pytest.raises(ConfigError, match=f"config.pbtxt: .*{reason}" if "field" in reason else reason):
            opened(folder, control="none")

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [
            ({"latest": {}, "all": {}}, "version_policy: expected one of latest, all and specific"),
            ({"latest": {"num_versions": 0}}, "version_policy.latest.num_versions: .*greater than or equal to 1"),
            ({"specific": {"versions": []}}, "version_policy.specific.versions: .*at least 1 item"),
            ("latest", "version_policy: .*valid dictionary"),
        ],
    )
    def test_a_policy_in_json_is_checked_too(self, policy, reason):
        with pytest.raises(ConfigError, match=f"load: {reason}"):
            policy_from({"version_policy": policy}, "load")


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
        assert sorted(database.kept_tables()) == ["tiny@2.item", "tiny@2.user"]
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
        if damage != "graph":  # the version was read, so it has a line of its own
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
        assert [memory.count(f"tiny@2.{table}") for table in SECOND.tables] == [FIRST.rows] * 2

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
            for number in range(20):
                policy = {"specific": {"versions": [1 + number % 2]}}
                repository.load_model("tiny", VersionPolicy.model_validate(policy))
            stop.set()
            for one in asking:
                one.result()
        assert answered == {1, 2}


class TestPolling:
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
        assert list(repository.models()) == ["tiny"]

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
    SECOND.write(folder, "tiny", 2)

    repository = opened(folder)

    assert versions_that_answer(repository) == (2,)
    assert "table 'tiny@1.user': rocksdb: dropped, because its version is not served" in caplog.text
    assert sorted(repository.session("tiny").embedding_cache.server.stores[-1].kept_tables()) == [
        "tiny@2.item",
        "tiny@2.user",
    ]
