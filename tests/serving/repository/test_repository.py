"""The models that a repository serves, and the errors for models that it cannot serve."""

import json
import logging
import re
import shutil
import uuid

import numpy as np
import pytest

from kernels.errors import DeviceUnavailableError
from serving.errors import ConfigError, ModelFileError, UnknownModelError
from serving.lookup import devices
from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.serving.ps_files import listed, write_ps
from tests.serving.table_names import with_digests
from tests.tools.tiny_model import TinyModel, flatten


@pytest.fixture
def loaded():
    """Load repositories; all are closed when the test ends."""
    opened = []

    def load(path, **options):
        opened.append(ModelRepository(path, Runtime(**options)))
        opened[-1].load()
        return opened[-1]

    yield load
    for repository in opened:
        repository.close()


def probabilities(session, model, seed=0):
    """Return the session's answers and the expected answers for the same random samples."""
    dense, bags = model.sample_requests(5, seed)
    keys, row_ptrs = flatten(bags)
    return session.predict(dense, keys, row_ptrs), model.probabilities(dense, bags)


def assert_serves(session, model):
    answered, expected = probabilities(session, model)
    np.testing.assert_allclose(answered, expected, atol=2e-6)


def in_ps(version, **said):
    """The entry of a version in ps.json."""
    return listed(version / "graph.json", version.parent.name, **{"gpucache": False, "max_batch_size": 3, **said})


def test_what_a_version_must_release_is_released_also_after_its_end(tmp_path):
    TinyModel().write(tmp_path)
    released = []
    with ModelRepository(tmp_path) as repository:
        repository.load()
        version = repository.loaded("tiny")
        version.on_close(lambda: released.append("with the version"))
    version.on_close(lambda: released.append("late"))

    assert released == ["with the version", "late"]


