"""The limits of the front end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the front end.

    Attributes:
        max_body_bytes: largest body, before and after decompression.
        max_inflight: maximum predict requests at a time, counted once their bodies are complete; further requests get
            429. HTTP bodies that are still arriving may together hold ``max_inflight`` times ``max_body_bytes`` more.
            So slow clients lock nobody out, and the memory of HTTP bodies stays bounded.
        body_timeout_s: maximum time for a body to arrive.
    """

    max_body_bytes: int = 16 << 20
    max_inflight: int = 256
    body_timeout_s: float = 30.0
