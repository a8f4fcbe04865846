"""The limits of the front end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the front end.

    Attributes:
        max_body_bytes: largest body, both as it arrives and once decompressed.
        max_inflight: largest number of predict requests at a time, counted once their bodies are complete; the next
            request is answered 429. Bodies that are still arriving may together hold ``max_inflight`` times
            ``max_body_bytes`` more, so slow clients lock nobody out and memory stays bounded.
        body_timeout_s: longest time that a body may take to arrive.
    """

    max_body_bytes: int = 16 << 20
    max_inflight: int = 256
    body_timeout_s: float = 30.0
