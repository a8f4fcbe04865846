"""Versions that have a network alone and share the tables of another version."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

import hotrow
from serving.config import VersionPolicy, read_inference_config, read_repository
from serving.errors import ConfigError, ModelFileError, StreamError, WorkerError
from serving.frontend.front_end import FrontEnd
from serving.model.manifest import sha256_of
from serving.opening import Runtime
from serving.repository import ModelRepository
from serving.repository import repository as repository_module
from serving.storage import RocksDbStore
from serving.stream.folder import FolderSink
from serving.stream.message import Kind, UpdateMessage, encode
from tests.serving.parameter_server.stream import until
from tests.serving.ps_files import listed, write_ps
from tests.tools.tiny_model import TinyModel, flatten

RUN = "run-1"
#: Three networks on the same rows.
FIRST, SECOND, THIRD = [TinyModel(seed=1, network_seed=seed) for seed in (1, 2, 3)]
OTHER = TinyModel(seed=4)
ROCKSDB = {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1}}


@pytest.fixture
def folder(tmp_path):
    """A repository with version 1 of a model, which follows a run from position 0 of a log."""
    FIRST.write(tmp_path / "models", "tiny", 1, run=RUN)
    return tmp_path / "models"


@pytest.fixture
def opened():
    """Load repositories; all are closed when the test ends."""
    repositories = []

    def load(path, control="explicit", device="cpu", engine="numpy", **options):
        startup = ("*",) if control == "explicit" else ()
        runtime = Runtime(engine, device=device)
        repositories.append(ModelRepository(path, runtime, control, 3600.0, startup, **options))
        repositories[-1].load()
        return repositories[-1]

    yield load
    for repository in repositories:
        repository.close()


@pytest.fixture
def log(folder):
    """An update log that servers of the repository follow, without other tiers than RAM."""
    return follow(folder)


def follow(folder, **tiers):
    source = {"type": "folder", "path": str(folder.parent / "log"), "poll_timeout_ms": 20}
    write_ps(folder, update_source=source, **tiers)
    return FolderSink(folder.parent / "log")


def publish(log, *keys):
    """Publish rows of ones, and return the position after them."""
    keys = np.array(keys, np.int64)
    rows = np.ones((keys.size, FIRST.dim), np.float32)
    log.send(encode(UpdateMessage(Kind.UPSERT, "tiny", "user", keys, rows, run=RUN)), 0)
    return log.flush()


def answer(repository, version="", keys=(1, 2)):
    """The probabilities of samples whose user has these keys."""
    bags = [[[key], [3], [4, 5]] for key in keys]
    dense = np.full((len(keys), FIRST.dense_dim), 0.5, np.float32)
    return repository.session("tiny", str(version)).predict(dense, *flatten(bags))


def assert_answers(repository, model, version="", changed=None):
    """Compare an answer with those of a model in which the row of one user is ones."""

    class Changed(TinyModel):
        def vectors(self, table):
            vectors = super().vectors(table)
            if table == "user" and changed is not None:
                vectors[changed] = 1
            return vectors

    oracle = Changed(seed=model.seed, network_seed=model.network_seed)
    dense, bags = np.full((2, FIRST.dense_dim), 0.5), [[[key], [3], [4, 5]] for key in (1, 2)]
    np.testing.assert_allclose(answer(repository, version), oracle.probabilities(dense, bags), atol=2e-6)


def states(repository):
    return {(one.version, one.state): one.reason for one in repository.index() if one.name == "tiny"}


def versions(repository, name="tiny"):
    return repository.versions(name)


def labels_of_tables(repository):
    """The versions of all tables in the metrics, each as often as it is there."""
    return [dict(sample.labels)["version"] for sample in repository.readings() if sample.name == "hotrow_lookup_keys"]


def is_ready(repository, version):
    return until(lambda: (str(version), "READY") in states(repository))


class TestSharing:
    def test_an_answer_has_the_bits_of_a_whole_export_of_the_same_network_and_rows(self, folder, log, opened):
        repository = opened(folder)
        whole = folder.parent / "whole"
        SECOND.write(whole, "tiny", 2, run=RUN)
        follow(whole)
        SECOND.write_dense(folder, positions=publish(log, 1), run=RUN)
        repository.load_model("tiny")

        assert is_ready(repository, 2)
        other = opened(whole)
        assert until(lambda: answer(other).tobytes() == answer(repository).tobytes())

        assert_answers(repository, SECOND, changed=1)

    def test_two_versions_on_one_base_have_its_tables_once(self, folder, opened):
        SECOND.write_dense(folder, version=2)
        THIRD.write_dense(folder, version=3)
        repository = opened(folder)
        repository.load_model("tiny", VersionPolicy(all={}))

        assert versions(repository) == (3, 2, 1)
        assert sorted(set(labels_of_tables(repository))) == ["1"]
        assert len(labels_of_tables(repository)) == len(FIRST.tables)
        assert len({answer(repository, version).tobytes() for version in (1, 2, 3)}) == 3
        with closing(FrontEnd(repository)) as front:
            (model,) = front.status.document()["models"]
        found = {version["version"]: [table["name"] for table in version["tables"]] for version in model["versions"]}
        assert found == {number: list(FIRST.tables) for number in "123"}
        lines = [line for line in repository.describe() if "tables of version 1" in line]
        assert [line.split(":")[0] for line in lines] == ["model tiny version 2", "model tiny version 3"]

    @pytest.mark.parametrize("end", ["policy", "deletion"])
    def test_the_rows_of_the_base_stay_as_they_are_while_a_version_uses_them(self, folder, log, opened, end):
        repository = opened(folder)
        SECOND.write_dense(folder, positions=publish(log, 1), run=RUN)
        repository.load_model("tiny")
        assert is_ready(repository, 2)
        for file in (folder.parent / "log").iterdir():
            file.write_bytes(b"")  # so a row that is lost cannot come again
        digest = repository.loaded("tiny").config.base.digest
        if end == "deletion":
            shutil.rmtree(folder / "tiny" / "1")
            repository.load_model("tiny")
        assert versions(repository) == (2,)
        assert_answers(repository, SECOND, changed=1)

        THIRD.write_dense(folder, version=3, digest=digest)
        repository.load_model("tiny")

        assert versions(repository) == (3,)
        assert_answers(repository, THIRD, changed=1)

    def test_tables_end_with_the_last_version_that_uses_them(self, folder, opened):
        write_ps(folder, **ROCKSDB)
        repository = opened(folder)
        SECOND.write_dense(folder)
        repository.load_model("tiny")
        OTHER.write(folder, "tiny", 3)
        repository.load_model("tiny")
        assert versions(repository) == (3,)
        repository.close()

        with closing(RocksDbStore(folder / "rows", num_threads=1)) as store:
            assert {name.split("-")[0] for name in store.kept_tables()} == {"tiny@3"}

    def test_a_restart_keeps_the_rows_of_a_base_that_does_not_serve_itself(self, folder, opened):
        log = follow(folder, **ROCKSDB)
        position = publish(log, 1)
        SECOND.write_dense(folder, positions=position, run=RUN)
        repository = opened(folder)
        assert is_ready(repository, 2)
        before = answer(repository)
        repository.close()
        shutil.rmtree(folder.parent / "log")
        follow(folder, **ROCKSDB)

        again = opened(folder)

        assert versions(again) == (2,)
        assert answer(again).tobytes() == before.tobytes()

    def test_a_base_that_is_deleted_under_its_versions_is_logged_before_a_restart_needs_it(
        self, folder, opened, caplog
    ):
        SECOND.write_dense(folder)
        repository = opened(folder, control="poll")
        for change in (lambda: (folder / "tiny" / "1").rename(folder.parent / "1"), lambda: None):
            change()
            repository.poll()

        reason = "is missing, and a restart needs it: version 2 shares its tables"
        assert caplog.text.count(f"model tiny: version 1 {reason}") == 1
        states = [(one.version, one.state, one.reason) for one in repository.index()]
        assert states == [("1", "UNAVAILABLE", reason), ("2", "READY", "")]

        (folder.parent / "1").rename(folder / "tiny" / "1")
        repository.poll()
        assert [(one.version, one.state) for one in repository.index()] == [("2", "READY")]

    def test_a_restart_without_the_folder_of_the_base_says_so(self, folder, opened):
        SECOND.write_dense(folder)
        shutil.rmtree(folder / "tiny" / "1")

        with pytest.raises(ModelFileError, match=r"shares those of version 1, but .*tiny/1 is missing"):
            opened(folder)

    def test_new_files_of_the_base_leave_its_old_rows_to_the_versions_that_name_them(self, folder, opened):
        repository = opened(folder)
        SECOND.write_dense(folder)
        repository.load_model("tiny", VersionPolicy(all={}))
        before = answer(repository, 2)
        shutil.rmtree(folder / "tiny" / "1")
        OTHER.write(folder, "tiny", 1)

        repository.load_model("tiny", VersionPolicy(all={}))

        assert versions(repository) == (2, 1)
        assert answer(repository, 2).tobytes() == before.tobytes()
        assert_answers(repository, OTHER, 1)
        assert len(labels_of_tables(repository)) == len(FIRST.tables)

    @pytest.mark.parametrize("engine", ["auto", "numpy"])
    def test_versions_share_the_caches_of_a_device(self, folder, opened, engine):
        repository = opened(folder, device="runner", engine=engine)
        assert_answers(repository, FIRST)
        SECOND.write_dense(folder)
        repository.load_model("tiny", VersionPolicy(all={}))
        for version, model in ((2, SECOND), (1, FIRST), (2, SECOND)):
            assert_answers(repository, model, version)
        repository.load_model("tiny")

        hits = [sample for sample in repository.readings() if sample.name == "hotrow_gpu_cache_hits"]
        assert [(dict(sample.labels)["version"], sample.value > 0) for sample in hits] == [("1", True)] * 2
        assert_answers(repository, SECOND, 2)


class TestWaiting:
    def test_a_version_serves_when_its_tables_have_reached_its_position(self, folder, log, opened):
        repository = opened(folder)
        publish(log, 1)
        SECOND.write_dense(folder, positions={"folder": "2"}, run=RUN)

        repository.load_model("tiny")

        reason = "waits until its tables reach position 2 of folder (they are at 1)"
        assert until(lambda: states(repository) == {("1", "READY"): "", ("2", "LOADING"): reason})
        assert versions(repository) == (1,)
        OTHER.write(folder, "other")
        repository.load_model("other")
        assert versions(repository, "other") == (1,)
        publish(log, 2)
        assert is_ready(repository, 2)
        assert versions(repository) == (2,)

    @pytest.mark.parametrize("control", ["none", "poll", "explicit"])
    def test_the_base_serves_from_the_start_until_the_newest_version_may(self, folder, log, opened, control):
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)

        repository = opened(folder, control)

        assert states(repository)[("1", "READY")] == ""
        assert states(repository)[("2", "LOADING")].endswith("(they are at its beginning)")
        publish(log, 1)
        assert is_ready(repository, 2)
        assert versions(repository) == (2,)

    def test_a_polled_repository_serves_it_without_another_look(self, folder, log, opened):
        repository = opened(folder, "poll")
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        repository.poll()
        assert versions(repository) == (1,)

        publish(log, 1)

        assert is_ready(repository, 2)

    def test_versions_that_come_while_one_waits_do_not_keep_it_from_serving(self, folder, log, opened):
        repository = opened(folder, "poll")
        for version in (2, 3):
            SECOND.write_dense(folder, version=version, positions={"folder": str(version - 1)}, run=RUN)
            repository.poll()
        publish(log, 1)
        assert is_ready(repository, 2)
        assert versions(repository) == (2,)
        assert ("3", "LOADING") in states(repository)

        publish(log, 2)

        assert is_ready(repository, 3)
        assert versions(repository) == (3,)

    def test_a_version_that_is_not_wanted_any_more_stops_waiting(self, folder, log, opened):
        repository = opened(folder)
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        repository.load_model("tiny")

        repository.load_model("tiny", VersionPolicy.of_versions([1]))

        assert states(repository) == {("1", "READY"): ""}

    def test_new_files_of_a_version_that_waits_take_its_place(self, folder, log, opened):
        repository = opened(folder)
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        repository.load_model("tiny")
        shutil.rmtree(folder / "tiny" / "2")
        THIRD.write_dense(folder, positions={"folder": "2"}, run=RUN)
        repository.load_model("tiny")
        publish(log, 1)
        publish(log, 1)

        assert is_ready(repository, 2)

        assert_answers(repository, THIRD, changed=1)

    def test_an_unload_ends_the_wait(self, folder, log, opened):
        repository = opened(folder)
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        repository.load_model("tiny")

        repository.unload_model("tiny")

        assert set(states(repository)) == {("1", "UNAVAILABLE"), ("2", "UNAVAILABLE")}
        repository.load_model("tiny")
        assert set(states(repository)) == {("1", "READY"), ("2", "LOADING")}

    def test_positions_that_the_base_includes_need_no_log(self, folder, opened):
        shutil.rmtree(folder)
        FIRST.write(folder, "tiny", 1, run=RUN, positions={"folder": "7"})
        SECOND.write_dense(folder, positions={"folder": "7"}, run=RUN)

        assert versions(opened(folder)) == (2,)

    def test_a_position_that_is_never_reached_without_a_log_is_refused(self, folder, opened):
        repository = opened(folder)
        SECOND.write_dense(folder, positions={"folder": "7"}, run=RUN)

        expected = r"version 2 needs tables of version 1 at position 7 of folder .* without update_source"
        with pytest.raises(ConfigError, match=expected):
            repository.load_model("tiny")
        assert versions(repository) == (1,)

    def test_a_python_session_opens_when_the_position_is_reached(self, folder, log):
        SECOND.write_dense(folder, positions=publish(log, 1), run=RUN)
        with (
            hotrow.load_model(folder / "tiny", engine="numpy") as session,
            hotrow.load_model(folder / "tiny" / "1", engine="numpy") as base,
        ):
            assert (session.config.version, base.config.version) == (2, 1)
            assert session.embedding_cache.server.models() == (base.config,)
            rows, _ = session.embedding_cache.server.lookup(base.config.full_name(base.config.tables[0]), np.array([1]))
        np.testing.assert_array_equal(rows, np.ones((1, FIRST.dim)))

    def test_a_python_session_is_refused_when_the_updates_have_stopped(self, folder, log):
        SECOND.write_dense(folder, positions={"folder": "2"}, run=RUN)
        publish(log, 1)
        (folder.parent / "log" / "0000000003.update").touch()

        with pytest.raises(StreamError, match=r"version 2 needs its tables at position 2 of folder .* no updates: "):
            hotrow.load_model(folder / "tiny", engine="numpy")


class TestWorkers:
    class Leader:
        """Worker 1 of two, as its repository sees the others."""

        leads = False

        def __init__(self, served):
            self.versions = lambda: served

        def shared(self, ps):
            return ps

    def digests(self, folder, *numbers, name="tiny"):
        manifests = {str(number): folder / name / str(number) / "manifest.json" for number in numbers}
        return {name: {number: sha256_of(file) for number, file in manifests.items()}}

    def test_a_worker_follows_only_when_its_own_tables_have_reached_the_position(
        self, folder, log, opened, monkeypatch
    ):
        worker = opened(folder, peers=self.Leader(self.digests(folder, 1)))
        OTHER.write(folder, "other")
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        wanted = self.digests(folder, 2)
        monkeypatch.setattr(repository_module, "_FOLLOW_TIMEOUT_S", 0.1)

        assert worker.follow(wanted) == ["tiny"]

        assert versions(worker) == (1,)
        assert worker.follow(wanted | {"other": self.digests(folder, 1, name="other")["other"]}) == ["tiny"]
        assert versions(worker, "other") == (1,)
        publish(log, 1)
        assert until(lambda: worker.follow(wanted) == [])
        assert worker.served() == wanted

    def test_a_worker_that_is_told_early_waits_a_moment(self, folder, log, opened):
        worker = opened(folder, peers=self.Leader(self.digests(folder, 1)))
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)

        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(worker.follow, self.digests(folder, 2))
            assert until(lambda: ("2", "LOADING") in states(worker))
            publish(log, 1)
            assert following.result() == []

        assert versions(worker) == (2,)

    def test_a_worker_that_starts_answers_with_the_base_until_then(self, folder, log, opened):
        SECOND.write_dense(folder, positions={"folder": "1"}, run=RUN)
        worker = opened(folder, peers=self.Leader(self.digests(folder, 2)))
        assert versions(worker) == (1,)

        publish(log, 1)

        assert is_ready(worker, 2)
        assert versions(worker) == (2,)

    @pytest.mark.parametrize("answer", ["late", "fault", "serves"])
    def test_rows_of_the_old_version_stay_while_a_worker_serves_it(self, folder, opened, answer):
        class Worker:
            leads = True

            def shared(self, ps):
                return ps

            def versions(self):
                return None

            def follow(self, _):
                if answer == "fault":
                    raise WorkerError(1, "no answer")
                return ["tiny"] if answer == "late" else []

        log = follow(folder, **ROCKSDB)
        repository = opened(folder, "poll", peers=Worker())
        OTHER.write(folder, "tiny", 2, run=RUN)
        SECOND.write_dense(folder, version=3, base=2, positions={"folder": "1"}, run=RUN)
        repository.poll()
        assert versions(repository) == (1,)
        publish(log, 1)
        assert is_ready(repository, 3)
        repository.close()

        with closing(RocksDbStore(folder / "rows", num_threads=1)) as store:
            kept = {name.split("-")[0] for name in store.kept_tables()}
        assert kept == {"tiny@2"} | ({"tiny@1"} if answer != "serves" else set())


def chain(folder):
    SECOND.write_dense(folder)
    return SECOND.write_dense(folder, version=3, base=2)


def circle(folder):
    SECOND.write_dense(folder, base=3, digest="0" * 64)
    return SECOND.write_dense(folder, version=3, base=2)


OTHER_INPUTS = r"version 1, but its graph has another "


def rewritten(model):
    return lambda folder: model.write_dense(folder, version=3)


REFUSED = {
    "chain": (chain, r"version 2, which itself shares those of version 1; name a version with tables"),
    "circle": (circle, r"version 2, which itself shares those of version 3"),
    "itself": (
        lambda folder: SECOND.write_dense(folder, version=3, base=3, digest="0" * 64),
        r"version 3, which itself shares those of version 3",
    ),
    "missing base": (
        lambda folder: SECOND.write_dense(folder, version=3, base=2, digest="0" * 64),
        r"version 2, but .*tiny/2 is missing",
    ),
    "another digest": (
        lambda folder: SECOND.write_dense(folder, version=3, digest="0" * 64),
        r"version 1 with digest 0{64}, but .*tiny/1 has digest [0-9a-f]{64}",
    ),
    "another run": (
        lambda folder: SECOND.write_dense(folder, version=3, run="run-2"),
        r"version 1, which follow the training run 'run-1', but its run is 'run-2'",
    ),
    "other dim": (
        rewritten(TinyModel(dim=5)),
        OTHER_INPUTS + r"tables: expected .*'user', 4.*, found .*'user', 5",
    ),
    "other slots": (
        rewritten(TinyModel(tables={"user": 2, "item": 2})),
        OTHER_INPUTS + r"tables: expected .*'user', 4, 1",
    ),
    "other table": (
        rewritten(TinyModel(tables={"who": 1, "item": 2})),
        OTHER_INPUTS + r"tables: expected .*'user'.*'who'",
    ),
    "other dense features": (
        rewritten(TinyModel(dense_dim=4)),
        OTHER_INPUTS + r"dense_dim: expected 3, found 4",
    ),
    "other batch": (
        rewritten(TinyModel(max_batchsize=32)),
        OTHER_INPUTS + r"max_batchsize: expected 64, found 32",
    ),
    "other keys": (
        rewritten(TinyModel(key_type="I32")),
        OTHER_INPUTS + r"key_type: expected I64, found I32",
    ),
}


class TestRefused:
    @pytest.mark.parametrize(("write", "reason"), REFUSED.values(), ids=REFUSED)
    def test_a_version_that_does_not_fit_its_base_is_refused(self, folder, opened, write, reason):
        repository = opened(folder)
        write(folder)

        with pytest.raises(ModelFileError, match=rf"tiny/3/manifest.json: tables: shares those of {reason}"):
            repository.load_model("tiny")
        assert versions(repository) == (1,)

    def test_a_model_that_ps_json_lists_refuses_it(self, folder):
        write_ps(folder, [listed(folder / "tiny" / "1" / "graph.json", "tiny")])
        SECOND.write_dense(folder)
        reason = "version 2 shares the tables of version 1, which a model that is listed here cannot"
        with pytest.raises(ConfigError, match=rf"ps.json: models: 'tiny': {reason}"):
            read_repository(folder)

    def test_a_graph_whose_manifest_names_other_tables_is_refused_alone(self, folder):
        graph = SECOND.write_dense(folder) / "graph.json"
        entry = listed(graph, "tiny", sparse_files=[str(folder / "tiny" / "1" / name) for name in FIRST.tables])
        ps = write_ps(folder.parent, [entry], name="one.json")
        for read in (lambda: read_repository(ps), lambda: read_inference_config(graph, "tiny")):
            with pytest.raises(ConfigError, match="shares the tables of version 1; only a model repository can serve"):
                read()

    def test_a_version_outside_of_a_version_folder_is_refused(self, folder):
        moved = SECOND.write_dense(folder).rename(folder / "tiny" / "moved")
        with pytest.raises(ModelFileError, match="shares those of version 1, but is in no version folder"):
            read_repository(moved)

    def test_without_its_manifest_a_version_has_no_tables(self, folder):
        version = SECOND.write_dense(folder)
        (version / "manifest.json").unlink()
        with pytest.raises(ModelFileError, match=r"tiny/2/user"):
            read_repository(folder)

    @pytest.mark.parametrize(
        ("tables", "reason"),
        [
            ([], "tables: expected an object"),
            ({"version": 1}, "tables.digest"),
            ({"version": -1, "digest": "0" * 64}, "tables.version"),
            ({"version": 1, "digest": "A" * 64}, "tables.digest: expected 64 hexadecimal digits"),
        ],
    )
    def test_a_wrong_member_of_the_manifest_is_refused(self, folder, tables, reason):
        file = SECOND.write_dense(folder) / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tables": tables}))
        with pytest.raises(ModelFileError, match=reason):
            read_repository(folder)
