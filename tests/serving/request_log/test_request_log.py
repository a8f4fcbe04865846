"""The files of `hotrow serve --log-requests`."""

import errno
import json
import resource
import shutil
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.errors import ConfigError, MissingExtraError, OutputError
from serving.features import read_definition
from serving.model.manifest import write_manifest
from serving.reading import read_batch
from serving.request_log import RequestLog
from serving.request_log.files import LogStream, finish_streams
from serving.request_log.records import RecordForm
from tests.tools.raw_model import FEATURES, LOGGED, VALUES, write_raw_model
from tests.tools.tiny_model import TinyModel, flatten
from training.data.checks import ColumnMap
from training.data.columns import read_parquet
from training.data.opening import open_data
from training.features import FeatureFile
from training.model.document import open_document

ABOUT = ["request_id", "request_sample", "request_time", "model_version", "prediction", "defaulted_keys"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    with hotrow.load_model(write_raw_model(tmp_path_factory.mktemp("raw"))) as session:
        yield session


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = TinyModel().write(tmp_path_factory.mktemp("keyed"))
    with hotrow.load_model(folder) as session:
        yield session


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr("serving.request_log.writer._INTERVAL_S", 0.01)


def opened(folder, share=1.0, max_bytes=1 << 30, **options):
    return closing(RequestLog(folder, share, max_bytes, **options))


def ask(log, session, values=VALUES, request_id="a7"):
    batch = session.read(values)
    answer = session.predict_batch(batch)
    log.log(session, batch, answer, request_id)
    return answer


def files(folder, suffix=".parquet"):
    return sorted(folder.rglob(f"requests-*{suffix}"))


def rows(folder):
    return pa.concat_tables(pq.read_table(file) for file in files(folder)).to_pylist()


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_each_sample_is_a_row_with_its_features_as_they_came_and_its_answer(raw, tmp_path):
    with opened(tmp_path) as log:
        answer = ask(log, raw, request_id="first")
        ask(log, raw, {"user": ["ü"]}, request_id="second")

    table = pq.read_table(files(tmp_path)[0])
    assert table.column_names == [*ABOUT, *VALUES]
    assert table.slice(0, 3).select(list(VALUES)).to_pydict() == LOGGED
    assert table["request_id"].to_pylist() == ["first"] * 3 + ["second"]
    assert table["request_sample"].to_pylist() == [0, 1, 2, 0]
    assert table["model_version"].to_pylist() == ["1"] * 4
    assert table["defaulted_keys"].to_pylist()[:3] == [answer.defaulted_keys] * 3
    assert table["prediction"].to_numpy()[:3].tobytes() == answer.values.tobytes()
    assert abs(table["request_time"][0].as_py().timestamp() - time.time()) < 3600
    assert table.slice(3).select(["country", "tags", "price"]).to_pylist() == [
        {"country": None, "tags": None, "price": None}
    ]


def test_logged_rows_have_the_same_answers_again(raw, tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "user": rng.integers(-(2**60), 2**60, 60),
        "country": rng.choice(["de", "fr", "日本", "", "x" * 100], 60).tolist(),
        "tags": [rng.choice(["a", "b", ""], size).tolist() for size in rng.integers(0, 9, 60)],
        "seen": [rng.integers(0, 900, size).tolist() for size in rng.integers(0, 9, 60)],
        "member": rng.integers(0, 2, 60),
        "price": np.where(rng.random(60) < 0.2, np.nan, rng.gamma(1, 1e3, 60)),
    }
    with opened(tmp_path) as log:
        answer = ask(log, raw, values)

    logged = pq.read_table(files(tmp_path)[0]).select(list(VALUES))
    assert raw.predict(logged).tobytes() == answer.values.tobytes()


def test_requests_with_keys_are_training_data(keyed, tmp_path):
    model = TinyModel()
    dense, bags = model.sample_requests(20)
    with opened(tmp_path) as log:
        batch = read_batch(keyed.config, dense, *flatten(bags))
        answer = keyed.predict_batch(batch)
        log.log(keyed, batch, answer, "k")

    (file,) = files(tmp_path)
    assert file.parent.name == "tiny"
    table = pq.read_table(file)
    assert table["prediction"].to_numpy().tobytes() == answer.values.tobytes()
    pq.write_table(table.append_column("label", pa.array([0, 1] * 10)), tmp_path / "labelled.parquet")
    columns = ColumnMap(("label",), ("dense_0", "dense_1", "dense_2"), ("user_keys", "item_keys_0", "item_keys_1"))
    (samples,) = read_parquet(tmp_path / "labelled.parquet", columns)
    assert samples.dense.tolist() == dense.tolist()
    assert [bag.tolist() for bag in np.split(samples.bags.keys, samples.bags.row_ptrs[1:-1])] == [*chain(*bags)]


def test_raw_features_are_training_data(raw, tmp_path):
    with opened(tmp_path / "log") as log:
        for number in range(20):
            ask(log, raw, VALUES | {"user": [f"u{number}", "b", None]}, str(number))
    (file,) = files(tmp_path)
    table = pq.read_table(file)
    pq.write_table(table.append_column("clicked", pa.array([0, 1, 1] * 20)), file)
    (tmp_path / "features.json").write_text(json.dumps(FEATURES))

    features = FeatureFile(tmp_path / "features.json", open_document("dcn"), ["clicked"])
    samples = open_data(file.parent, features.document, features=features)
    assert samples.labels[:, 0].tolist() == [0, 1, 1] * 20
    expected = features.reader(VALUES | {"user": ["u19", "b", None]}, 3)
    assert samples[57:].dense.tolist() == expected.dense.tolist()
    assert samples[57:].bags.keys.tolist() == expected.keys.tolist()


def test_keys_by_the_names_of_the_graph_and_keys_by_position_are_the_same_rows(tmp_path):
    folder = TinyModel(dense_dim=1).write(tmp_path / "models")
    graph = json.loads((folder / "graph.json").read_text())
    data = graph["layers"][0]
    data["dense"]["names"] = ["price"]
    for sparse, names in zip(data["sparse"], (["buyer"], ["seen", "shown"]), strict=True):
        sparse["names"] = names
    (folder / "graph.json").write_text(json.dumps(graph))
    (folder / "manifest.json").unlink()
    write_manifest(folder, "tiny", 1)
    with hotrow.load_model(folder) as session, opened(tmp_path / "log") as log:
        ask(log, session, {"price": [0.5], "buyer": [[3]], "seen": [[4, 5]], "shown": [[]]}, "by name")
        batch = read_batch(session.config, [[0.5]], [3, 4, 5], [0, 1, 3, 3])
        log.log(session, batch, session.predict_batch(batch), "by position")

    (file,) = files(tmp_path / "log")
    table = pq.read_table(file)
    assert table.column_names == [*ABOUT, "price", "buyer", "seen", "shown"]
    expected = {"price": 0.5, "buyer": [3], "seen": [4, 5], "shown": []}
    assert table.select(list(expected)).to_pylist() == [expected, expected]


def test_keys_of_a_model_with_features_have_a_folder_of_their_own(raw, tmp_path):
    with opened(tmp_path) as log:
        batch = read_batch(raw.config, [[0.5]], [[1, 2, 3, 4, 5, 6]], None)
        log.log(raw, batch, raw.predict_batch(batch), "k")
        ask(log, raw)

    assert sorted(file.parent.name for file in files(tmp_path)) == ["raw", "raw.keys"]


def test_about_the_requested_share_is_logged(raw, tmp_path):
    with opened(tmp_path, share=0.25) as log:
        batch = raw.read({"user": ["u"]})
        answer = raw.predict_batch(batch)
        for _ in range(4000):
            log.log(raw, batch, answer, "a")

    assert 800 < len(rows(tmp_path)) < 1200  # 1,000, and more than seven standard deviations


def test_only_the_owner_can_read_the_files(raw, tmp_path, fast):
    with opened(tmp_path / "log") as log:
        ask(log, raw)
        until(lambda: files(tmp_path, ".arrow"))
        modes = [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path, ".arrow")]

    assert modes == [0o600]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)] == [0o600]
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700