def test_the_load_of_a_table_is_reported_batch_by_batch_and_logged_with_its_rows(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("serving.parameter_server.loading.LOAD_BATCH_ROWS", 400)
    caplog.set_level(logging.INFO)
    TinyModel().write(tmp_path)
    reported = []

    with ModelRepository(tmp_path) as repository:
        repository.load(lambda *progress: reported.append(progress))

    tables = [with_digests(table, tmp_path) for table in ("tiny@1.user", "tiny@1.item")]
    assert reported == [(f"{table} into memory", done, 1000) for table in tables for done in (400, 800, 1000)]
    for table in tables:
        assert re.search(rf"loaded {table} into memory: read 1,000 rows in \d+\.\d s", caplog.text)


class TestServedModels:
    def test_the_newest_version_of_every_model(self, tmp_path, loaded):
        newest, other = TinyModel(seed=1), TinyModel(seed=2)
        TinyModel(seed=3).write(tmp_path, "a", 9)
        newest.write(tmp_path, "a", 10)
        other.write(tmp_path, "b", 1)

        repository = loaded(tmp_path)

        assert sorted(repository.models()) == ["a", "b"]
        assert repository.session("a").config.version == 10
        assert_serves(repository.session("a", "10"), newest)
        assert_serves(repository.session("b"), other)

    @pytest.mark.parametrize("engine", ["numpy", "onnx"])
    def test_with_either_engine(self, tmp_path, loaded, engine):
        TinyModel().write(tmp_path)

        assert_serves(loaded(tmp_path, engine=engine).session("tiny"), TinyModel())

    def test_hidden_folders_files_and_folders_without_versions_are_ignored(self, tmp_path, loaded):
        TinyModel().write(tmp_path)
        TinyModel(seed=1).write(tmp_path, ".hidden")
        (tmp_path / "tiny" / ".2.tmp").mkdir()
        (tmp_path / "tiny" / "config.pbtxt").write_text("")
        (tmp_path / "notes").mkdir()
        (tmp_path / "README").write_text("")

        repository = loaded(tmp_path)

        assert list(repository.models()) == ["tiny"]
        assert repository.session("tiny").config.version == 1

    def test_a_folder_without_a_graph_is_not_a_version(self, tmp_path, loaded):
        TinyModel().write(tmp_path)
        (tmp_path / "tiny" / "2").mkdir()

        assert loaded(tmp_path).session("tiny").config.version == 1

    def test_the_tiers_of_ps_json_hold_the_rows(self, tmp_path, loaded):
        TinyModel().write(tmp_path)
        write_ps(
            tmp_path,
            volatile_db={"type": "hash_map", "capacity_rows": 50},
            persistent_db={"type": "rocks_db", "path": "rows"},
        )

        repository = loaded(tmp_path)
        assert_serves(repository.session("tiny"), TinyModel())

        counts = {
            (reading.name, dict(reading.labels).get("tier")): reading.value
            for reading in repository.readings()
            if dict(reading.labels).get("table") == "item"
        }
        assert counts["hotrow_tier_hits", "rocksdb"] == counts["hotrow_tier_misses", "memory"] > 0
        assert (
            counts["hotrow_tier_hits", "memory"] + counts["hotrow_tier_misses", "memory"]
            == counts["hotrow_lookup_keys", None]
        )
        assert counts["hotrow_tier_misses", "rocksdb"] == counts["hotrow_defaulted_keys", None] == 0
        hits, misses = (counts[f"hotrow_tier_{kind}", "memory"] for kind in ("hits", "misses"))
        assert counts["hotrow_tier_hit_ratio", "memory"] == pytest.approx(hits / (hits + misses))
        assert counts["hotrow_tier_hit_ratio", "rocksdb"] == 1
        assert (tmp_path / "rows").is_dir()

    @pytest.mark.parametrize("folder", ["tiny", "tiny/1"], ids=["a model", "a version"])
    def test_the_folder_of_one_model_uses_the_tiers_of_its_repository(self, tmp_path, loaded, folder):
        TinyModel().write(tmp_path)
        TinyModel(seed=1).write(tmp_path, "other")
        write_ps(tmp_path, persistent_db={"type": "rocks_db", "path": "rows"})

        repository = loaded(tmp_path / folder)

        assert list(repository.models()) == ["tiny"]
        assert repository.session("tiny").config.version == 1
        assert_serves(repository.session("tiny"), TinyModel())
        assert (tmp_path / "rows").is_dir()

    def test_settings_of_a_model_in_ps_json_apply(self, tmp_path, loaded):
        directory = TinyModel().write(tmp_path)
        write_ps(tmp_path, [in_ps(directory, default_value_for_each_table=[0.5, 0.25])])

        config = loaded(tmp_path).session("tiny").config

        assert config.version == 1
        assert config.max_batchsize == 3
        assert [table.default_value for table in config.tables] == [0.5, 0.25]

    def test_a_repository_can_be_loaded_again_after_it_was_closed(self, tmp_path, loaded):
        TinyModel().write(tmp_path)
        repository = loaded(tmp_path)
        repository.close()
        assert not repository.models()

        repository.load()

        assert_serves(repository.session("tiny"), TinyModel())

    def test_the_description_names_models_memory_and_tiers(self, tmp_path, loaded):
        TinyModel().write(tmp_path)

        lines = list(loaded(tmp_path).describe())

        assert lines[0].startswith("model tiny version 1: 0.1 MiB, tables user [1 x 4], item [2 x 4]")
        assert lines[1] == "tiers memory"

    def test_the_description_may_come_after_a_file_is_removed(self, tmp_path, loaded):
        TinyModel().write(tmp_path)
        repository = loaded(tmp_path)
        shutil.rmtree(tmp_path / "tiny")

        assert next(iter(repository.describe())).startswith("model tiny version 1: 0.1 MiB")

    def test_the_description_separates_files_and_shared_memory_from_ram(self, tmp_path, loaded):
        TinyModel(rows=20_000, dim=16).write(tmp_path)  # two tables of 1.2 MiB of rows and 0.2 MiB of keys
        name = f"hotrow-test-{uuid.uuid4().hex}"
        tiers = [
            {"type": "snapshot", "path": str(tmp_path / "files")},
            {"type": "multi_process_hash_map", "shared_memory_name": name, "shared_memory_size": 2**26},
        ]
        (tmp_path / "files").mkdir()
        lines = []
        for tier in tiers:
            write_ps(tmp_path, volatile_db=tier)
            lines.append(next(iter(loaded(tmp_path).describe())))

        whole = r"model tiny version 1: [\d.]+ KiB and ([\d.]+) MiB of {}, tables user \[1 x 16\], item \[2 x 16\]"
        for line, place in zip(lines, ("mapped files", "shared memory"), strict=True):
            (mebibytes,) = re.fullmatch(whole.format(place), line).groups()
            assert 2.7 <= float(mebibytes) <= 8

    def test_models_without_a_gpu_are_logged_once(self, tmp_path, loaded, caplog, write_model, monkeypatch):
        def open_device(name):
            raise DeviceUnavailableError(f"{name}: there are 0 GPUs")

        monkeypatch.setattr(devices, "open_device", open_device)
        model = write_model()
        entries = [listed(model.config_file, name) for name in ("a", "b")]

        with caplog.at_level(logging.INFO):
            loaded(write_ps(tmp_path, entries), device="auto")

        told = [record.getMessage() for record in caplog.records if "no GPU is used" in record.getMessage()]
        assert told == [
            "no GPU is used: auto: there are 0 GPUs",
            "models 'a', 'b': gpucache is true, but no GPU is used: their tiers answer alone",
        ]

    def test_the_description_counts_the_memory_that_the_tiers_were_given(self, tmp_path, loaded):
        TinyModel(rows=100_000, dim=16).write(tmp_path)  # two tables of 6 MiB of rows
        limit = {"type": "hash_map", "capacity_bytes": 2**20}
        write_ps(tmp_path, volatile_db=limit, persistent_db={"type": "rocks_db", "path": "rows"})

        lines = list(loaded(tmp_path).describe())

        assert float(lines[0].partition(": ")[2].partition(" MiB")[0]) == pytest.approx(1.0, abs=0.1)
        assert lines[1] == "tiers memory, rocksdb"

    @pytest.mark.parametrize("row_dtype", ["fp16", "int8"])
    def test_narrow_rows_give_the_same_answers_from_ram_and_from_the_disk(self, tmp_path, loaded, row_dtype):
        answers = {}
        for name, tier in {
            "exact": {},
            "ram": {"row_dtype": row_dtype},
            "disk": {"row_dtype": row_dtype, "capacity_rows": 100},
            "narrow disk": {"row_dtype": row_dtype, "capacity_rows": 100},
        }.items():
            TinyModel().write(tmp_path / name)
            form = {"row_dtype": row_dtype} if name == "narrow disk" else {}
            disk = {"persistent_db": {"type": "rocks_db", "path": "rows", **form}} if name.endswith("disk") else {}
            write_ps(tmp_path / name, volatile_db={"type": "hash_map", **tier}, **disk)
            session = loaded(tmp_path / name).session("tiny")
            assert [table.row_dtype for table in session.config.tables] == [tier.get("row_dtype", "fp32")] * 2
            answers[name], expected = probabilities(session, TinyModel())

        assert answers["ram"].tobytes() == answers["disk"].tobytes() != answers["exact"].tobytes()
        assert answers["narrow disk"].tobytes() == answers["ram"].tobytes()
        np.testing.assert_allclose(answers["ram"], expected, atol=0.02)

    def test_a_capacity_per_table_holds_for_the_models_of_the_folders(self, tmp_path, loaded):
        TinyModel(rows=1000).write(tmp_path)
        limit = {"type": "hash_map", "capacity_rows_per_table": {"tiny.item": 0}}
        write_ps(tmp_path, volatile_db=limit, persistent_db={"type": "rocks_db", "path": "rows"})

        repository = loaded(tmp_path)

        assert_serves(repository.session("tiny"), TinyModel(rows=1000))


class TestRefusals:
    def refused(self, path, error=ConfigError):
        with pytest.raises(error) as caught, ModelRepository(path) as repository:
            repository.load()
        assert not repository.models()
        return str(caught.value)

    def test_a_capacity_for_a_table_that_no_model_has(self, tmp_path):
        TinyModel().write(tmp_path)
        write_ps(tmp_path, volatile_db={"type": "hash_map", "capacity_rows_per_table": {"tiny.itme": 5}})

        assert "no model has a table 'tiny.itme'; expected some of 'tiny.item', 'tiny.user'" in self.refused(tmp_path)

    def test_a_row_type_for_a_table_that_no_model_has(self, tmp_path):
        TinyModel().write(tmp_path)
        write_ps(tmp_path, volatile_db={"type": "hash_map", "row_dtype_per_table": {"tiny.itme": "int8"}})

        assert "volatile_db.row_dtype_per_table: no model has a table 'tiny.itme'" in self.refused(tmp_path)

    def test_an_error_says_which_model_it_is_about(self, tmp_path):
        (TinyModel().write(tmp_path) / "dense.model").write_bytes(b"")

        with pytest.raises(ModelFileError) as caught, ModelRepository(tmp_path) as repository:
            repository.load()

        assert caught.value.model == "tiny"
        assert caught.value.__notes__ == ["model 'tiny'"]  # a traceback shows it once

    def test_a_folder_that_does_not_exist(self, tmp_path):
        assert "nowhere: no such file or folder" in self.refused(tmp_path / "nowhere")

    def test_a_name_that_no_file_can_have(self, tmp_path):
        assert "cannot be read: File name too long" in self.refused(tmp_path / ("x" * 300))

    @pytest.mark.parametrize("content", ["[]", "{}", '{"layers": []}'], ids=["a list", "nothing", "a training graph"])
    def test_a_file_that_is_not_a_configuration(self, tmp_path, content):
        (tmp_path / "x.json").write_text(content)

        assert "x.json: expected an inference JSON (with 'inference') or a ps.json" in self.refused(tmp_path / "x.json")

    @pytest.mark.parametrize(
        ("document", "reason"),
        [
            ({"supportlonglong": True, "modles": []}, "modles: unknown key; did you mean 'models'?"),
            ({"volatile_bd": {}}, "(with 'models'); did you mean 'volatile_db'?"),
            ({"inferense": {}, "layers": []}, "(with 'models'); did you mean 'inference'?"),
        ],
        ids=["with another key of ps.json", "alone", "inference"],
    )
    def test_a_file_whose_only_keys_are_misspelt(self, tmp_path, document, reason):
        (tmp_path / "x.json").write_text(json.dumps(document))

        assert self.refused(tmp_path / "x.json").endswith(reason)

    def test_a_ps_json_without_models_and_without_folders_next_to_it(self, tmp_path):
        write_ps(tmp_path)

        assert "no model in it" in self.refused(tmp_path / "ps.json")

    def test_one_broken_model_among_good_ones(self, tmp_path):
        TinyModel().write(tmp_path, "good")
        broken = TinyModel().write(tmp_path, "zebra")
        (broken / "item" / "key").write_bytes(b"123")

        assert "zebra/1/item/key" in self.refused(tmp_path, ModelFileError)

    def test_a_model_in_ps_json_that_has_no_folder(self, tmp_path):
        directory = TinyModel().write(tmp_path)
        write_ps(tmp_path, [in_ps(directory, model="other")])

        assert "ps.json: models: lists 'other', which has no folder" in self.refused(tmp_path)

    def test_a_model_in_ps_json_that_names_the_files_of_another_version(self, tmp_path):
        old = TinyModel().write(tmp_path, version=1)
        TinyModel(seed=1).write(tmp_path, version=2)
        write_ps(tmp_path, [in_ps(old)])

        message = self.refused(tmp_path)

        assert "tiny/1/graph.json" in message
        assert "tiny/2/graph.json" in message
        assert "version 2" in message

    def test_a_folder_whose_key_type_contradicts_ps_json(self, tmp_path):
        TinyModel(key_type="I32").write(tmp_path)
        write_ps(tmp_path)

        assert "supportlonglong: means I64 keys" in self.refused(tmp_path)

    def test_a_model_in_ps_json_with_another_key_type(self, tmp_path):
        directory = TinyModel(key_type="I32").write(tmp_path)
        write_ps(tmp_path, [in_ps(directory)])

        assert "supportlonglong: means I64 keys" in self.refused(tmp_path)

    def test_an_unknown_model(self, tmp_path, loaded):
        TinyModel().write(tmp_path, "a")
        TinyModel().write(tmp_path, "b")

        with pytest.raises(UnknownModelError, match=r"no model 'c' is served; there is 'a', 'b'"):
            loaded(tmp_path).session("c")

    @pytest.mark.parametrize("version", ["2", "01", "-1", "x"])
    def test_a_version_that_is_not_served(self, tmp_path, loaded, version):
        TinyModel().write(tmp_path)

        with pytest.raises(UnknownModelError, match=f"no version '{version}' of model 'tiny'.* there is version 1"):
            loaded(tmp_path).session("tiny", version)
