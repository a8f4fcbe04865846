"""Publish the rows that training changes, as messages for servers that follow. See docs/updates.md."""

from training.publishing.outbox import clear_outbox
from training.publishing.publisher import Publisher

__all__ = ["Publisher", "clear_outbox"]
