"""Who may use Redis, and what goes over the network: users, their rights, TLS."""

import socket
import ssl
import subprocess
import threading

import pytest
from pydantic import ValidationError

from serving.config import RedisConfig, RedisOverflow, RedisTlsConfig
from serving.errors import StoreError
from serving.storage import Marker, RedisStore
from serving.storage.redis.commands import Partition
from serving.storage.redis.connection import RowParser
from tests.serving.storage.redis_stores import IMPATIENT, KEYS, ROWS, SPEC, Truth, fetch, loaded_store, open_store

# As docs/storage.md lists them.
COMMANDS = [
    *("hset", "hsetnx", "hget", "hmget", "hgetall", "hdel", "hlen", "hscan", "hincrby", "hkeys", "hrandfield"),
    *("expire", "pexpire", "persist", "rename", "unlink", "exists", "get", "set", "eval", "info", "cluster|slots"),
]
RIGHTS = [f"+{command}" for command in COMMANDS]


class TestUsers:
    PASSWORD = "correct horse"

    @pytest.fixture
    def guarded(self, redis_server, client):
        """The server with a password for everybody and a user of its own."""
        client.acl_setuser(
            "hotrow", enabled=True, passwords=["+battery staple"], keys=["hps_et*"], categories=["+@all"]
        )
        client.config_set("requirepass", self.PASSWORD)
        yield redis_server
        client.config_set("requirepass", "")
        client.acl_deluser("hotrow")

    @pytest.mark.parametrize("user", [{"password": PASSWORD}, {"user_name": "hotrow", "password": "battery staple"}])
    def test_the_right_password_is_accepted(self, guarded, user):
        fetch(loaded_store(guarded, **user))

    @pytest.mark.parametrize(
        ("user", "reason"),
        [
            ({}, "NOAUTH"),
            ({"password": "wrong secret"}, "refuses user 'default': WRONGPASS"),
            ({"user_name": "hotrow", "password": "wrong secret"}, "refuses user 'hotrow': WRONGPASS"),
            ({"user_name": "nobody", "password": PASSWORD}, "refuses user 'nobody': WRONGPASS"),
        ],
    )
    def test_a_refused_user_is_an_error_at_the_start_without_the_password(self, guarded, user, reason):
        with pytest.raises(StoreError, match=reason) as caught:
            open_store(guarded, **user)

        assert f"127.0.0.1:{guarded.port}" in str(caught.value)
        assert user.get("password", "wrong secret") not in str(caught.value)

    def test_the_error_names_the_right_that_a_user_does_not_have(self, guarded, client):
        client.execute_command("ACL", "SETUSER", "hotrow", "-hmget")
        store = open_store(guarded, user_name="hotrow", password="battery staple")
        store.table(SPEC).open(0)

        with pytest.raises(StoreError, match=r"NOPERM.*hmget"):
            fetch(store)

    def test_the_error_at_the_start_names_the_right_that_the_nodes_identity_needs(self, guarded, client):
        client.execute_command("ACL", "SETUSER", "hotrow", "-info")

        for _ in range(2):
            with pytest.raises(StoreError, match=r"NOPERM.*'info'.*needs the right \+info"):
                open_store(guarded, user_name="hotrow", password="battery staple")

    def test_these_rights_are_enough(self, guarded, client):
        rights = ["resetkeys", "~hps_et*", "-@all", *RIGHTS]
        client.execute_command("ACL", "SETUSER", "hotrow", *rights)
        overflow = RedisOverflow(margin_rows=1000, policy="least_used")
        user = {"user_name": "hotrow", "password": "battery staple"}
        store = open_store(guarded, **user)

        store.table(SPEC).load(iter([(KEYS[:500], ROWS[:500])]), Marker("digest"), keep=False)
        store.table(SPEC).open(0)
        store.tables[SPEC.name].write_flags(changed=True)
        store.tables[SPEC.name].insert(KEYS[500:], ROWS[500:])
        fetch(store)
        assert store.tables[SPEC.name].marker().digest == "digest"
        store.tables[SPEC.name].evict(KEYS[:10])
        assert store.tables[SPEC.name].count() == sum(keys.size for keys, _ in store.tables[SPEC.name].items()) == 990

        cache = open_store(guarded, overflow=overflow, **user)
        client.delete(Partition(SPEC.name, 0).marker)
        cache.table(SPEC).serve_as_cache(Truth())
        assert cache.table(SPEC).fill(Truth(), starting=False)
        cache.tables[SPEC.name].insert(KEYS[:10], ROWS[:10])
        assert cache.tables[SPEC.name].insert_absent(KEYS[:10], ROWS[:10]) == 0
        fetch(cache)
        cache.erase(SPEC.name)

    @pytest.mark.parametrize("policy", ["random", "least_used", "oldest"])
    def test_these_rights_are_enough_to_evict_rows(self, guarded, client, policy):
        client.execute_command("ACL", "SETUSER", "hotrow", "resetkeys", "~hps_et*", "-@all", *RIGHTS)
        overflow = RedisOverflow(margin_rows=10, policy=policy)
        store = open_store(guarded, overflow=overflow, user_name="hotrow", password="battery staple")
        store.table(SPEC).open(0)

        store.tables[SPEC.name].insert(KEYS, ROWS)

        assert store.tables[SPEC.name].count() <= 160

    def test_in_a_cluster_these_rights_are_enough(self, redis_cluster):
        commands = ["hset", "hget", "hmget", "hgetall", "hscan", "exists", "eval", "info", "cluster|slots", "command"]
        rights = ["reset", "on", ">battery staple", "~hps_et*", *(f"+{command}" for command in commands)]
        for node in redis_cluster.nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", "hotrow", *rights)
        store = open_store(redis_cluster.nodes[0], user_name="hotrow", password="battery staple")
        store.table(SPEC).open(0)

        store.tables[SPEC.name].insert(KEYS, ROWS)

        fetch(store)

    def test_a_password_is_not_shown(self, redis_server):
        config = RedisConfig(addresses=(redis_server.address,), password="open sesame")

        assert "open sesame" not in f"{config!r} {config}"

    def test_a_server_that_repeats_a_command_shows_no_password(self):
        reply = "ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'hotrow' 'open sesame' "

        assert str(RowParser.parse_error(reply)) == "ERR unknown command 'HELLO'"

    def test_an_address_with_a_password_is_refused_without_showing_it(self):
        with pytest.raises(ValidationError) as refused:
            RedisConfig.model_validate({"address": "redis://hotrow:sesame@127.0.0.1:6379/0"})

        assert "expected <host>:<port>" in str(refused.value)
        assert "sesame" not in str(refused.value)


