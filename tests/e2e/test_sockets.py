"""A real server on a Unix socket, and with TLS for HTTP and gRPC."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from contextlib import closing

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.cli.main import main
from serving.frontend import tls
from serving.frontend.http.early import EarlyAnswers
from serving.frontend.http.listening import listen
from serving.frontend.http.request_parser import MAX_HEAD_BYTES
from serving.frontend.tls import Tls
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.e2e.test_process import DEADLINE_S, break_weights, is_right, samples_of
from tests.tools.redis_servers import wait_until


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A server's certificate and a client's, each signed by itself: `<name>.pem` with `<name>-key.pem`.

    `old-<name>.pem` has the same key, and expired in 2020.
    """
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nnew_certs_dir=.\nserial=serial\ndefault_md=sha256\npolicy=any\n"
        "unique_subject=no\n[any]\ncommonName=supplied\n"
    )
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    for name in ("server", "client"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command += ["-keyout", folder / f"{name}-key.pem", "-out", folder / f"{name}.pem"]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        key = ["-key", f"{name}-key.pem", "-subj", f"/CN=old {name}", "-out", "request"]
        dates = ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
        signing = ["-config", "ca.cnf", "-batch", "-selfsign", "-keyfile", f"{name}-key.pem", "-in", "request"]
        for step in (["req", "-new", *key], ["ca", *signing, *dates, "-notext", "-out", f"old-{name}.pem"]):
            subprocess.run(["openssl", *step], cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    (folder / "both.pem").write_text((folder / "server.pem").read_text() + (folder / "server-key.pem").read_text())
    encrypt = ["openssl", "pkey", "-in", folder / "server-key.pem", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-out", folder / "locked-key.pem"], check=True, capture_output=True, timeout=DEADLINE_S)
    return folder


def trusting(certificates, client="", server="server"):
    """A client's TLS, which trusts the server and may have a certificate of its own."""
    context = ssl.create_default_context(cafile=certificates / f"{server}.pem")
    if client:
        context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}-key.pem")
    return context


def with_tls(certificates, *options):
    files = ("--ssl-certfile", certificates / "server.pem", "--ssl-keyfile", certificates / "server-key.pem")
    return [str(option) for option in (*files, *options)]


@pytest.fixture
def unix_client(tmp_path):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "hotrow.sock")), base_url="http://x") as client:
        yield client


class TestUnixSocket:
    def test_it_answers_http_and_its_file_goes_with_the_server(self, start, repository, tmp_path, model, unix_client):
        path = tmp_path / "hotrow.sock"
        served = start(repository, "--uds", str(path))
        body, expected = samples_of(model, 3, seed=1)

        assert f"listening on unix:{path}\n" in served.printed
        assert is_right(unix_client.post("/predict/tiny", content=body).content, expected)
        assert served.stop() == 0
        assert not path.exists()

    def test_the_file_of_a_killed_server_is_replaced(self, start, repository, tmp_path, unix_client):
        path = tmp_path / "hotrow.sock"
        start(repository, "--uds", str(path)).stop(signal.SIGKILL)
        assert path.is_socket()

        start(repository, "--uds", str(path))

        assert unix_client.get("/v2/health/live").status_code == 200

    def test_a_socket_of_a_live_server_is_refused_and_still_answers(
        self, hotrow_serve, start, repository, tmp_path, unix_client
    ):
        path = tmp_path / "hotrow.sock"
        start(repository, "--uds", str(path))

        second = hotrow_serve(repository, "--uds", path)

        assert second.returncode == 2
        assert second.stderr == f"hotrow serve: --uds {path}: another server listens on it\n"
        assert unix_client.get("/v2/health/live").status_code == 200

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            pytest.param("file", "exists already, and is not a socket", id="a file"),
            pytest.param("folder", "exists already, and is not a socket", id="a folder"),
            pytest.param("none/s", "cannot listen: No such file or directory", id="no such folder"),
            pytest.param("a" * 200, "cannot listen: AF_UNIX path too long", id="a long path"),
        ],
    )
    def test_a_path_that_cannot_be_bound_is_refused_and_nothing_is_removed(
        self, hotrow_serve, repository, tmp_path, name, expected
    ):
        (tmp_path / "file").write_text("kept")
        (tmp_path / "folder").mkdir()

        done = hotrow_serve(repository, "--uds", tmp_path / name)

        assert done.returncode == 2
        assert done.stderr == f"hotrow serve: --uds {tmp_path / name}: {expected}\n"
        assert (tmp_path / "file").read_text() == "kept"
        assert (tmp_path / "folder").is_dir()


