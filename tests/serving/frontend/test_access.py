"""Who may do what: the table of routes, tokens, and what browsers send. No server runs here."""

import errno
import hashlib
import json
import os
import stat
import threading
from contextlib import closing

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from serving.cli.main import main
from serving.errors import ConfigError, ForbiddenError, UnauthenticatedError, UnknownRouteError
from serving.frontend.access import ANY, CONTROL, INFER, METRICS, OPEN, Access, method_needs, path_needs
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.frontend.tokens import SCOPES, Tokens
from serving.frontend.watched_files import WatchedFiles
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import TinyModel

PATHS = {
    OPEN: ["/", "/v2/health/live", "/v2/health/ready", "/ping"],
    ANY: [
        "/v2",
        "/v2/models/{model}",
        "/v2/models/{model}/config",
        "/v2/models/{model}/ready",
        "/v2/models/{model}/versions/{version}",
        "/v2/models/{model}/versions/{version}/config",
        "/v2/models/{model}/versions/{version}/ready",
        "/v2/repository/index",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    ],
    INFER: [
        "/predict/{model}",
        "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}/infer",
        "/invocations",
    ],
    METRICS: [
        "/metrics",
        "/status",
        "/v2/models/stats",
        "/v2/models/{model}/stats",
        "/v2/models/{model}/versions/{version}/stats",
    ],
    CONTROL: [
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/{model}/trace/setting",
        *(
            f"/v2/{kind}sharedmemory/{rest}"
            for kind in ("system", "cuda")
            for rest in (
                "status",
                "unregister",
                "region/{name}/status",
                "region/{name}/register",
                "region/{name}/unregister",
            )
        ),
    ],
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    TinyModel().write(folder, "tiny")
    with ModelRepository(folder) as repository:
        repository.load()
        yield repository


@pytest.fixture(scope="module")
def app(repository):
    return create_app(FrontEnd(repository))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens.json"


def write(file, **tokens):
    """A file of the given tokens: name=(token, scopes)."""
    document = {
        name: {"sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": scopes}
        for name, (token, scopes) in tokens.items()
    }
    file.write_text(json.dumps(document))


class TestTable:
    def test_every_route_of_the_openapi_document_is_in_the_table_and_nothing_else_is(self, app):
        served = set(Client(app).get("/openapi.json").json()["paths"])
        of_the_page_and_its_document = {"/", "/docs", "/docs/oauth2-redirect", "/openapi.json"}

        assert served == {path for paths in PATHS.values() for path in paths} - of_the_page_and_its_document

    @pytest.mark.parametrize(("need", "path"), [(need, path) for need, paths in PATHS.items() for path in paths])
    def test_a_path_needs_its_scope(self, need, path):
        path = path.format(model="trace", version="7", name="a b")

        assert path_needs(path, path.encode()) == need

    def test_every_method_of_the_grpc_services_is_in_the_table(self):
        files = (service_pb2, health_pb2, reflection_pb2)
        for service in (service for file in files for service in file.DESCRIPTOR.services_by_name.values()):
            for method in service.methods:
                if method.name != "List":  # of newer health protocols; not offered
                    assert method_needs(f"/{service.full_name}/{method.name}") in (OPEN, ANY, *SCOPES)

    @pytest.mark.parametrize("method", ["/inference.GRPCInferenceService/Other", "/other.Service/ServerLive", ""])
    def test_a_method_that_is_not_in_the_table_does_not_exist(self, method):
        with pytest.raises(UnknownRouteError):
            method_needs(method)

    @pytest.mark.parametrize(
        "path",
        [
            "/v2/",
            "/v2/models/tiny/",
            "//v2",
            "//evil.example/v2/",
            "/V2",
            "/v2/./logging",
            "/v2/models/../logging",
            "/v2/logging;a",
            "/v2/models/tiny/other",
            "/v2/repository/models/tiny/load/more",
            "*",
            "",
        ],
    )
    def test_a_path_that_is_not_in_the_table_does_not_exist(self, app, path):
        with pytest.raises(UnknownRouteError):
            path_needs(path, path.encode())

    @pytest.mark.parametrize(
        "path",
        [
            "/v2%2Frepository%2Fmodels%2Ftiny%2Funload",
            "/v2/repository/models/tiny%2funload",
            "/v2/repository/models/tiny/%75nload",
            "/v2/repository/models/tiny/unloa%64",
            "/v2/%6cogging",
            "/v2/models/%2E%2E/logging",
            "/v2/models/a%2Fb/infer",
            "/predict%2ftiny",
        ],
    )
    def test_a_path_with_encoded_plain_characters_is_not_routed(self, app, path):
        answer = Client(app).ask("POST", path)

        assert answer.status_code == 404
        assert answer.json()["error"].startswith(f"{path}: no such path: a path must not encode letters, digits")

    def test_other_characters_of_a_name_may_be_encoded(self, app):
        assert "no model 'a b'" in Client(app).get("/v2/models/a%20b").json()["error"]

    def test_no_answer_redirects_to_a_host_that_the_client_wrote(self, app):
        for path in ("/v2/", "/v2/models/tiny/", "/docs/"):
            assert Client(app).ask("GET", path, headers={"Host": "localhost"}).status_code == 404


class TestListener:
    """A server without tokens."""

    @pytest.mark.parametrize("address", ["", "127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
    def test_control_is_open_where_only_this_machine_can_reach_it(self, address):
        assert Access(None, address).check(CONTROL, None) == ""

    @pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "fe80::1", "::ffff:192.0.2.1", "h" * 64])
    def test_control_is_closed_beyond_loopback_and_the_error_names_the_options(self, address):
        access = Access(None, address)

        with pytest.raises(ForbiddenError, match=r"--tokens FILE.*--host 127.0.0.1 or --uds") as refused:
            access.check(CONTROL, None)
        assert address in str(refused.value)
        for need in (OPEN, ANY, INFER, METRICS):
            assert access.check(need, None) == ""


class TestBrowsers:
    LOCAL = Access(None, "127.0.0.2", "Hotrow.Example")

    @pytest.mark.parametrize(
        "host",
        [
            b"localhost",
            b"LOCALHOST:8000",
            b"127.0.0.1",
            b"127.0.0.2:1",
            b"[::1]:8000",
            b"[::1]",
            b"hotrow.example:80",
            b"a-name-of-this-network",
            b"",
            None,
        ],
    )
    def test_a_host_of_this_machine_is_accepted(self, host):
        self.LOCAL.check_browser("GET", host, None)

    @pytest.mark.parametrize(
        "host",
        [
            b"evil.example",
            b"evil.example:8000",
            b"localhost.evil.example",
            b"127.0.0.1.evil.example",
            b"192.0.2.1",
            b"[::2]:80",
            b"localhost.",
            b"user@evil.example",
            b"[::1].evil.example",
            "\N{LATIN SMALL LETTER E WITH ACUTE}.example".encode(),
        ],
    )
    def test_an_unknown_host_is_refused_on_loopback_without_tokens(self, host):
        with pytest.raises(ForbiddenError, match=r"Host: expected localhost or 127.0.0.2"):
            self.LOCAL.check_browser("GET", host, None)

    def test_any_host_is_accepted_beyond_loopback_on_a_unix_socket_and_with_tokens(self, file):
        write(file, a=("secret", ["infer"]))
        tokens = Tokens(file)
        for access in (Access(None, "0.0.0.0"), Access(None, ""), Access(tokens, "127.0.0.1")):
            access.check_browser("POST", b"evil.example", None)
        tokens.close()

    @pytest.mark.parametrize(
        ("origin", "host"),
        [
            (b"http://localhost:8000", b"localhost:8000"),
            (b"http://localhost", b"localhost"),
            (b"HTTP://Localhost:80", b"localhost"),
            (b"https://api.example", b"api.example"),
            (b"https://api.example", b"api.example:443"),
            (None, b"api.example"),
        ],
    )
    def test_a_page_of_the_server_may_post(self, origin, host):
        Access(None, "0.0.0.0").check_browser("POST", host, origin)

    @pytest.mark.parametrize(
        ("origin", "host"),
        [
            (b"http://evil.example", b"localhost:8000"),
            (b"http://localhost:9000", b"localhost:8000"),
            (b"http://localhost", b"localhost:8000"),
            (b"http://localhost", None),
            (b"null", b"localhost"),
            (b"", b"localhost"),
            (b"localhost", b"localhost"),
            (b"file://", b""),
            (b"ftp://localhost", b"localhost"),
            (b"http://localhost@evil.example", b"localhost"),
            (b"http://localhost http://evil.example", b"localhost"),
        ],
    )
    def test_a_page_of_another_origin_may_not_post(self, origin, host):
        for access in (Access(None, "0.0.0.0"), Access(None, "")):
            with pytest.raises(ForbiddenError, match="Origin: "):
                access.check_browser("POST", host, origin)
            access.check_browser("GET", host, origin)


class TestTokens:
    def test_a_token_has_its_scopes_and_no_others(self, file):
        write(file, one=("s1", ["infer"]), two=("s2", ["control", "metrics"]))
        tokens = Tokens(file)
        access = Access(tokens, "127.0.0.1")

        assert access.check(INFER, "Bearer s1") == "one"
        assert access.check(CONTROL, "bearer  s2 ") == access.check(METRICS, "BEARER s2") == "two"
        assert access.check(ANY, "Bearer s1") == "one"
        assert access.check(OPEN, None) == access.check(OPEN, "Bearer wrong") == ""
        with pytest.raises(
            ForbiddenError, match="the request needs the scope infer; the token 'two' has control, metrics"
        ):
            access.check(INFER, "Bearer s2")
        for need in (ANY, INFER, CONTROL, METRICS):
            with pytest.raises(UnauthenticatedError, match="the token is unknown"):
                access.check(need, "Bearer s3")
        tokens.close()

    @pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "s1", "Basic czE6", "Bearers1"])
    def test_the_error_without_a_token_says_how_to_send_a_token(self, file, authorization):
        write(file, one=("s1", ["infer"]))
        tokens = Tokens(file)

        with pytest.raises(UnauthenticatedError, match="Authorization: Bearer TOKEN"):
            Access(tokens, "127.0.0.1").check(INFER, authorization)
        tokens.close()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "the file is empty"),
            ("[]", "expected an object, got an empty list"),
            ('{"a": "hotrow_secret"}', "a: expected an object with sha256 and scopes"),
            ('{"a": {"scopes": ["infer"]}}', "a.sha256: missing"),
            ('{"a": {"sha256": "hotrow_secret", "scopes": ["infer"]}}', "a.sha256: expected 64 hexadecimal digits"),
            ('{"a": {"sha256": 7, "scopes": ["infer"]}}', "a.sha256: expected 64 hexadecimal digits"),
            ('{"a": {"sha256": "%s"}}' % ("0" * 64), "a.scopes: missing"),
            ('{"a": {"sha256": "%s", "scopes": []}}' % ("0" * 64), "a.scopes: expected a list, got an empty list"),
            ('{"a": {"sha256": "%s", "scopes": ["infr"]}}' % ("0" * 64), 'did you mean "infer"'),
            ('{"a": {"sha256": "%s", "scopes": ["infer"], "x": 1}}' % ("0" * 64), "a.x: unknown key"),
            ('{"a b": {}}', "expected a name of 1 to 64 letters, digits, '.', '_' and '-', got 'a b'"),
            ('{"a": {}, "a": {}}', 'the key "a" appears twice'),
            (
                '{{"a": {0}, "b": {0}}}'.format('{"sha256": "%s", "scopes": ["infer"]}' % ("0" * 64)),
                "b.sha256: this is the token of 'a'",
            ),
            ("\xff", "not UTF-8"),
            (" " * (1 << 20) + "{}", "expected at most 1,048,576 bytes"),
        ],
    )
    def test_an_invalid_token_file_is_refused_without_showing_secrets(self, file, text, expected):
        file.write_bytes(text.encode("latin-1"))

        with pytest.raises(ConfigError) as refused:
            Tokens(file)
        assert str(refused.value).startswith(f"--tokens {file}")
        assert expected in str(refused.value)
        assert "hotrow_secret" not in str(refused.value)

    def test_a_pipe_a_folder_and_a_missing_file_are_refused_at_once(self, file, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            Tokens(file)
        os.mkfifo(file)
        for path in (file, tmp_path):
            with pytest.raises(ConfigError, match=r"not a regular file|cannot be read"):
                Tokens(path)


class TestCommand:
    def test_it_prints_a_token_once_and_keeps_its_sha256(self, file, capsys):
        assert main(["token", str(file), "ranker"]) == 0
        token = capsys.readouterr().out.strip()
        assert main(["token", str(file), "operator", "--scopes", "control,metrics"]) == 0
        other = capsys.readouterr().out.strip()

        assert token != other
        assert len(token) >= 43  # 256 bits in base64
        assert json.loads(file.read_text()) == {
            "ranker": {"sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": ["infer"]},
            "operator": {"sha256": hashlib.sha256(other.encode()).hexdigest(), "scopes": ["control", "metrics"]},
        }
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        tokens = Tokens(file)
        assert Access(tokens, "").check(INFER, f"Bearer {token}") == "ranker"
        tokens.close()

    def test_a_file_keeps_its_mode_and_a_link_stays_a_link(self, file, tmp_path, capsys):
        (tmp_path / "real").write_text("{}")
        (tmp_path / "real").chmod(0o640)
        file.symlink_to(tmp_path / "real")

        assert main(["token", str(file), "a"]) == 0

        assert file.is_symlink()
        assert stat.S_IMODE(file.stat().st_mode) == 0o640

    def test_links_in_a_circle_are_an_error(self, file, capsys):
        file.symlink_to(file.name)

        assert main(["token", str(file), "a"]) == 1

        assert "Too many levels of symbolic links" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["known"], "known: the file has a token with this name"),
            (["a b"], "NAME: expected a name of 1 to 64 letters"),
            ([""], "NAME: expected a name of 1 to 64 letters"),
        ],
    )
    def test_a_name_that_cannot_be_added_changes_nothing(self, file, capsys, arguments, expected):
        write(file, known=("secret", ["infer"]))
        before = file.read_bytes()

        assert main(["token", str(file), *arguments]) == 1

        printed = capsys.readouterr()
        assert expected in printed.err
        assert printed.out == ""
        assert file.read_bytes() == before

    def test_an_unknown_scope_and_a_missing_folder_are_refused(self, file, capsys, tmp_path):
        with pytest.raises(SystemExit):
            main(["token", str(file), "a", "--scopes", "infer,admin"])
        assert "expected infer, control, metrics or several of them, got 'admin'" in capsys.readouterr().err
        assert main(["token", str(tmp_path / "none" / "tokens.json"), "a"]) == 1
        assert "cannot be opened: No such file" in capsys.readouterr().err


def test_a_file_that_could_not_be_used_for_another_reason_than_its_contents_is_used_later(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.frontend.watched_files._INTERVAL_S", 0.01)
    faults, is_used = [OSError(errno.EMFILE, "too many open files")], threading.Event()

    def use(contents):
        if contents == [b"new"]:
            if faults:
                raise faults.pop()
            is_used.set()

    (tmp_path / "file").write_text("old")
    with closing(WatchedFiles({"--file": tmp_path / "file"}, use)):
        (tmp_path / "file").write_text("new")
        assert is_used.wait(60)
