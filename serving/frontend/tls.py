"""The certificates of the servers."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of TLS, all in PEM form.

    Attributes:
        certificate: the server's certificate, then intermediate certificates.
        key: its private key; may be the same file.
        authorities: if given, clients must present a certificate that one of these authorities signed.
    """

    certificate: Path
    key: Path
    authorities: Path | None = None

    @classmethod
    def from_options(cls, certificate: Path | None, key: Path | None, authorities: Path | None) -> Self | None:
        """Check the files of ``--ssl-certfile``, ``--ssl-keyfile`` and ``--ssl-ca-certs``; None: no TLS.

        Raises:
            ConfigError: a file cannot be read or is not what it should be, or the certificate is missing.
        """
        given = {"--ssl-certfile": certificate, "--ssl-keyfile": key, "--ssl-ca-certs": authorities}
        for option, file in given.items():
            if file is not None:
                _check_readable(option, file)
        if certificate is None:
            for option, file in given.items():
                if file is not None:
                    raise ConfigError(option, "", "needs --ssl-certfile")
            return None
        tls = cls(certificate, key or certificate, authorities)
        tls._check()
        return tls

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password, OpenSSL would ask for the password of an encrypted key.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as err:
            reason = f"expected a certificate and its key, in PEM form and without a password: {err.reason or err}"
            raise ConfigError(f"--ssl-certfile {self.certificate}, --ssl-keyfile {self.key}", "", reason) from err
        if self.authorities is not None:
            try:
                context.load_verify_locations(self.authorities)
            except ssl.SSLError as err:
                reason = f"expected certificates in PEM form: {err.reason or err}"
                raise ConfigError(f"--ssl-ca-certs {self.authorities}", "", reason) from err


def _check_readable(option: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as err:
        raise ConfigError(f"{option} {file}", "", f"cannot be read: {err.strerror}") from err