class TestTls:
    def test_http_and_grpc_answer_with_the_certificate(self, start, repository, certificates, model):
        served = start(repository, *with_tls(certificates, "--grpc-port", "0"))
        body, expected = samples_of(model, 3, seed=1)
        arrays, probabilities = request_of(model, 2)
        root = str(certificates / "server.pem")
        grpc_address = re.search(r"listening for gRPC on 127.0.0.1:(\d+)", served.printed)[1]

        assert f"listening on https://{served.host}:{served.port}\n" in served.printed
        with httpx.Client(base_url=f"https://localhost:{served.port}", verify=trusting(certificates)) as client:
            for _ in range(3):  # over one connection
                assert is_right(client.post("/predict/tiny", content=body).content, expected)
            assert "/predict/{model}" in client.get("/openapi.json").text  # more than one TLS record
        with tritonclient.grpc.InferenceServerClient(
            f"localhost:{grpc_address}", ssl=True, root_certificates=root
        ) as client:
            answer = client.infer("tiny", inputs_of(arrays, tritonclient.grpc)).as_numpy("OUTPUT0")
        assert answer == pytest.approx(probabilities, abs=1e-6)
        assert served.stop() == 0
        assert "Traceback" not in served.log.read_text()

    def test_the_certificates_file_may_have_the_key(self, start, repository, certificates):
        served = start(repository, "--ssl-certfile", str(certificates / "both.pem"))

        url = f"https://localhost:{served.port}/v2"
        assert httpx.get(url, verify=trusting(certificates)).status_code == 200

    def test_a_client_without_tls_gets_no_answer_and_the_server_goes_on(self, start, repository, certificates):
        served = start(repository, *with_tls(certificates))

        with served.connect() as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1000) == b""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://localhost:{served.port}/v2")  # does not trust the certificate
        assert httpx.get(f"https://localhost:{served.port}/v2", verify=trusting(certificates)).status_code == 200

    def test_clients_need_a_certificate_if_there_are_authorities(self, start, repository, certificates):
        authorities = certificates / "client.pem"
        served = start(repository, *with_tls(certificates, "--ssl-ca-certs", authorities, "--grpc-port", "0"))
        url = f"https://localhost:{served.port}/v2"
        port = re.search(r"listening for gRPC on 127.0.0.1:(\d+)", served.printed)[1]

        def is_live(*credentials):
            with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(*credentials)) as channel:
                return service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest())

        assert httpx.get(url, verify=trusting(certificates, "client")).status_code == 200
        for stranger in ("", "server"):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=trusting(certificates, stranger))
        root = (certificates / "server.pem").read_bytes()
        key, certificate = (certificates / "client-key.pem").read_bytes(), authorities.read_bytes()
        assert is_live(root, key, certificate).live
        with pytest.raises(grpc.RpcError):
            is_live(root)

    def test_every_worker_uses_new_certificates_and_ignores_broken_certificates(
        self, start, repository, certificates, tmp_path
    ):
        names = {"--ssl-certfile": "server.pem", "--ssl-keyfile": "server-key.pem", "--ssl-ca-certs": "client.pem"}
        files = {option: tmp_path / option for option in names}
        for option, name in names.items():
            shutil.copy(certificates / name, files[option])
        options = [word for option, file in files.items() for word in (option, str(file))]
        served = start(repository, *options, "--workers", "2", "--grpc-port", "0")
        ports = [served.port, int(re.search(r"listening for gRPC on 127.0.0.1:(\d+)", served.printed)[1])]

        def presented(port):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2" if port != served.port else "http/1.1"])
            with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as encrypted:
                return ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True))

        def wait_until(is_so):
            end = time.monotonic() + DEADLINE_S
            while not is_so():
                assert time.monotonic() < end
                time.sleep(0.1)

        def accepts(client):
            try:
                url = f"https://localhost:{served.port}/v2"
                return httpx.get(url, verify=trusting(certificates, client, "client")).status_code == 200
            except httpx.TransportError:
                return False

        shutil.copy(certificates / "client-key.pem", files["--ssl-keyfile"])
        shutil.copy(certificates / "client.pem", files["--ssl-certfile"])
        new = (certificates / "client.pem").read_text()
        wait_until(lambda: {presented(port) for port in ports for _ in range(6)} == {new})
        warning = f"--ssl-certfile {files['--ssl-certfile']}: a certificate expires on 20"
        # By each process at its start, and by each worker when the files were read.
        assert served.log.read_text().count(warning) == 5
        before = served.log.read_text().count("the server continues with the previous contents")
        files["--ssl-certfile"].write_text("no certificate")
        wait_until(
            lambda: served.log.read_text().count("the server continues with the previous contents") == before + 2
        )
        assert {presented(port) for port in ports} == {new}
        assert accepts("client")
        shutil.copy(certificates / "client.pem", files["--ssl-certfile"])
        shutil.copy(certificates / "server.pem", files["--ssl-ca-certs"])
        wait_until(lambda: [accepts(name) for name in ("client", "server") * 3] == [False, True] * 3)

    def test_a_head_that_is_too_large_is_refused_under_tls_too(self, start, repository, certificates):
        served = start(repository, *with_tls(certificates))
        head = b"GET /v2 HTTP/1.1\r\nX: " + b"a" * (2 * MAX_HEAD_BYTES)

        async def answer():
            reader, writer = await asyncio.open_connection(
                "localhost", served.port, ssl=trusting(certificates), family=socket.AF_INET
            )
            writer.write(head)
            first = await reader.read(1000)
            writer.close()
            with contextlib.suppress(OSError):  # the server may have closed the connection already
                await writer.wait_closed()
            return first

        assert asyncio.run(answer()).startswith(b"HTTP/1.1 431 ")
        served.stop()
        assert "Traceback" not in served.log.read_text()

    def test_the_end_of_a_connection_leaves_nothing_in_the_log(self, start, repository, certificates):
        served = start(repository, *with_tls(certificates))
        with served.connect() as plain:
            encrypted = trusting(certificates).wrap_socket(plain, server_hostname="localhost")
            encrypted.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert encrypted.recv(1000).startswith(b"HTTP/1.1 200 ")
            encrypted.unwrap().close()  # ends TLS on both sides
        served.stop()

        assert "eof_received" not in served.log.read_text()
        assert "Traceback" not in served.log.read_text()

    def test_a_unix_socket_may_have_tls(self, start, repository, certificates, tmp_path, monkeypatch, capsys):
        path = tmp_path / "hotrow.sock"
        start(repository, *with_tls(certificates, "--uds", path))

        transport = httpx.HTTPTransport(uds=str(path), verify=trusting(certificates))
        with httpx.Client(transport=transport) as client:
            assert json.loads(client.get("https://localhost/v2").content)["name"] == "hotrow"
        monkeypatch.setenv("HOTROW_UDS", str(path))
        assert main(["ready"]) == 1
        assert "a server with TLS needs https://" in capsys.readouterr().err
        monkeypatch.setenv("HOTROW_SSL_CERTFILE", str(certificates / "both.pem"))
        assert main(["ready"]) == 0

    def test_predict_and_stats_take_a_token_a_private_authority_a_client_certificate_and_a_unix_socket(
        self, start, repository, certificates, tmp_path, model, capsys, monkeypatch
    ):
        path, tokens, samples = tmp_path / "hotrow.sock", tmp_path / "tokens.json", tmp_path / "samples.json"
        body, expected = samples_of(model, 2, seed=3)
        authorities = tmp_path / "authorities.pem"
        authorities.write_text("".join((certificates / f"{age}client.pem").read_text() for age in ("", "old-")))
        samples.write_bytes(body)
        assert main(["token", str(tokens), "both", "--scopes", "infer,metrics"]) == 0
        token = capsys.readouterr().out.strip()
        authority = ("--ssl-ca-certs", authorities)
        served = start(repository, *with_tls(certificates, *authority, "--tokens", tokens, "--uds", path))
        files = [f"--ca-certs={certificates / 'server.pem'}", f"--certfile={certificates / 'client.pem'}"]
        options = [*files, f"--keyfile={certificates / 'client-key.pem'}", f"--uds={path}"]
        predict = ["predict", "tiny", str(samples), "--url=https://localhost"]

        assert main([*predict, *options]) == 1
        assert "a token is needed" in capsys.readouterr().err
        assert main(["stats", "https://localhost", *options]) == 1
        assert "set HOTROW_TOKEN to a token with the scope metrics" in capsys.readouterr().err
        monkeypatch.setenv("HOTROW_TOKEN", token)
        assert main([*predict, *options]) == 0
        printed = [float(line) for line in capsys.readouterr().out.split()]
        assert printed == pytest.approx(np.ravel(expected).tolist(), abs=1e-6)
        assert main(["stats", "https://localhost", *options]) == 0
        assert "tiny" in capsys.readouterr().out
        assert main([*predict, *options[1:]]) == 1  # without the authority
        refused = "the server's certificate is refused: self-signed certificate; --ca-certs FILE names the authorities"
        assert refused in capsys.readouterr().err
        for command in (predict, ["stats", "https://localhost"]):
            assert main([word.replace("https:", "http:") for word in (*command, options[-1])]) == 1
            assert f"{path}: the server closes the connection without an answer" in capsys.readouterr().err
        without, expired = [options[0], options[3]], [options[0], *options[2:]]
        expired.append(f"--certfile={certificates / 'old-client.pem'}")
        for certificate, alert, advice in (
            (without, "certificate required", "it may want a client's certificate: --certfile FILE"),
            (expired, "certificate expired", f"it does not accept --certfile {certificates / 'old-client.pem'}"),
        ):
            reason = f"the server ends TLS with the alert {alert!r}; {advice}"
            assert main([*predict, *certificate]) == 1
            assert capsys.readouterr().err == f"hotrow predict: {path}: {reason}\n"
            assert main(["stats", "https://localhost", *certificate]) == 1
            assert capsys.readouterr().err == f"hotrow stats: {path}: {reason}\n"
        ready = ["ready", "--uds", str(path), "--ssl-certfile"]
        assert main([*ready, str(certificates / "client.pem"), f"--ssl-keyfile={certificates / 'client-key.pem'}"]) == 0
        assert main([*ready, str(certificates / "both.pem")]) == 1  # a certificate of no client
        assert f"it does not accept --ssl-certfile {certificates / 'both.pem'}" in capsys.readouterr().err
        assert f"--ssl-ca-certs {authorities}: a certificate expired on 2020-01-02 00:00 UTC" in served.log.read_text()

    def test_the_answers_before_models_are_loaded_have_tls(self, certificates):
        tls = Tls(certificates / "both.pem", None, None)
        with closing(tls), listen("127.0.0.1", 0) as listener, closing(EarlyAnswers(listener, tls)):
            url = f"https://localhost:{listener.getsockname()[1]}"
            live = httpx.get(f"{url}/v2/health/live", verify=trusting(certificates))
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/v2/health/live")
            ready = httpx.get(f"{url}/v2/health/ready", verify=trusting(certificates))

        assert (live.status_code, ready.status_code) == (200, 503)

    def test_an_expired_certificate_is_logged_at_the_start_and_every_day(self, certificates, caplog, monkeypatch):
        file, key = certificates / "old-server.pem", certificates / "server-key.pem"
        monkeypatch.setattr(tls, "_DAY_S", 0.02)

        with closing(Tls(file, key, None)):
            wait_until(lambda: len(caplog.records) > 2, "the certificate is logged again")

        expected = "a certificate expired on 2020-01-02 00:00 UTC, so TLS connections that need it fail"
        assert {record.getMessage() for record in caplog.records} == {f"--ssl-certfile {file}: {expected}"}

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            pytest.param(
                ["--ssl-certfile", "none.pem"],
                "--ssl-certfile none.pem: cannot be read: No such file or directory",
                id="no certificate file",
            ),
            pytest.param(
                ["--ssl-certfile", "server.pem", "--ssl-keyfile", "none.pem"],
                "--ssl-keyfile none.pem: cannot be read: No such file or directory",
                id="no key file",
            ),
            pytest.param(
                ["--ssl-certfile", "both.pem", "--ssl-ca-certs", "none.pem"],
                "--ssl-ca-certs none.pem: cannot be read: No such file or directory",
                id="no authorities file",
            ),
            pytest.param(["--ssl-keyfile", "both.pem"], "--ssl-keyfile: needs --ssl-certfile", id="a key alone"),
            pytest.param(
                ["--ssl-ca-certs", "both.pem"], "--ssl-ca-certs: needs --ssl-certfile", id="authorities alone"
            ),
            pytest.param(
                ["--ssl-certfile", "server.pem"],
                "--ssl-certfile server.pem: expected a certificate and its key",
                id="a certificate without a key",
            ),
            pytest.param(
                ["--ssl-certfile", "server.pem", "--ssl-keyfile", "client-key.pem"],
                "--ssl-certfile server.pem, --ssl-keyfile client-key.pem: expected a certificate and its key, in PEM "
                "form and without a password: key values mismatch",
                id="another key",
            ),
            pytest.param(
                ["--ssl-certfile", "server.pem", "--ssl-keyfile", "locked-key.pem"],
                "--ssl-certfile server.pem, --ssl-keyfile locked-key.pem: expected a certificate and its key",
                id="a key with a password",
            ),
            pytest.param(
                ["--ssl-certfile", "both.pem", "--ssl-ca-certs", "server-key.pem"],
                "--ssl-ca-certs server-key.pem: expected certificates in PEM form: ",
                id="authorities that are a key",
            ),
        ],
    )
    def test_wrong_files_are_one_clear_line_before_a_model_is_read(
        self, hotrow_serve, tmp_path, model, certificates, options, expected, monkeypatch
    ):
        model.write(tmp_path)
        break_weights(tmp_path)
        monkeypatch.chdir(certificates)

        done = hotrow_serve(tmp_path, "--http-port", "0", *options)

        assert done.returncode == 2
        assert done.stderr.startswith(f"hotrow serve: {expected}")
        assert done.stderr.count("\n") == 1