def test_features_can_be_left_out_but_a_misspelt_name_is_an_error(raw, tmp_path):
    with opened(tmp_path, without=["user", "tags"]) as log:
        log.check([raw])
        ask(log, raw)
    with (
        opened(tmp_path, without=["user", "tag"]) as log,
        pytest.raises(ConfigError, match=r"^--log-without: no served model has the feature 'tag'; .*'tags'"),
    ):
        log.check([raw])

    assert pq.read_table(files(tmp_path)[0]).column_names == [*ABOUT, "country", "seen", "member", "price"]


def test_without_a_loaded_model_the_names_cannot_be_checked(tmp_path, caplog):
    with opened(tmp_path, without=["user"]) as log:
        log.check([])

    assert "no model is loaded yet, so the names of --log-without cannot be checked" in caplog.text


def test_the_keys_of_a_feature_that_is_left_out_are_left_out_too(raw, tmp_path):
    with opened(tmp_path, without=["user", "price"]) as log:
        batch = read_batch(raw.config, [[0.5]], [[1, 2, 3, 4, 5, 6]], None)
        log.log(raw, batch, raw.predict_batch(batch), "k")

    kept = ["country_keys", "tags_keys", "seen_keys", "member_keys"]  # a cross has the user, too
    assert pq.read_table(files(tmp_path)[0]).column_names == [*ABOUT, *kept]