class TlsProxy:
    """Speaks TLS to clients and hands what they say to a Redis server without TLS."""

    def __init__(self, server, context):
        self._server = server
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        try:
            with (
                self._context.wrap_socket(client, server_side=True) as secure,
                socket.create_connection(self._server.address) as plain,
            ):
                self._pump(secure, plain)
        except OSError:
            client.close()

    @staticmethod
    def _pump(secure, plain):
        """One request, then its replies, until there is nothing more to read on either side."""
        secure.settimeout(0.002)
        plain.settimeout(0.002)
        while True:
            for source, sink in ((secure, plain), (plain, secure)):
                try:
                    while data := source.recv(65536):
                        sink.settimeout(5)
                        sink.sendall(data)
                        sink.settimeout(0.002)
                    return
                except TimeoutError:
                    continue


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and what it vouches for: a server called redis.localhost, and a client."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=CA")
    for name in ("redis.localhost", "client"):
        (folder / "names").write_text(f"subjectAltName=DNS:{name}")
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", "csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-out", f"{name}.crt")
        openssl("x509", "-req", "-in", "csr", *signing)
    return folder


@pytest.fixture
def tls_proxy(redis_server, certificates):
    """In front of the Redis server; it wants to see a client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.crt")
    context.load_cert_chain(certificates / "redis.localhost.crt", certificates / "redis.localhost.key")
    context.verify_mode = ssl.CERT_REQUIRED
    proxy = TlsProxy(redis_server, context)
    yield proxy
    proxy.close()


def tls(certificates, **change):
    files = {
        "ca_certificate": certificates / "ca.crt",
        "client_certificate": certificates / "client.crt",
        "client_key": certificates / "client.key",
    }
    return RedisTlsConfig(**{**files, **change})


class TestTls:
    @pytest.mark.parametrize("server_name", ["", "redis.localhost"])
    def test_rows_come_through_an_encrypted_connection(self, tls_proxy, certificates, server_name):
        store = loaded_store(tls_proxy, tls=tls(certificates, server_name=server_name))

        fetch(store)
        fetch(store, KEYS[::7])

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"server_name": "another.localhost"}, "CERTIFICATE_VERIFY_FAILED.*another.localhost"),
            ({"ca_certificate": None}, "CERTIFICATE_VERIFY_FAILED"),
            ({"client_certificate": None, "client_key": None}, "redis: 127.0.0.1:.*: "),
        ],
    )
    def test_a_certificate_that_does_not_hold_is_refused(self, tls_proxy, certificates, change, reason):
        with pytest.raises(StoreError, match=reason):
            open_store(tls_proxy, tls=tls(certificates, **change))

    def test_an_error_about_a_silent_server_without_tls_names_the_key_that_asks_for_tls(
        self, redis_server, certificates
    ):
        with pytest.raises(StoreError, match=r"cannot connect: .* TLS.*remove enable_tls"):
            open_store(redis_server, tls=tls(certificates), **IMPATIENT)

    def test_an_error_about_a_server_that_answers_without_tls_names_the_key_that_asks_for_tls(self, certificates):
        def refuse():
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(b"-ERR unknown command\r\n")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=refuse)
            thread.start()
            config = RedisConfig(addresses=(listener.getsockname(),), tls=tls(certificates))
            with pytest.raises(StoreError, match=r"did not answer in TLS; .*remove enable_tls"):
                RedisStore(config)
            thread.join()

    def test_a_client_without_tls_is_an_error(self, tls_proxy):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
            open_store(tls_proxy, **IMPATIENT)

    @pytest.mark.parametrize("file", ["ca_certificate", "client_certificate", "client_key"])
    def test_a_file_that_is_not_there_is_named(self, redis_server, certificates, file):
        with pytest.raises(StoreError, match=r"redis: TLS: .*nowhere.*: No such file"):
            open_store(redis_server, tls=tls(certificates, **{file: certificates / "nowhere"}))

    def test_a_file_that_is_no_certificate_is_named(self, redis_server, certificates):
        with pytest.raises(StoreError, match=r"redis: TLS: .*client\.key: "):
            open_store(redis_server, tls=tls(certificates, ca_certificate=certificates / "client.key"))
