"""The certificates of the servers."""

import logging
import os
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from serving.background import PeriodicWorker
from serving.errors import ConfigError
from serving.frontend.watched_files import WatchedFiles

_log = logging.getLogger("hotrow.tls")
_CERTIFICATE, _KEY, _AUTHORITIES = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"

_PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: The log warns of certificates that expire within this time.
_SOON = timedelta(days=14)
#: The log says it again every day.
_DAY_S = 86_400.0
#: DER's tags of a certificate's version and of a time with a year of two digits.
_VERSION, _UTC_TIME = 0xA0, 0x17


class Tls:
    """The certificates in force: those of files, which are read again when they change. Any thread may use them.

    Attributes:
        context: for new connections. A new file gives a new context, so no session of an earlier one goes on.
        contents: the certificate, with the intermediate certificates after it, its key, and the authorities. All are in
            PEM form.
        wants_certificates: whether clients must present a certificate that one of the authorities signed.
    """

    def __init__(self, certificate: Path, key: Path | None, authorities: Path | None) -> None:
        """Read the files, and watch them until ``close``. Without ``key``, the key is in the certificate's file.

        Raises:
            ConfigError: a file cannot be read or is not what it should be.
        """
        given = {_CERTIFICATE: certificate, _KEY: key, _AUTHORITIES: authorities}
        self._files = {option: file for option, file in given.items() if file is not None}
        self.wants_certificates = authorities is not None
        self._watched = WatchedFiles(self._files, self._use)
        self._daily = PeriodicWorker("certificates", self._warn_of_expiry, _DAY_S)

    def close(self) -> None:
        """Stop watching the files."""
        self._watched.close()
        self._daily.close()

    def _use(self, contents: Sequence[bytes]) -> None:
        read = dict(zip(self._files, contents, strict=True))
        certificate = read[_CERTIFICATE]
        key = read.get(_KEY, certificate)
        authorities = [read[_AUTHORITIES]] if _AUTHORITIES in read else []
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _AlertingObject
        try:
            with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
                # Without a password, OpenSSL would ask for the password of an encrypted key.
                context.load_cert_chain(certificate_file, key_file, password="")
        except ssl.SSLError as err:
            reason = f"expected a certificate and its key, in PEM form and without a password{because(err)}"
            raise ConfigError(self._named(_CERTIFICATE, _KEY), "", reason) from err
        for authority in authorities:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                with _as_file(authority) as file:
                    context.load_verify_locations(file)
            except ssl.SSLError as err:
                reason = f"expected certificates in PEM form{because(err)}"
                raise ConfigError(self._named(_AUTHORITIES), "", reason) from err
        self.context, self.contents = context, [certificate, key, *authorities]
        self._warn_of_expiry()

    def _warn_of_expiry(self) -> None:
        certificate, _, *authorities = self.contents
        self._warn_of(self._named(_CERTIFICATE), certificate)
        for authority in authorities:
            self._warn_of(self._named(_AUTHORITIES), authority)

    def _warn_of(self, source: str, content: bytes) -> None:
        """Log a certificate that is not valid now or soon; of several, the first to expire."""
        validities = [found for pem in _PEM.findall(content.decode("latin-1")) if (found := _validity(pem))]
        if not validities:
            return
        now, (begins, ends) = datetime.now(UTC), min(validities, key=lambda validity: validity[1])
        if ends < now:
            _log.warning("%s: a certificate expired on %s, so TLS connections that need it fail", source, _shown(ends))
        elif begins > now:
            _log.warning("%s: a certificate is valid only from %s on", source, _shown(begins))
        elif ends < now + _SOON:
            _log.warning("%s: a certificate expires on %s", source, _shown(ends))

    def _named(self, *options: str) -> str:
        return ", ".join(f"{option} {self._files[option]}" for option in options if option in self._files)


class _Context(ssl.SSLContext):
    """The TLS of a server whose clients receive the alert that says why their handshake failed.

    Event loops send what a handshake has written if it goes on, not if it fails.
    """

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """See ``ssl.SSLContext.wrap_bio``."""
        connection = super().wrap_bio(incoming, outgoing, *args, **options)
        connection.outgoing = outgoing  # type: ignore[attr-defined]
        return connection


class _AlertingObject(ssl.SSLObject):
    """The TLS of one connection. A failed handshake that has written an alert asks for more bytes once."""

    outgoing: ssl.MemoryBIO
    _has_failed = False

    def do_handshake(self) -> None:
        """See ``ssl.SSLObject.do_handshake``."""
        if self._has_failed:
            raise ssl.SSLError("the handshake has failed")
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if not self.outgoing.pending:
                raise
            self._has_failed = True
            raise ssl.SSLWantReadError from None


def because(error: OSError) -> str:
    """Return the end of a message: what the system or OpenSSL says, if anything."""
    if not isinstance(error, ssl.SSLError):
        return f": {error.strerror or error}"
    return f": {error.reason.replace('_', ' ').lower()}" if error.reason else ""


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Return the path of a file in memory. OpenSSL only reads files, and the real files may change."""
    with os.fdopen(os.memfd_create("hotrow-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _validity(pem: str) -> tuple[datetime, datetime] | None:
    """Return when a certificate becomes valid and when it expires; None if the times are not in RFC 5280's form."""
    with suppress(ValueError, IndexError):
        [(_, certificate)] = _elements(ssl.PEM_cert_to_DER_cert(pem))
        _, contents = _elements(certificate)[0]
        _serial, _algorithm, _issuer, validity, *_ = (
            element for tag, element in _elements(contents) if tag != _VERSION
        )
        begins, ends = (_time(*element) for element in _elements(validity))
        return begins, ends
    return None


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tags and the contents of consecutive DER elements (X.690, 8.1)."""
    elements = []
    while der:
        tag, size_bytes, begin = der[0], der[1], 2
        if size_bytes & 0x80:
            begin += size_bytes & 0x7F
            size_bytes = int.from_bytes(der[2:begin])
        elements.append((tag, der[begin : begin + size_bytes]))
        der = der[begin + size_bytes :]
    return elements


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