@pytest.mark.parametrize("name", [*ABOUT, "prediction_1"])
def test_no_feature_can_have_the_name_of_a_column_of_the_log(tmp_path, name):
    feature = FEATURES["features"][0] | {"name": name}
    (tmp_path / "features.json").write_text(json.dumps({"format": 1, "features": [feature]}))
    with pytest.raises(ConfigError, match=f"a feature cannot be called '{name}'"):
        read_definition(tmp_path / "features.json")


def killed_copy(raw, folder, copy, requests=3):
    """The stream that a killed process leaves after writing each request by itself, and where each batch ends."""
    ends = []
    with opened(folder) as log:
        for number in range(requests):
            ask(log, raw, request_id=str(number))
            until(lambda number=number: log_written(log) == number + 1)
            (stream,) = files(folder, ".arrow")
            ends.append(stream.stat().st_size)
        copy.mkdir(parents=True)
        shutil.copy(stream, copy)
    return copy / stream.name, ends


def log_written(log):
    return next(sample.value for sample in log.readings() if ("state", "written") in sample.labels)


def test_the_whole_batches_of_a_killed_process_become_a_parquet_file(raw, tmp_path, fast):
    stream, ends = killed_copy(raw, tmp_path / "live", tmp_path / "killed" / "raw")
    content = stream.read_bytes()
    for cut in (*ends, ends[0] + 1, ends[1] + 9, ends[1] + 300, ends[2] - 1):
        stream.write_bytes(content[:cut])
        with opened(tmp_path / "killed"):
            pass
        whole = sum(end <= cut for end in ends)
        assert [row["request_id"] for row in rows(tmp_path / "killed")] == [str(n) for n in range(whole) for _ in "abc"]
        assert files(tmp_path / "killed", ".arrow") == []
        for file in files(tmp_path / "killed"):
            file.unlink()


def test_a_stream_without_whole_rows_is_removed_with_a_warning(tmp_path, caplog):
    (tmp_path / "raw").mkdir()
    stream = tmp_path / "raw" / "requests-20260101T000000Z-00000000.arrow"
    stream.write_bytes(b"\0" * 100)
    with opened(tmp_path):
        pass

    assert not stream.exists()
    assert f"{stream} has no whole rows and is removed" in caplog.text


def test_a_stream_whose_parquet_file_is_complete_is_not_read_twice(raw, tmp_path, fast):
    stream, _ = killed_copy(raw, tmp_path / "live", tmp_path / "killed" / "raw")
    content = stream.read_bytes()
    with opened(tmp_path / "killed"):
        pass
    stream.write_bytes(content)
    with opened(tmp_path / "killed"):
        pass

    assert len(rows(tmp_path / "killed")) == 9
    assert not stream.exists()


