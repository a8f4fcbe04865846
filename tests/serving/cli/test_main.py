"""The `hotrow` command line, without a server."""

import contextlib
import json
import os
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from kernels.host import round_rows
from serving.cli.main import main
from serving.model.manifest import write_manifest
from serving.model.sparse_file import write_sparse_directory
from tests.serving.ps_files import listed, write_ps
from tests.tools.tiny_model import TinyModel


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])

    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("hotrow ")


def test_without_a_command_the_help_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])

    assert stopped.value.code == 0
    assert "send samples to a running server" in capsys.readouterr().out


def test_grpc_without_its_extra_is_refused_before_models_are_loaded(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "serving.frontend.grpc", raising=False)

    code = main(["serve", str(tmp_path), "--http-port", "0", "--grpc-port", "0"])

    assert code == 2
    assert "--grpc-port needs the package 'grpc': pip install 'hotrow[grpc]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sample", "0.5"], "--sample: needs --record or --log-requests"),
        (["--log-max-bytes", "1GiB"], "--log-max-bytes: needs --log-requests"),
        (["--log-without", "user"], "--log-without: needs --log-requests"),
        (["--load-model", "tiny"], "--load-model: needs --model-control-mode explicit"),
        (["--http-port", "8123", "--grpc-port", "8123"], "--grpc-port: 8123 is the port of HTTP"),
        (["--sample", "0.5", "--workers", "2"], "--sample: needs --record or --log-requests"),
        (["--repository-poll-secs", "15"], "--repository-poll-secs: needs --model-control-mode poll"),
        (["--max-inflight-per-token", "128"], "--max-inflight-per-token: needs --tokens"),
        (
            ["--max-batch-size", "1", "--max-queue-delay-ms", "2"],
            "--max-queue-delay-ms: needs a --max-batch-size above 1",
        ),
        (["--http-port", "0", "--uds", "h.sock"], "--http-port: has no effect with --uds"),
        (
            ["--host", "127.0.0.1", "--uds", "h.sock"],
            "--host: has no effect with --uds and without --grpc-port",
        ),
        (["--calibration", "one.npz"], "one.npz: is a calibration for the engine int8, but the engine is auto"),
        (["--tolerance", "0.1", "--workers", "2"], "--tolerance: needs the engine int8, but the engine is auto"),
        (["--ssl-keyfile", "key.pem", "--workers", "2"], "--ssl-keyfile: needs --ssl-certfile"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, reason, tmp_path, capfd):
    assert main(["serve", str(tmp_path), *options]) == 2

    assert capfd.readouterr().err == f"hotrow serve: {reason}\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--max-batch-size", "1", "--max-queue-delay-ms", "0", "--port", "0"],
        ["--uds", "h.sock", "--host", "127.0.0.1", "--grpc-port", "0"],
        ["--uds", "h.sock"],
    ],
)
def test_options_that_go_together_reach_the_repository(options, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOTROW_HTTP_PORT", "8000")  # as container images do
    monkeypatch.chdir(tmp_path)

    assert main(["serve", "none", *options]) == 2

    assert capfd.readouterr().err == "hotrow serve: none: no such file or folder\n"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HOTROW_ENGINE", "fast", "argument --engine: expected auto, numpy, onnx or int8, got 'fast'"),
        (
            "HOTROW_HTTP_PORT",
            "x",
            "--http-port/--port: expected a whole number from 0 to 65535, got 'x' in the variable HOTROW_HTTP_PORT",
        ),
        ("HOTROW_LOG_LEVEL", "loud", "argument --log-level: expected debug, info, warning or error, got 'loud'"),
    ],
)
def test_a_wrong_option_in_the_environment_is_refused(monkeypatch, capsys, name, value, expected):
    monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit) as stopped:
        main(["serve", "models"])

    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_variable_without_effect_is_named_and_those_of_others_are_not(monkeypatch, tmp_path, capfd):
    of_others = {
        "HOTROW_TOKEN": "of the client",
        "HOTROW_SERVICE_HOST": "10.0.0.1",  # of Kubernetes, for a service `hotrow`
        "HOTROW_SERVICE_PORT_HTTP": "80",
        "HOTROW_PORT_80_TCP_ADDR": "10.0.0.1",
        "HOTROW_RUNNER_SEED": "1",
    }
    without_effect = {
        "HOTROW_TOKNS": "; did you mean 'HOTROW_TOKENS'?",
        "HOTROW_HTTPPORT": "; did you mean 'HOTROW_HTTP_PORT'?",
        "HOTROW_PORT": "; did you mean 'HOTROW_HOST'?",
        "HOTROW_GRPC": "; did you mean 'HOTROW_GRPC_PORT'?",
        "HOTROW_XYZZY_PLUGH_QUUX": "",
    }
    for name in (*of_others, *without_effect):
        monkeypatch.setenv(name, of_others.get(name, "1"))

    assert main(["serve", str(tmp_path / "none"), "--http-port", "0"]) == 2

    warnings = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    expected = {f"the variable {name} has no effect{hint}" for name, hint in without_effect.items()}
    assert {line.partition("hotrow.server: ")[2] for line in warnings} == expected


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:80", "udp://10.0.0.1:80"])
def test_the_port_of_a_service_of_kubernetes_is_not_reported(monkeypatch, tmp_path, capfd, value):
    monkeypatch.setenv("HOTROW_PORT", value)

    main(["serve", str(tmp_path / "none"), "--http-port", "0"])

    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HOTROW_SAMPLE", "0.5", "HOTROW_SAMPLE or --sample: needs --record or --log-requests"),
        ("HOTROW_LOAD_MODEL", "a,b", "HOTROW_LOAD_MODEL or --load-model: needs --model-control-mode explicit"),
        ("HOTROW_UDS", "/proc/none/s", "HOTROW_UDS or --uds /proc/none/s: cannot listen: No such file or directory"),
        ("HOTROW_SSL_CERTFILE", "none.pem", "HOTROW_SSL_CERTFILE or --ssl-certfile none.pem: "),
    ],
)
def test_a_variable_that_cannot_be_used_is_blamed(monkeypatch, capfd, tmp_path, name, value, expected):
    monkeypatch.setenv(name, value)

    assert main(["serve", str(tmp_path)]) == 2

    assert capfd.readouterr().err.startswith(f"hotrow serve: {expected}")


