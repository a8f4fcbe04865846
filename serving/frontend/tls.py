"""The certificates of the servers."""

import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.errors import ConfigError
from serving.frontend.watched_files import WatchedFiles

_CERTIFICATE, _KEY, _AUTHORITIES = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"


class Tls:
    """The certificates in force: those of files, which are read again when they change. Any thread may use them.

    Attributes:
        context: for new connections. A new file gives a new context, so no session of an earlier one goes on.
        contents: the certificate, with the intermediate certificates after it, its key, and the authorities. All are in
            PEM form.
        wants_certificates: whether clients must present a certificate that one of the authorities signed.
    """

    def __init__(self, certificate: Path, key: Path, authorities: Path | None) -> None:
        """Read the files, and watch them until ``close``. The key may be in the certificate's file.

        Raises:
            ConfigError: a file cannot be read or is not what it should be.
        """
        self._files = {_CERTIFICATE: certificate, _KEY: key}
        if authorities is not None:
            self._files[_AUTHORITIES] = authorities
        self.wants_certificates = authorities is not None
        self._watched = WatchedFiles(self._files, self._use)

    def close(self) -> None:
        """Stop watching the files."""
        self._watched.close()

    def _use(self, contents: Sequence[bytes]) -> None:
        certificate, key, *authorities = contents
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
                # Without a password, OpenSSL would ask for the password of an encrypted key.
                context.load_cert_chain(certificate_file, key_file, password="")
        except ssl.SSLError as err:
            reason = f"expected a certificate and its key, in PEM form and without a password: {err.reason or err}"
            raise ConfigError(self._named(_CERTIFICATE, _KEY), "", reason) from err
        for authority in authorities:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                with _as_file(authority) as file:
                    context.load_verify_locations(file)
            except ssl.SSLError as err:
                reason = f"expected certificates in PEM form: {err.reason or err}"
                raise ConfigError(self._named(_AUTHORITIES), "", reason) from err
        self.context, self.contents = context, contents

    def _named(self, *options: str) -> str:
        return ", ".join(f"{option} {self._files[option]}" for option in options)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Return the path of a file in memory. OpenSSL only reads files, and the real files may change."""
    with os.fdopen(os.memfd_create("hotrow-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