def test_the_stream_of_a_running_process_stays(raw, tmp_path, fast):
    with opened(tmp_path) as first:
        ask(first, raw, request_id="1")
        until(lambda: files(tmp_path, ".arrow"))
        with opened(tmp_path, workers=2) as second:
            ask(second, raw, request_id="2")
        assert len(files(tmp_path, ".arrow")) == 1
        ask(first, raw, request_id="3")

    assert sorted(row["request_id"] for row in rows(tmp_path)) == ["1"] * 3 + ["2"] * 3 + ["3"] * 3


@pytest.mark.parametrize(
    "limit", [("_MOST_STREAM_BYTES", 1), ("_MOST_STREAM_AGE_S", -1.0)], ids=["a large stream", "an old stream"]
)
def test_a_parquet_file_is_made(raw, tmp_path, fast, monkeypatch, limit):
    monkeypatch.setattr(f"serving.request_log.log.{limit[0]}", limit[1])
    with opened(tmp_path) as log:
        for count in (1, 2):
            ask(log, raw)
            until(lambda count=count: len(files(tmp_path)) == count)


def test_a_worker_that_tidies_takes_no_stream_that_another_worker_is_making(tmp_path):
    schema, ended = pa.schema([("user", pa.string())]), Event()

    def tidy():
        while not ended.is_set():
            finish_streams(tmp_path, 1 << 30)

    with ThreadPoolExecutor(1) as other:
        tidying = other.submit(tidy)
        try:
            for _ in range(300):
                stream = LogStream(tmp_path / "raw", schema)
                assert stream.is_there
                stream.close()
        finally:
            ended.set()
        tidying.result()