def test_as_many_requests_run_at_a_time_as_the_container_has_cores(monkeypatch, capsys):
    monkeypatch.setattr("serving.cli.serve.usable_cores", lambda: 3)

    with pytest.raises(SystemExit):
        main(["serve", "--help"])

    assert "in each worker (default: the usable cores, 3 here," in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--fly", "unrecognized arguments: --fly"),
        ("fly", "'fly'"),
        ("serve", "REPO"),
        ("check ''", "argument CONFIG: expected a path, got ''"),
        ("serve ''", "argument REPO: expected a path, got ''"),
        ("predict m ''", "argument FILE: expected a path or -, got ''"),
        ("train --data '' --output x", "argument --data: expected a path, got ''"),
        ("serve x --http-port 70000", "expected a whole number from 0 to 65535, got '70000'"),
        ("serve x --http-port -1", "expected a whole number from 0 to 65535, got '-1'"),
        ("serve x --http-port abc", "expected a whole number from 0 to 65535, got 'abc'"),
        ("serve x --threads 0", "expected a whole number from 1 to 1024, got '0'"),
        ("serve x --threads 1025", "expected a whole number from 1 to 1024, got '1025'"),
        ("serve x --max-inflight 0", "expected a whole number from 1 to 65536, got '0'"),
        ("serve x --max-inflight 65537", "expected a whole number from 1 to 65536, got '65537'"),
        ("serve x --max-body-bytes 1.5", "expected a whole number from 1 to 2147418111, got '1.5'"),
        ("serve x --max-body-bytes 2147418112", "from 1 to 2147418111, got '2147418112'"),
        (f"serve x --max-body-bytes {'9' * 5000}", f"from 1 to 2147418111, got '{'9' * 32}'"),
        ("serve x --engine torch", "'torch'"),
        ("serve x --tolerance 0", "expected more than 0 and at most 1, got '0'"),
        ("serve x --tolerance nan", "expected more than 0 and at most 1, got 'nan'"),
        ("serve x --max-queue-delay-ms -1", "expected a number from 0 to 1,000 milliseconds, got '-1'"),
        ("serve x --max-queue-delay-ms nan", "expected a number from 0 to 1,000 milliseconds, got 'nan'"),
        ("serve x --max-queue-wait-ms 1e9", "expected a number from 0 to 3,600,000 milliseconds, got '1e9'"),
        ("serve x --tolerance much", "expected more than 0 and at most 1, got 'much'"),
        ("check x --tolerance 1.01", "expected more than 0 and at most 1, got '1.01'"),
        ("check x --engine torch", "'torch'"),
        ("export-onnx x", "FILE.onnx"),
        ("predict model", "FILE"),
        ("predict model file --timeout 0", "expected more than 0 and at most 86,400 seconds, got '0'"),
        ("predict model file --timeout -1", "expected more than 0 and at most 86,400 seconds, got '-1'"),
        ("predict model file --timeout nan", "expected more than 0 and at most 86,400 seconds, got 'nan'"),
        ("predict model file --timeout 1e30", "expected more than 0 and at most 86,400 seconds, got '1e30'"),
        ("predict model file --timeout soon", "expected more than 0 and at most 86,400 seconds, got 'soon'"),
        ("check", "CONFIG"),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_command_line_exits_with_2_and_reports_what_was_expected(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(arguments))

    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "usage: hotrow" in error
    assert expected in error


