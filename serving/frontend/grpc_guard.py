"""Who may make gRPC calls: see ``serving.frontend.access``."""

from time import perf_counter
from typing import Any

from kernels.errors import HotrowError
from serving.errors import PayloadTooLargeError, RequestError
from serving.frontend.access import ANY, OPEN, Access, method_needs
from serving.frontend.access_log import log_request, repeated_headers, with_request_id
from serving.frontend.codes import codes_of
from serving.frontend.runner import MOST_INLINE_BYTES
from serving.frontend.tokens import INFER


class MethodGuard:
    """Checks the calls of one method.

    Attributes:
        name: the method's name, such as ``"ModelInfer"``.
        predicts: whether its messages are predict requests.
    """

    def __init__(self, access: Access, method: str, has_access_log: bool) -> None:
        """Guard ``/package.Service/Method``; refused calls are logged if ``has_access_log``.

        Raises:
            UnknownRouteError: the table of routes does not have this method.
        """
        self._access = access
        self.name = method.rpartition("/")[2]
        self._need = method_needs(method)
        self.predicts = self._need == INFER
        self._has_access_log = has_access_log

    def check_call(self, context: Any) -> str:
        """Check that a client may make a call, and return the name of its token; see ``Access.check``."""
        began_s = perf_counter()
        try:
            return self._access.check(self._need, self._authorization(context))
        except HotrowError as err:
            if self._has_access_log:
                given = context.invocation_metadata() or ()
                ids = repeated_headers((name.encode(), text.encode()) for name, text in given if isinstance(text, str))
                log_request("gRPC", self.name, codes_of(err)[1], began_s, with_request_id(ids), "")
            raise

    def check_size(self, data: bytes) -> None:
        """Refuse a message that would take too long to parse on the event loop; see also ``read_message``.

        Raises:
            PayloadTooLargeError: it has too many bytes.
        """
        if not self.predicts and len(data) > MOST_INLINE_BYTES:
            raise PayloadTooLargeError(
                f"the message has {len(data):,} bytes, but the server accepts {MOST_INLINE_BYTES:,}"
            )

    def check(self, message: Any, context: Any) -> None:
        """Check that a client may send a message, because a stream may outlive its token. See ``Access.check``.

        If ``message`` is None, check that the call may go on.
        """
        if not self._access.needs_tokens:
            return
        is_of_a_model = self._need == OPEN and getattr(message, "service", "") != ""  # a health check of one model
        self._access.check(ANY if is_of_a_model else self._need, self._authorization(context))

    def _authorization(self, context: Any) -> str | None:
        if not self._access.needs_tokens:
            return None
        given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if len(given) > 1:
            raise RequestError("metadata authorization: expected one value, got several")
        return given[0] if given else None