def size_of(path):
    """The size of a file; 0 if the log has removed it."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_the_oldest_files_are_deleted_and_only_those_of_the_log(raw, tmp_path, fast, monkeypatch):
    monkeypatch.setattr("serving.request_log.log._MOST_STREAM_BYTES", 1)
    (tmp_path / "raw").mkdir()
    others = [
        "clicks.parquet",
        "requests-20200101T000000Z-00000000.parquet.bak",
        "requests-20200101T000000Z-0000000g.parquet",
    ]
    for name in others:
        (tmp_path / "raw" / name).write_bytes(b"x" * 100_000)
    link = tmp_path / "raw" / "requests-20200101T000000Z-00000000.parquet"
    link.symlink_to(tmp_path / "raw" / others[0])
    most = 50_000
    with opened(tmp_path, max_bytes=most) as log:
        for number in range(30):
            ask(log, raw, request_id=str(number))
            until(lambda number=number: log_written(log) == number + 1)
            found = [path for path in (tmp_path / "raw").iterdir() if path.name not in others and not path.is_symlink()]
            assert sum(map(size_of, found)) <= most

    link.unlink()  # fails if the log has deleted it
    for name in others:
        (tmp_path / "raw" / name).unlink()
    kept = sorted({int(row["request_id"]) for row in rows(tmp_path)})
    assert kept[-1] == 29
    assert kept[0] > 0


def test_while_the_disk_is_full_requests_are_dropped_and_counted_and_rows_stay_whole(raw, tmp_path, caplog, fast):
    caplog.set_level("INFO", "hotrow.request_log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as log:
        ask(log, raw, request_id="before")
        until(lambda: log_written(log) == 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (files(tmp_path, ".arrow")[0].stat().st_size + 100, hard))
        try:
            for _ in range(2):
                ask(log, raw, request_id="lost")
                until(lambda: "cannot be written" in caplog.text)
            until(lambda: list(log.readings())[1].value == 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ask(log, raw, request_id="after")

    assert [row["request_id"] for row in rows(tmp_path)] == ["before"] * 3 + ["after"] * 3
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", f"{tmp_path} cannot be written, so requests are not logged: File too large"),
        ("WARNING", f"{tmp_path} is written again; 2 requests were dropped"),
        ("INFO", f"2 requests were logged in {tmp_path}; 2 were dropped because the disk was too slow or full"),
    ]


def test_a_stream_that_cannot_be_converted_stays_and_is_logged_once(raw, tmp_path, fast, caplog, monkeypatch):
    monkeypatch.setattr("serving.request_log.log._MOST_STREAM_BYTES", 1)
    monkeypatch.setattr("serving.request_log.log._TIDY_AGAIN_S", 0.0)
    tries = []

    def full(*_, **_options):
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as while_full:
        while_full.setattr("serving.request_log.files.atomic_write", full)
        with opened(tmp_path) as log:
            ask(log, raw)
            until(lambda: len(tries) > 3)
    assert len(files(tmp_path, ".arrow")) == 1
    assert caplog.text.count("cannot convert a stream to Parquet yet: No space left on device") == 1
    with opened(tmp_path):
        pass

    assert len(rows(tmp_path)) == 3


def test_a_log_that_is_too_small_for_its_rows_drops_them(raw, tmp_path, caplog):
    with opened(tmp_path, max_bytes=100) as log:
        ask(log, raw)

    assert files(tmp_path) == []
    assert "bytes and their Parquet file do not fit into the 100 of the log" in caplog.text


def test_rows_that_are_too_large_for_the_log_are_dropped_and_older_files_stay(raw, tmp_path, caplog):
    rng = np.random.default_rng(0)
    large = {"country": [rng.bytes(500).hex() for _ in range(60)]}  # more than half of the log
    with opened(tmp_path, max_bytes=100_000) as log:
        ask(log, raw)
    kept = files(tmp_path)
    with opened(tmp_path, max_bytes=100_000) as log:
        ask(log, raw, large)

    assert files(tmp_path) == kept
    assert files(tmp_path, ".arrow") == []
    assert "bytes and their Parquet file do not fit into the 100,000 of the log" in caplog.text
    assert {dict(reading.labels)["state"]: reading.value for reading in log.readings()} == {"written": 0, "dropped": 1}


def test_a_stream_of_an_earlier_server_with_a_larger_bound_makes_room(raw, tmp_path, fast, caplog):
    stream, _ = killed_copy(raw, tmp_path / "live", tmp_path / "killed" / "raw", requests=6)
    with opened(tmp_path / "killed", max_bytes=8000) as log:
        until(lambda: not stream.exists())
        ask(log, raw, request_id="new")

    assert f"{stream} does not fit into the 8,000 bytes of the log and is removed" in caplog.text
    assert [row["request_id"] for row in rows(tmp_path / "killed")] == ["new"] * 3


def test_requests_without_a_form_are_dropped_and_those_of_other_models_logged(
    raw, keyed, tmp_path, caplog, monkeypatch
):
    def form_of(session, *arguments):
        if session is keyed:
            raise ValueError("a fault of Hotrow")
        return RecordForm(session, *arguments)

    monkeypatch.setattr("serving.request_log.log.RecordForm", form_of)
    caplog.set_level("INFO")
    dense, bags = TinyModel().sample_requests(1)
    with opened(tmp_path) as log:
        batch = read_batch(keyed.config, dense, *flatten(bags))
        log.log(keyed, batch, keyed.predict_batch(batch), "lost")
        ask(log, raw)

    assert len(rows(tmp_path)) == 3
    assert "requests are not logged: a fault of Hotrow" in caplog.text
    assert f"1 requests were logged in {tmp_path}; 1 were dropped" in caplog.text


def test_requests_are_dropped_if_too_many_bytes_wait_for_the_disk(raw, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("serving.request_log.writer._MOST_WAITING_BYTES", 10_000)
    caplog.set_level("INFO")
    with opened(tmp_path) as log:
        ask(log, raw)
        ask(log, raw, VALUES | {"user": ["u" * 20_000] * 3})

    assert len(rows(tmp_path)) == 3
    assert "1 requests were logged" in caplog.text
    assert "1 were dropped because the disk was too slow or full" in caplog.text


def test_rows_after_the_folder_was_removed_are_in_a_new_file(raw, tmp_path, fast):
    with opened(tmp_path / "log") as log:
        ask(log, raw, request_id="1")
        until(lambda: log_written(log) == 1)
        shutil.rmtree(tmp_path / "log")
        ask(log, raw, request_id="2")

    assert [row["request_id"] for row in rows(tmp_path / "log")] == ["2"] * 3


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"^--log-requests: .*/file/log cannot be written: Not a directory"):
        RequestLog(tmp_path / "file" / "log", 1.0, 1 << 30)


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"--log-requests needs .* pip install 'hotrow\[features\]'"):
        RequestLog(tmp_path, 1.0, 1 << 30)