class TestCheck:
    def test_a_repository_prints_every_table_and_the_total(self, tmp_path, capsys):
        TinyModel(rows=100_000, dim=16, tables={"ad": 1}).write(tmp_path, "a")
        TinyModel().write(tmp_path, "b", version=4)

        assert main(["check", str(tmp_path)]) == 0

        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line[:4] for line in lines if line[0] == "model"] == [
            ["model", "a", "version", "1"],
            ["model", "b", "version", "4"],
        ]
        sizes = {line[0]: float(line[-2]) for line in lines if line[0] != "model"}
        assert set(sizes) == {"ad", "user", "item", "dense", "total"}
        # 100,000 rows of 16 floats are 6.1 MiB; keys, buckets and headroom come on top.
        assert 6.1 < sizes["ad"] < 3 * 6.1
        assert sizes["total"] == pytest.approx(sizes["ad"] + sizes["user"] + sizes["item"], abs=0.05)

    @pytest.mark.parametrize("form", ["version directory", "model directory", "inference JSON", "ps.json"])
    def test_every_form_of_configuration_is_checked(self, tmp_path, capsys, form):
        version = TinyModel().write(tmp_path)
        path = {
            "version directory": version,
            "model directory": version.parent,
            "inference JSON": version / "graph.json",
            "ps.json": write_ps(tmp_path, [listed(version / "graph.json", gpucache=False)]),
        }[form]

        assert main(["check", str(path)]) == 0

        out = capsys.readouterr().out
        assert "user" in out
        assert "total" in out

    def test_the_rounding_error_of_narrow_tables_is_printed(self, tmp_path, capsys):
        model = TinyModel(rows=2000, dim=16)
        model.write(tmp_path)
        tier = {"type": "hash_map", "row_dtype_per_table": {"tiny.user": "int8"}}
        write_ps(tmp_path, volatile_db=tier)
        rows = model.vectors("user")
        rounded = rows.copy()
        round_rows(rows, "int8", rounded)
        errors = np.abs(rounded - rows)

        assert main(["check", str(tmp_path)]) == 0

        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
        said = f"int8, off by {errors.mean():.2g} on average and {errors.max():.2g} at most (mean magnitude 0.8)"
        assert lines["user"].endswith(said)
        assert lines["item"].endswith("MiB")
        assert float(lines["user"].split()[1]) < float(lines["item"].split()[1])

    def test_a_row_that_a_narrow_table_cannot_hold_is_refused(self, tmp_path, capsys):
        version = TinyModel().write(tmp_path)
        rows = TinyModel().vectors("user")
        rows[7, 1] = 1e6
        write_sparse_directory(version / "user", np.arange(1000), rows)
        ps = {"supportlonglong": True, "volatile_db": {"type": "hash_map", "row_dtype": "fp16"}}
        (tmp_path / "ps.json").write_text(json.dumps({**ps, "models": []}))
        write_manifest(version, "tiny", 1)

        assert main(["check", str(tmp_path)]) == 1

        assert "of key 7: column 1 is 1000000, which fp16 rows cannot hold" in capsys.readouterr().err

    def test_an_inference_json_may_have_any_file_name(self, tmp_path, capsys):
        version = TinyModel().write(tmp_path)
        (version / "dcn v2.best.json").write_bytes((version / "graph.json").read_bytes())

        assert main(["check", str(version / "dcn v2.best.json")]) == 0

        assert capsys.readouterr().out.startswith("model dcn_v2_best version 1\n")

    def test_a_configuration_that_serve_refuses_is_refused(self, tmp_path, capsys):
        version = TinyModel().write(tmp_path)
        file = write_ps(tmp_path, [listed(version / "graph.json", fp8_quant=True)])

        assert main(["check", str(file)]) == 1

        assert "ps.json: models[0]: fp8_quant: " in capsys.readouterr().err

    @pytest.mark.parametrize("file", ["", "ps.json"])
    @pytest.mark.parametrize(
        ("volatile_db", "expected"),
        [
            ({"type": "hash_map"}, ""),
            ({"type": "hash_map", "capacity_rows": 1500}, "volatile_db.capacity_rows allows 1,500"),
            ({"type": "hash_map", "capacity_bytes": 2**20}, "volatile_db.capacity_bytes allows 1.00 MiB"),
            ({"type": "disabled"}, "volatile_db is disabled, and tables take no memory"),
            ({"type": "redis_cluster"}, "volatile_db is Redis, and tables take no memory here"),
        ],
        ids=["no limit", "rows", "bytes", "no memory tier", "Redis"],
    )
    def test_a_limit_of_memory_is_printed(self, tmp_path, capsys, file, volatile_db, expected):
        TinyModel().write(tmp_path)
        disk = {"type": "rocks_db", "path": "rows"}
        document = {"supportlonglong": True, "volatile_db": volatile_db, "persistent_db": disk}
        (tmp_path / "ps.json").write_text(json.dumps(document))

        assert main(["check", str(tmp_path / file)]) == 0

        out = capsys.readouterr().out
        assert "model tiny version 1" in out
        assert expected in out
        assert ("with every row in RAM" in out) == bool(expected)

    @pytest.mark.parametrize(
        ("write", "expected"),
        [
            pytest.param(lambda path: None, "no such file", id="nothing there"),
            pytest.param(lambda path: path.write_text("{"), "line 1 column 2", id="broken JSON"),
            pytest.param(lambda path: path.write_text("[]"), "expected an inference JSON", id="no object"),
            pytest.param(lambda path: path.write_text('{"layers": []}'), "expected an inference JSON", id="a graph"),
            pytest.param(
                lambda path: path.write_text('{"supportlonglong": true, "models": [{}]}'),
                "models[0].",
                id="an empty model",
            ),
            pytest.param(lambda path: path.mkdir(), "no model in it", id="an empty folder"),
        ],
    )
    def test_a_file_that_is_not_a_configuration_gives_one_line_and_exit_code_1(self, tmp_path, capsys, write, expected):
        path = tmp_path / "config"
        write(path)

        assert main(["check", str(path)]) == 1

        error = capsys.readouterr().err
        assert error.startswith("hotrow check: ")
        assert expected in error
        assert error.count("\n") == 1

    def test_dense_weights_that_do_not_fit_the_graph_are_refused(self, tmp_path, capsys):
        version = TinyModel().write(tmp_path)
        (version / "manifest.json").unlink()
        (version / "dense.model").write_bytes(b"1234")

        assert main(["check", str(tmp_path)]) == 1

        assert "dense.model" in capsys.readouterr().err

    def test_a_repeated_key_is_refused(self, tmp_path, capsys):
        version = TinyModel().write(tmp_path)
        (version / "manifest.json").unlink()
        keys = np.fromfile(version / "user" / "key", np.int64)
        keys[6] = keys[5]
        keys.tofile(version / "user" / "key")

        assert main(["check", str(tmp_path)]) == 1

        assert f"user/key: key {keys[5]} is in row 5 and again in row 6" in capsys.readouterr().err


class Answering(BaseHTTPRequestHandler):
    """Gives the same answer to every request and records the paths."""

    def do_POST(self):
        self.server.paths.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def answering():
    """Start a server that gives this answer. Yield its URL and the requested paths."""
    with contextlib.ExitStack() as stack:

        def start(answer):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Answering))
            server.answer, server.paths = answer, []
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}", server.paths

        yield start


@pytest.fixture
def samples(tmp_path):
    (tmp_path / "samples.json").write_text("{}")
    return str(tmp_path / "samples.json")


class TestPredict:
    @pytest.mark.parametrize(
        ("answer", "lines"),
        [
            ({"outputs": {"a": [0.5, 1], "b": [[1], [3]]}}, ['{"a": 0.5, "b": [1]}', '{"a": 1, "b": [3]}']),
            ({"top": [{"index": 3, "score": 0.5, "id": "a"}]}, ['{"index": 3, "score": 0.5, "id": "a"}']),
        ],
        ids=["outputs", "the best"],
    )
    def test_outputs_and_the_best_candidates_are_lines_of_json(self, answering, samples, capsys, answer, lines):
        url, _ = answering(json.dumps({**answer, "defaulted_keys": 0}).encode())

        assert main(["predict", "m", samples, "--url", url]) == 0
        assert capsys.readouterr().out.splitlines() == lines

    @pytest.mark.parametrize(
        ("defaulted_keys", "expected"),
        [
            (0, ""),
            (1, "hotrow predict: 1 key is unknown to the model: default values were used\n"),
            (7, "hotrow predict: 7 keys are unknown to the model: default values were used\n"),
        ],
    )
    def test_predictions_go_to_stdout_and_unknown_keys_to_stderr(
        self, answering, samples, capsys, defaulted_keys, expected
    ):
        document = {"predictions": [[0.25, 0.5], [0.75, 1]], "defaulted_keys": defaulted_keys, "model_version": "1"}
        url, _ = answering(json.dumps(document).encode())

        assert main(["predict", "m", samples, "--url", url]) == 0

        assert capsys.readouterr() == ("0.25 0.5\n0.75 1\n", expected)

    @pytest.mark.parametrize(
        "answer", [b"", b"[]", b"{}", b'{"predictions": [1]}', b'{"predictions": [], "defaulted_keys": "many"}']
    )
    def test_an_answer_of_another_server_is_an_error(self, answering, samples, capsys, answer):
        url, _ = answering(answer)

        assert main(["predict", "m", samples, "--url", url]) == 1

        assert capsys.readouterr() == ("", f"hotrow predict: {url}: the answer is not Hotrow's\n")

    @pytest.mark.parametrize(
        ("name", "path"), [("a/b", "/predict/a%2Fb"), ("\udcff", "/predict/%FF")], ids=["a slash", "no text"]
    )
    def test_a_models_name_may_have_any_bytes(self, answering, samples, name, path):
        url, paths = answering(b'{"predictions": []}')

        assert main(["predict", name, samples, "--url", url]) == 0

        assert paths == [path]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            pytest.param(["m", "{none}"], "No such file", id="no such file"),
            pytest.param(["m", "/dev/zero"], "/dev/zero: not a regular file", id="an endless file"),
            pytest.param(["m", "{pipe}"], "{pipe}: not a regular file", id="a pipe"),
            pytest.param(["m", "{file}", "--url", "ftp://x"], "expected http://", id="another protocol"),
            pytest.param(["m", "{file}", "--url", "http://127.0.0.1:1"], "Connection refused", id="nobody listens"),
            pytest.param(["m", "{file}", "--url", "http://"], "http://", id="no host"),
            pytest.param(["m", "{file}", "--url", "http://[::1"], "'http://[::1' is not a URL", id="half an address"),
            pytest.param(["m", "{file}", "--url", "http://x:y"], "'y'", id="no port"),
            pytest.param(["m", "{file}", "--url", "http://127.0.0.1:99999"], "out of range 0-65535", id="a large port"),
            pytest.param(["m", "{file}", "--url", f"http://{'h' * 64}"], "is not a URL", id="no host's name"),
            pytest.param(["m", "{file}", "--url", "http://127.0.0.1/\xe9"], "is not a URL", id="no ASCII"),
            pytest.param(["m", "{file}", "--url", "http://u:pw@x"], "the URL has a user", id="a password"),
            pytest.param(["m", "{file}", "--uds", "{none}"], "No such file", id="no socket"),
            pytest.param(["m", "{file}", "--ca-certs", "{file}"], "--ca-certs needs https://", id="no TLS"),
            pytest.param(["m", "{file}", "--keyfile", "{file}"], "--keyfile needs https://", id="no TLS for a key"),
            pytest.param(
                ["m", "{file}", "--url", "https://x", "--ca-certs", "{none}"],
                "--ca-certs {none}: expected certificates in PEM form: No such file",
                id="no authorities",
            ),
            pytest.param(
                ["m", "{file}", "--url", "https://x", "--certfile", "{file}"],
                "--certfile {file}: expected a certificate and its key, in PEM form and without a password\n",
                id="no certificate",
            ),
            pytest.param(
                ["m", "{file}", "--url", "https://x", "--keyfile", "{file}"], "--keyfile needs --certfile", id="a key"
            ),
        ],
    )
    def test_a_request_that_cannot_be_sent_gives_one_line_and_exit_code_1(self, tmp_path, capsys, arguments, expected):
        (tmp_path / "file").write_text("{}")
        places = {"file": tmp_path / "file", "none": tmp_path / "none", "pipe": tmp_path / "pipe"}
        os.mkfifo(places["pipe"])

        assert main(["predict", *(argument.format(**places) for argument in arguments)]) == 1

        error = capsys.readouterr().err
        assert expected.format(**places) in error
        assert "pw" not in error
        assert error.count("\n") == 1

    def test_a_token_that_cannot_be_sent_is_not_shown(self, samples, capsys, monkeypatch):
        monkeypatch.setenv("HOTROW_TOKEN", "secret\r\nX: 1")

        assert main(["predict", "m", samples]) == 1

        assert capsys.readouterr().err == "hotrow predict: HOTROW_TOKEN: expected a token of visible ASCII characters\n"


LONG = "a" * 5000


@pytest.mark.parametrize("arguments", [("plan", LONG), ("plan", "models", LONG), ("check", LONG), ("token", LONG, "a")])
def test_a_path_that_no_file_can_have_is_an_error(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    TinyModel().write(tmp_path / "models", "tiny")

    assert main(arguments) != 0

    error = capsys.readouterr().err
    assert error.startswith(f"hotrow {arguments[0]}: ")
    assert error.endswith("File name too long\n")
    assert len(error) < 300
